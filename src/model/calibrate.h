#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/model/checkpoint.h"
#include "src/model/score.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::model {

/// The largest magnitudes of a layer's activations, by what they are multiplied by; 0 where nothing was seen.
struct LayerRanges {
  float qkv = 0, o = 0;
  float mlp = 0;                    ///< gate and up of a dense MLP, or of all experts: they get the same rows
  float down = 0;                   ///< of a dense MLP
  std::vector<float> experts_down;  ///< 0: no token visited the expert
  float shared_down = 0;
  float k = 0, v = 0;  ///< as they are stored, K behind norm and rotation
};

struct Calibration {
  std::vector<LayerRanges> layers;
  ScoreResult score;  ///< of the unquantised model on the same text
};

/// Runs an unquantised model over `ids` on a CPU stream, in windows as score() does, and watches its activations.
/// Fails  as Model::load() and score() do. unsupported: the stream is a GPU's, or the model is fp8 already.
///        invalid_argument: an activation was not finite; the message says where.
Result<Calibration> calibrate(const Checkpoint& checkpoint, std::span<const int32_t> ids,
                              const ScoreOptions& options, const Stream& stream);

}  // namespace vivace::model
