#pragma once

#include <string>
#include <string_view>

#include "src/model/checkpoint.h"
#include "src/model/gguf.h"

namespace vivace::model {

/// The configuration that a file's metadata and tensors describe: general.architecture `llama` (rows of Q and
/// K permuted by the converter, so RoPE is interleaved) or `qwen3moe` (NeoX). invalid_argument and
/// unsupported name the key.
Result<ModelConfig> gguf_config(const GgufFile& file);

/// tokenizer.* metadata; not present() when the file has none.
Result<TokenizerSource> gguf_tokenizer(const GgufFile& file);

/// The canonical name (see Checkpoint) of a tensor of the file. unsupported: such a model has no place for
/// it, so that leaving it out would change the result.
Result<std::string> gguf_tensor_name(const ModelConfig& config, std::string_view name);

}  // namespace vivace::model
