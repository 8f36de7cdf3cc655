#include "bench/op_bench.h"
#include "src/ops/silu_mul/cases.h"
#include "src/ops/silu_mul/table.h"

VIVACE_OP_BENCH(kSiluMul, silu_mul_cases, SiluMulProblem);
