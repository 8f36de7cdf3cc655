#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "src/model/model.h"
#include "src/model/tokenizer.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::model {

struct ScoreOptions {
  int64_t window = 1024;    ///< 2 .. max_model_len tokens
  int64_t max_windows = 0;  ///< 0: all
  /// Called after each window with windows done and in all; may be empty.
  std::function<void(int64_t done, int64_t total)> progress;
};

struct ScoreResult {
  double perplexity = 0;  ///< exp of the mean negative log-probability
  int64_t tokens = 0;     ///< predictions
};

/// The ids that score() reads: documents are separated by NUL, control tokens in them are plain text, and each document
/// is followed by `separator_id`. The text after the last NUL is a document unless it is empty. With `most` above 0 the ids
/// end there, and documents behind it are not read.
Result<std::vector<int32_t>> score_ids(const Tokenizer& tokenizer, std::string_view text,
                                       int32_t separator_id, int64_t most = 0);

/// Perplexity of `ids`: cut into windows that do not overlap, each read from an empty cache, all tokens of a window but
/// its first predicted. A shorter window at the end counts when it has two tokens or more. Takes over the model's KV
/// pool. Logits live for a slice of a window at a time, so memory does not grow with window times vocabulary.
/// Fails  invalid_argument: the window is out of range, or there is nothing to predict.
Result<ScoreResult> score(Model& model, std::span<const int32_t> ids, const ScoreOptions& options,
                          const Stream& stream);

}  // namespace vivace::model
