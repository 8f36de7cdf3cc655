#pragma once

#include "src/core/dispatch.h"
#include "vivace/embedding.h"

namespace vivace {

Status embedding_reference(const EmbeddingArgs& args, const Stream& stream);
Status embedding_cpu(const EmbeddingArgs& args, const Stream& stream);

/// tokens, hidden, table.
Facts embedding_facts(const EmbeddingArgs& args);

inline constexpr Row<EmbeddingArgs> kEmbeddingRows[] = {
    {"cpu.rows", Device::cpu, {}, embedding_cpu, "unpacks one table row per token, tokens over threads"},
    {"reference", Device::cpu, {}, embedding_reference, "element by element"},
};

inline constexpr Operator<EmbeddingArgs> kEmbedding = {"embedding", "rows of a table by id", embedding_facts,
                                                       kEmbeddingRows};

}  // namespace vivace
