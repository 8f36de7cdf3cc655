#include "bench/op_bench.h"
#include "src/ops/router_gemm/cases.h"
#include "src/ops/router_gemm/table.h"

VIVACE_OP_BENCH(kRouterGemm, router_gemm_cases, RouterGemmProblem);
