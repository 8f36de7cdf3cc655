#include "src/model/score.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/cpu/thread_pool.h"
#include "src/model/memory.h"

namespace vivace::model {

namespace {

constexpr int64_t kLogitBytes = int64_t{32} << 20;  // of one slice

/// Log-probability of `id`, the sum in double: 10^5 small terms would lose three digits in fp32.
double log_probability(const float* logits, int64_t vocab, int32_t id) {
  const float largest = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i] - largest));
  return static_cast<double>(logits[id]) - largest - std::log(sum);
}

/// Reads windows through one request of the model, slice by slice.
class Scorer {
 public:
  Scorer(Model& model, int64_t window, const Stream& stream) : model_(model), stream_(stream) {
    const ModelOptions& options = model.options();
    vocab_ = model.config().vocab;
    slice_ = std::clamp<int64_t>(kLogitBytes / (4 * vocab_), 1, std::min(options.max_tokens, window));
    page_table_.resize(static_cast<size_t>((window + options.page_tokens - 1) / options.page_tokens));
    std::iota(page_table_.begin(), page_table_.end(), 0);
    positions_.resize(static_cast<size_t>(window));
    std::iota(positions_.begin(), positions_.end(), 0);
    slots_.assign(positions_.begin(), positions_.end());  // page i of the request is page i of the pool
  }

  Status prepare() {
    VIVACE_TRY(model_.allocate_pages(static_cast<int64_t>(page_table_.size()), stream_));
    VIVACE_TRY_ASSIGN(memory_, Memory::reserve(slice_ * vocab_ * 4, "logits", stream_));
    if (stream_.device == Device::cuda) {
      VIVACE_TRY_ASSIGN(host_logits_, device::Buffer::pinned(stream_.ordinal, memory_.bytes()));
    }
    return {};
  }

  /// Sum of the log-probabilities of all tokens but the first.
  Result<double> window(std::span<const int32_t> ids) {
    double sum = 0;
    const auto length = static_cast<int64_t>(ids.size());
    for (int64_t begin = 0; begin + 1 < length; begin += slice_) {
      const int64_t tokens = std::min(slice_, length - begin);
      const int64_t rows =
          std::min(tokens, length - 1 - begin);  // the last token of a window predicts nothing
      VIVACE_TRY_ASSIGN(const double part, slice(ids, begin, tokens, rows));
      sum += part;
    }
    return sum;
  }

 private:
  Result<double> slice(std::span<const int32_t> ids, int64_t begin, int64_t tokens, int64_t rows) {
    const int32_t query_start[2] = {0, static_cast<int32_t>(tokens)};
    const int32_t kv_length = static_cast<int32_t>(begin + tokens);
    const ForwardInput input{.token_ids = ids.subspan(begin, tokens),
                             .positions = std::span(positions_).subspan(begin, tokens),
                             .slots = std::span(slots_).subspan(begin, tokens),
                             .query_start = query_start,
                             .kv_lengths = {&kv_length, 1},
                             .page_table = page_table_,
                             .max_pages = static_cast<int64_t>(page_table_.size()),
                             .logit_rows = std::span(slots_).first(rows)};
    Tensor logits = memory_.tensor(DType::f32, {rows, vocab_});
    VIVACE_TRY(model_.forward(input, logits, stream_));
    if (stream_.device == Device::cuda) {
      VIVACE_TRY(device::copy_to_host(host_logits_.data(), logits.data, logits.bytes(), stream_));
      VIVACE_TRY(device::synchronize(stream_));
      logits = Tensor(host_logits_.data(), DType::f32, {rows, vocab_});
    }
    values_.resize(static_cast<size_t>(rows));
    cpu::parallel_for(stream_.threads, rows, [&](int64_t row, int) {
      values_[row] = log_probability(logits.at(row).as<float>(), vocab_, ids[begin + row + 1]);
    });
    return std::accumulate(values_.begin(), values_.end(), 0.0);
  }

  Model& model_;
  const Stream& stream_;
  int64_t vocab_ = 0, slice_ = 0;
  std::vector<int32_t> page_table_, positions_;
  std::vector<int64_t> slots_;
  std::vector<double> values_;
  Memory memory_;
  device::Buffer host_logits_;  // where a GPU's logits are read
};

Result<ScoreResult> score_windows(Model& model, std::span<const int32_t> ids, const ScoreOptions& options,
                                  const Stream& stream, int64_t windows) {
  const auto length = static_cast<int64_t>(ids.size());
  Scorer scorer(model, options.window, stream);
  VIVACE_TRY(scorer.prepare());
  ScoreResult result;
  double sum = 0;
  for (int64_t w = 0; w < windows; ++w) {
    const int64_t begin = w * options.window;
    const auto window = ids.subspan(begin, std::min(options.window, length - begin));
    VIVACE_TRY_ASSIGN(const double part, scorer.window(window));
    if (std::isnan(part))
      return error(Code::internal,
                   "score: the logits of window {} are not numbers (NaN), so the text has no perplexity", w);
    sum += part;
    result.tokens += static_cast<int64_t>(window.size()) - 1;
    if (options.progress) options.progress(w + 1, windows);
  }
  result.perplexity = std::exp(-sum / static_cast<double>(result.tokens));
  return result;
}

}  // namespace

Result<std::vector<int32_t>> score_ids(const Tokenizer& tokenizer, std::string_view text,
                                       int32_t separator_id, int64_t most) {
  std::vector<int32_t> ids;
  const auto limit = most > 0 ? static_cast<size_t>(most) : SIZE_MAX;
  while (!text.empty() && ids.size() < limit) {
    const size_t end = std::min(text.find('\0'), text.size());
    VIVACE_TRY_ASSIGN(const std::vector<int32_t> document,
                      tokenizer.encode(text.substr(0, end), SpecialTokens::as_text));
    ids.insert(ids.end(), document.begin(), document.end());
    ids.push_back(separator_id);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  ids.resize(std::min(ids.size(), limit));
  return ids;
}

Result<ScoreResult> score(Model& model, std::span<const int32_t> ids, const ScoreOptions& options,
                          const Stream& stream) {
  if (options.window < 2 || options.window > model.max_model_len()) {
    return invalid_argument("window is {}, needs 2 to the model's context of {} tokens", options.window,
                            model.max_model_len());
  }
  const int64_t vocab = model.config().vocab;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      return invalid_argument("ids[{}] is {}, needs 0 to {} (vocabulary of {})", i, ids[i], vocab - 1, vocab);
    }
  }
  const auto length = static_cast<int64_t>(ids.size());
  // A last window of one token predicts nothing.
  int64_t windows = (length + options.window - 1) / options.window;
  if (length % options.window == 1) --windows;
  if (options.max_windows > 0) windows = std::min(windows, options.max_windows);
  if (windows < 1) return invalid_argument("the text has {} tokens, needs 2 or more to predict one", length);
  return guarded("score", [&] { return score_windows(model, ids, options, stream, windows); });
}

}  // namespace vivace::model
