#pragma once

#include <string>
#include <string_view>

#include "src/model/config.h"
#include "vivace/status.h"

namespace vivace::model {

/// What becomes of a tensor of a Hugging Face checkpoint.
struct HfName {
  enum class Use {
    keep,       ///< under `canonical`
    mtp_layer,  ///< belongs to the multi-token-prediction layer, stored behind the last layer
    derived,    ///< can be computed: rotary frequencies of old files, fp8 scales of Q
  };
  Use use = Use::keep;
  std::string canonical;
};

/// Gives both of Hy3's layouts, Qwen3's router and the scales of fp8 keys and values the names that Checkpoint lists;
/// other names stay as they are. invalid_argument: the name is of a layer that the configuration does not have.
Result<HfName> hf_tensor_name(const ModelConfig& config, std::string_view name);

}  // namespace vivace::model
