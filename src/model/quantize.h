#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/model/calibrate.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::model {

struct QuantizeOptions {
  /// fp8_static: a scale per matrix, and scales of activations, keys and values from `calibration`. fp8_block128: a
  /// scale per 128 x 128; activations get theirs at run time, keys and values from `calibration` if there is one.
  WeightFormat format = WeightFormat::fp8_static;
  const Calibration* calibration = nullptr;
  DType scale_type = DType::f32;  ///< of the weights' scales: f32 or bf16
  double margin = 1;              ///< activations may get this many times larger than calibration saw them
  int64_t max_shard_bytes = 5'000'000'000;
  /// Called now and then with bytes of the source read and in all; may be empty.
  std::function<void(int64_t done, int64_t total)> progress;
  /// Asked before each tensor and before config.json: true ends the run. May be empty.
  std::function<bool()> stop;
};

/// What became of some matrices of the model.
struct QuantizedGroup {
  std::string name;  ///< "attention", "experts", ...
  int64_t matrices = 0, bytes_before = 0, bytes_after = 0;
  double error_squares = 0, squares = 0;
  double relative_error() const;  ///< root of error_squares / squares: what the largest weights lose
  /// Weights that were not 0, and those of them that are now: below what their scale can tell from 0.
  int64_t weights = 0, lost = 0;
  double lost_share() const;
  /// Mean of |error| / |weight| over a matrix, where that is largest: what all weights lose. About 0.02 in e4m3; near 1
  /// where one weight is so large that the scale suits it alone.
  double worst_mean_error = 0;
  std::string worst_matrix;
};

/// A mean error of a matrix beyond this means that its scale does not suit most of its weights.
inline constexpr double kPoorMeanError = 0.1;

struct QuantizeResult {
  std::vector<QuantizedGroup> groups;
  int64_t kept_tensors = 0, kept_bytes = 0;  ///< copied as they were
  int64_t files = 0;                         ///< of safetensors
  int64_t unvisited_experts = 0;  ///< that calibration did not see; they take the layer's largest range
};

/// What quantize_folder() checks of its paths before it reads any weights: to ask before a long calibration.
Status check_quantize_paths(const std::string& model, const std::string& out);

/// Writes the Hugging Face folder `model`, of f32, f16 or bf16 weights, as the fp8 folder `out`: the matrices of the
/// layers in e4m3 with scales beside them, everything else as it is, experts one by one whatever the source's
/// layout; then the files that a model folder needs beside them (tokenizer, chat template, generation_config.json,
/// licence, notice and model card, nothing else), and config.json with its quantization_config last, so that an
/// unfinished folder cannot be loaded. One matrix is in memory at a time.
/// Fails  invalid_argument: `out` exists and is not empty, an option is out of range, a number of a tensor is not
///        finite, or fp8_static has no calibration. unsupported: the model is a GGUF file, or fp8 already. io_error:
///        writing failed. cancelled: `stop` said so. What a failed run had written is removed.
Result<QuantizeResult> quantize_folder(const std::string& model, const std::string& out,
                                       const QuantizeOptions& options, const Stream& stream);

}  // namespace vivace::model
