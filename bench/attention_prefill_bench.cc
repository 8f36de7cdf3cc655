#include "bench/op_bench.h"
#include "src/ops/attention_prefill/cases.h"
#include "src/ops/attention_prefill/table.h"

VIVACE_OP_BENCH(kAttentionPrefill, attention_prefill_cases, AttentionPrefillProblem);
