#include "bench/op_bench.h"
#include "src/ops/route_top_k/cases.h"
#include "src/ops/route_top_k/table.h"

VIVACE_OP_BENCH(kRouteTopK, route_top_k_cases, RouteTopKProblem);
