#include "src/bench/ops/suite.h"

#include <vector>

#include "src/bench/ops/suites.h"
#include "src/core/error.h"

namespace vivace::bench {

Result<std::unique_ptr<PreparedOp>> PreparedOp::through_library(std::string_view row, const Stream&) {
  return not_found("{} has no library row '{}'", this->row(), row);
}

std::span<const OpSuite> op_suites() {
  static const std::vector<OpSuite> all = {kRoofSuite,       kAttentionDecodeSuite, kAttentionPrefillSuite, kFusedMoeSuite,
                                           kGroupedGemmSuite, kRouterGemmSuite,      kSamplerSuite,          kLayerSuite};
  return all;
}

Status check_field(const OpWorkload& workload, std::string_view field, int64_t low, int64_t high) {
  const int64_t value = workload.number(field);
  if (value >= low && value <= high) return {};
  return invalid_argument("{} {}: {} is {}, needs {} to {}", workload.suite, workload.name, field, value, low, high);
}

}  // namespace vivace::bench
