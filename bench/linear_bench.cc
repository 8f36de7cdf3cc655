#include "bench/op_bench.h"
#include "src/ops/linear/cases.h"
#include "src/ops/linear/table.h"

VIVACE_OP_BENCH(kLinear, linear_cases, LinearProblem);
