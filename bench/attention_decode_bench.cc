#include "bench/op_bench.h"
#include "src/ops/attention_decode/cases.h"
#include "src/ops/attention_decode/table.h"

VIVACE_OP_BENCH(kAttentionDecode, attention_decode_cases, AttentionDecodeProblem);
