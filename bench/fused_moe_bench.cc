#include "bench/op_bench.h"
#include "src/ops/fused_moe/cases.h"
#include "src/ops/fused_moe/table.h"

VIVACE_OP_BENCH(kFusedMoe, fused_moe_cases, FusedMoeProblem);
