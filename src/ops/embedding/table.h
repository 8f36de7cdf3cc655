#pragma once

#include "src/core/dispatch.h"
#include "vivace/embedding.h"

namespace vivace {

Status embedding_reference(const EmbeddingArgs& args, const Stream& stream);
Status embedding_cpu(const EmbeddingArgs& args, const Stream& stream);
Status embedding_cuda(const EmbeddingArgs& args, const Stream& stream);

/// tokens, hidden, table, y.
Facts embedding_facts(const EmbeddingArgs& args);

// Models in block formats are unpacked when they are loaded for a GPU.
inline constexpr Need kEmbeddingCudaNeeds[] = {
    {"table", Need::dtype_in, dtypes_mask(DType::f32, DType::bf16, DType::f16)},
    {"compute_capability", Need::at_least, 80}};

inline constexpr Row<EmbeddingArgs> kEmbeddingRows[] = {
#if VIVACE_CUDA
    {"cuda.gather", Device::cuda, kEmbeddingCudaNeeds, embedding_cuda,
     "a block per token; zeros for ids outside"},
#endif
    {"cpu.rows", Device::cpu, {}, embedding_cpu, "unpacks one table row per token, tokens over threads"},
    {"reference", Device::cpu, {}, embedding_reference, "element by element"},
};

inline constexpr Operator<EmbeddingArgs> kEmbedding = {"embedding", "rows of a table by id", embedding_facts,
                                                       embedding_cost, kEmbeddingRows};

}  // namespace vivace
