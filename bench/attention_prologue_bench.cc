#include "bench/op_bench.h"
#include "src/ops/attention_prologue/cases.h"
#include "src/ops/attention_prologue/table.h"

VIVACE_OP_BENCH(kAttentionPrologue, attention_prologue_cases, AttentionPrologueProblem);
