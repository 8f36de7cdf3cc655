#include "bench/op_bench.h"
#include "src/ops/grouped_gemm/cases.h"
#include "src/ops/grouped_gemm/table.h"

VIVACE_OP_BENCH(kGroupedGemm, grouped_gemm_cases, GroupedGemmProblem);
