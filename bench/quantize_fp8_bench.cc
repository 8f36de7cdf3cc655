#include "bench/op_bench.h"
#include "src/ops/quantize_fp8/cases.h"
#include "src/ops/quantize_fp8/table.h"

VIVACE_OP_BENCH(kQuantizeFp8, quantize_fp8_cases, QuantizeFp8Problem);
