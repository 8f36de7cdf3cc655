#include "bench/op_bench.h"
#include "src/ops/choose_experts/cases.h"
#include "src/ops/choose_experts/table.h"

VIVACE_OP_BENCH(kChooseExperts, choose_experts_cases, ChooseExpertsProblem);
