#include "src/bench/workload.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "src/core/error.h"

namespace vivace::bench {

namespace {

constexpr int64_t kUniformPrompt = 128, kUniformOutput = 64;
constexpr double kPromptMedian = 96, kPromptSigma = 1.2;
constexpr double kOutputMedian = 48, kOutputSigma = 0.8;

/// splitmix64 with our own distributions: the standard ones differ between C++ libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  /// In (0, 1].
  double uniform() { return (static_cast<double>(next() >> 11) + 1) * 0x1p-53; }
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  int64_t log_normal(double median, double sigma) {
    return std::max<int64_t>(1, std::llround(median * std::exp(sigma * normal())));
  }

 private:
  uint64_t state_;
};

std::vector<int32_t> make_prompt(const WorkloadOptions& options, int64_t length, Random& random) {
  std::vector<int32_t> ids(static_cast<size_t>(length));
  if (options.text_ids.empty()) {
    for (int32_t& id : ids) id = static_cast<int32_t>(random.below(options.vocab));
    return ids;
  }
  size_t position = static_cast<size_t>(random.below(static_cast<int64_t>(options.text_ids.size())));
  for (int32_t& id : ids) {
    id = options.text_ids[position];
    if (++position == options.text_ids.size()) position = 0;
  }
  return ids;
}

}  // namespace

std::string_view name_of(Workload workload) {
  return workload == Workload::uniform ? "uniform" : "mixed";
}

Result<Workload> workload_from_name(std::string_view name) {
  if (name == "uniform") return Workload::uniform;
  if (name == "mixed") return Workload::mixed;
  return invalid_argument("--workload is '{}', needs uniform or mixed", name);
}

Result<std::vector<PlannedRequest>> plan_workload(const WorkloadOptions& options) {
  if (options.requests < 1) return invalid_argument("--requests is {}, needs at least 1", options.requests);
  if (options.text_ids.empty() && options.vocab < 1) {
    return invalid_argument("workload: neither a tokenised text nor a vocabulary to draw prompts from");
  }
  const int64_t shortest = options.workload == Workload::uniform ? kUniformPrompt + kUniformOutput : 2;
  if (options.max_model_len < shortest) {
    return invalid_argument(
        "workload: max_model_len is {}, needs at least {}: the tokens of a request of '{}'",
        options.max_model_len, shortest, name_of(options.workload));
  }
  Random random(options.seed);
  std::vector<PlannedRequest> plan;
  double arrival = 0;
  for (int64_t i = 0; i < options.requests; ++i) {
    int64_t prompt = kUniformPrompt;
    PlannedRequest request;
    request.output_tokens = kUniformOutput;
    if (options.workload == Workload::mixed) {
      const int64_t output = random.log_normal(kOutputMedian, kOutputSigma);
      const int64_t drawn = random.log_normal(kPromptMedian, kPromptSigma);
      request.output_tokens = std::min(output, options.max_model_len - 1);
      prompt = std::min(drawn, options.max_model_len - request.output_tokens);
      request.cut = prompt < drawn || request.output_tokens < output;
    }
    request.prompt_ids = make_prompt(options, prompt, random);
    request.seed = random.next();
    if (options.rate > 0) {
      request.arrival_s = arrival;
      arrival += -std::log(random.uniform()) / options.rate;
    }
    plan.push_back(std::move(request));
  }
  return plan;
}

}  // namespace vivace::bench
