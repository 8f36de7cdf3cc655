#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"

namespace vivace::bench {

/// uniform: 128 tokens in, 64 out. mixed: lengths as chat traffic has them, most short and a few very long.
enum class Workload { uniform, mixed };
std::string_view name_of(Workload workload);
/// invalid_argument lists the names there are.
Result<Workload> workload_from_name(std::string_view name);

/// One request of a plan. The lengths decide how much work it is; the words do not.
struct PlannedRequest {
  std::vector<int32_t> prompt_ids;
  int64_t output_tokens = 0;  ///< generated exactly, end tokens ignored
  double arrival_s = 0;       ///< open loop: when it is sent, counted from the start
  uint64_t seed = 0;          ///< of its sampling
  bool cut = false;           ///< the drawn lengths do not fit into max_model_len
};

struct WorkloadOptions {
  Workload workload = Workload::mixed;
  int64_t requests = 64;
  double rate = 0;  ///< > 0: Poisson arrivals per second; 0: all may be sent at once
  uint64_t seed = 0;
  int64_t max_model_len = 0;  ///< prompt + output of every request stay within it
  int64_t vocab = 0;          ///< for prompts without `text_ids`: ids are drawn from [0, vocab)
  /// A tokenised text that prompts are cut out of (cyclically, each from its own offset); empty: random ids.
  std::vector<int32_t> text_ids;
};

/// The same options give the same plan on every machine.
/// Mixed: prompts log-normal with median 96 and sigma 1.2, outputs log-normal with median 48 and sigma 0.8.
/// Where the context is too short for an output the output is cut, then the prompt.
/// Fails  invalid_argument: the context is too short for the workload, or there is neither text nor vocabulary.
Result<std::vector<PlannedRequest>> plan_workload(const WorkloadOptions& options);

/// Plain prose that prompts are cut out of, written for this purpose.
std::string_view prompt_text();

}  // namespace vivace::bench
