#include "bench/op_bench.h"
#include "src/ops/rms_norm/cases.h"
#include "src/ops/rms_norm/table.h"

VIVACE_OP_BENCH(kRmsNorm, rms_norm_cases, RmsNormProblem);
