#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "src/bench/ops/suite.h"

// The suites, one file each.

namespace vivace::bench {

extern const OpSuite kRoofSuite, kAttentionDecodeSuite, kAttentionPrefillSuite, kFusedMoeSuite,
    kGroupedGemmSuite, kRouterGemmSuite, kChooseExpertsSuite, kSamplerSuite, kLayerSuite;

/// An operator of the class Prepared, ready to be timed.
template <class Prepared, class... Args>
Result<std::unique_ptr<PreparedOp>> prepared(const Stream& stream, Args&&... args) {
  auto op = std::make_unique<Prepared>(std::forward<Args>(args)...);
  VIVACE_TRY(op->prepare(stream));
  return std::unique_ptr<PreparedOp>(std::move(op));
}

/// invalid_argument unless low <= value <= high.
Status check_field(const OpWorkload& workload, std::string_view field, int64_t low, int64_t high);
/// invalid_argument unless the field is one of these; gives its place among them.
Result<size_t> choice_of(const OpWorkload& workload, std::string_view field,
                         std::span<const std::string_view> values);
inline Result<size_t> choice_of(const OpWorkload& workload, std::string_view field,
                                std::initializer_list<std::string_view> values) {
  return choice_of(workload, field, std::span(values.begin(), values.size()));
}
/// invalid_argument unless heads_q, heads_kv and head_dim are an attention's: heads_q a multiple of heads_kv, head_dim of 8.
Status check_heads(const OpWorkload& workload);
/// invalid_argument unless the workload's tensors, so many bytes in all, fit on one GPU.
Status check_memory(const OpWorkload& workload, double bytes);
/// An error about a field: "suite case: field is value, needs ...".
Status refuse_field(const OpWorkload& workload, std::string_view field, std::string_view needs);

}  // namespace vivace::bench
