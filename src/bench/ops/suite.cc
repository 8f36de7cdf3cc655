#include "src/bench/ops/suite.h"

#include <fmt/format.h>

#include <vector>

#include "src/bench/ops/suites.h"
#include "src/core/error.h"

namespace vivace::bench {

Result<std::unique_ptr<PreparedOp>> PreparedOp::through_library(std::string_view row, const Stream&) {
  return not_found("{} has no library row '{}'", this->row(), row);
}

std::span<const OpSuite> op_suites() {
  static const std::vector<OpSuite> all = {kRoofSuite,          kAttentionDecodeSuite, kAttentionPrefillSuite,
                                           kFusedMoeSuite,      kGroupedGemmSuite,     kRouterGemmSuite,
                                           kChooseExpertsSuite, kSamplerSuite,         kLayerSuite};
  return all;
}

Status check_field(const OpWorkload& workload, std::string_view field, int64_t low, int64_t high) {
  const int64_t value = workload.number(field);
  if (value >= low && value <= high) return {};
  return refuse_field(workload, field, fmt::format("{} to {}", low, high));
}

Result<size_t> choice_of(const OpWorkload& workload, std::string_view field,
                         std::span<const std::string_view> values) {
  const std::string text = workload.text(field);
  std::string needs;
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string_view value = values[i];
    if (text == value) return i;
    needs += (i == 0 ? "" : i + 1 < values.size() ? ", " : " or ") + std::string(value);
  }
  return refuse_field(workload, field, needs);
}

Status check_heads(const OpWorkload& workload) {
  constexpr int64_t kMostHeads = 1024;
  VIVACE_TRY(check_field(workload, "heads_q", 1, kMostHeads));
  VIVACE_TRY(check_field(workload, "heads_kv", 1, kMostHeads));
  const int64_t heads_kv = workload.number("heads_kv");
  if (workload.number("heads_q") % heads_kv != 0) {
    return refuse_field(workload, "heads_q", fmt::format("a multiple of heads_kv = {}", heads_kv));
  }
  VIVACE_TRY(check_field(workload, "head_dim", 8, 256));
  return workload.number("head_dim") % 8 == 0 ? Status()
                                              : refuse_field(workload, "head_dim", "a multiple of 8");
}

Status check_memory(const OpWorkload& workload, double bytes) {
  constexpr double kMostBytes = 128e9;  // of an H200's 141
  if (bytes <= kMostBytes) return {};
  return invalid_argument("{}: the tensors take {:.0f} GB, needs at most {:.0f}", describe(workload),
                          bytes * 1e-9, kMostBytes * 1e-9);
}

Status refuse_field(const OpWorkload& workload, std::string_view field, std::string_view needs) {
  const auto own = std::ranges::find(workload.fields, field, &OpWorkload::Field::name);
  const std::string value = own == workload.fields.end() ? "missing" : describe(own->value);
  return invalid_argument("{} {}: {} is {}, needs {}", workload.suite, workload.name, field, value, needs);
}

}  // namespace vivace::bench
