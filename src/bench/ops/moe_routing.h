#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "src/bench/ops/suite.h"

namespace vivace::bench {

/// Which experts the tokens of a case have. A token's experts differ, but for `one`.
enum class Routing {
  uniform,  ///< all alike
  zipf,     ///< the r-th most popular with a weight of 1 / r; a draw says which is which
  half,     ///< half of them, drawn, all alike; the others have no row
  one,  ///< every choice of every token is one expert, of the next seed the next: uniform's rows in one group
  one_local,  ///< that one is the first choice of every token; the others are of other ranks (id -1)
};
inline constexpr std::array<std::string_view, 5> kRoutings = {"uniform", "zipf", "half", "one", "one_local"};

/// Experts that tokens choose among.
constexpr int64_t experts_to_choose(Routing routing, int64_t experts) {
  return routing == Routing::half ? experts - experts / 2 : experts;
}

struct RoutedTokens {
  std::vector<int32_t> ids;               ///< [tokens, top_k]
  std::vector<float> weights;             ///< [tokens, top_k]
  int64_t visited_experts = 0, rows = 0;  ///< experts that have rows, and (token, choice) pairs that are rows
};

/// The same for the same arguments on every machine. Where a token's experts differ, top_k is at most experts_to_choose().
RoutedTokens route_tokens(Routing routing, int64_t tokens, int64_t experts, int64_t top_k, uint32_t seed);

/// What a case of fused_moe needs with its own routing.
struct MoeCost {
  Floor floor;
  double out_bytes = 0;  ///< of the rows' outputs in bf16, before they are summed; not in the floor

  /// The formula that the targets of the suite were made by, found from them: it gives each of the 72 to 0.1 us where 0.95 of
  /// the fastest public kernel is not less. With M the floor's bytes at 4.5 TB/s, and the outputs' where they are more than the
  /// L2 keeps, times 1.08, and C the operations' time times 1.36: 10 us + max(M, C) + 0.324 min(M, C).
  double formula_us() const;
};

/// The mean of these routings, each of all tokens: weights of the visited experts once, x and y; products of the rows alone.
MoeCost moe_cost(const OpWorkload& workload, std::span<const RoutedTokens> routings);

}  // namespace vivace::bench
