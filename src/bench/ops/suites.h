#pragma once

#include "src/bench/ops/suite.h"

// The suites, one file each.

namespace vivace::bench {

extern const OpSuite kRoofSuite, kAttentionDecodeSuite, kAttentionPrefillSuite, kFusedMoeSuite, kGroupedGemmSuite,
    kRouterGemmSuite, kSamplerSuite, kLayerSuite;

/// invalid_argument unless low <= value <= high.
Status check_field(const OpWorkload& workload, std::string_view field, int64_t low, int64_t high);

}  // namespace vivace::bench
