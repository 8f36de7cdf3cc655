#include "bench/op_bench.h"
#include "src/ops/embedding/cases.h"
#include "src/ops/embedding/table.h"

VIVACE_OP_BENCH(kEmbedding, embedding_cases, EmbeddingProblem);
