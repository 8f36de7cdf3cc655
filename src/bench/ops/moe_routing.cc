#include "src/bench/ops/moe_routing.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace vivace::bench {

namespace {

/// Draws places 0, 1, ... with weights of 1, 1/2, 1/3, ...
class Zipf {
 public:
  explicit Zipf(int64_t places) {
    for (int64_t r = 1; r <= places; ++r) {
      sums_.push_back((sums_.empty() ? 0 : sums_.back()) + 1 / static_cast<double>(r));
    }
  }
  int64_t operator()(std::mt19937& rng) const {
    const double drawn = sums_.back() * static_cast<double>(rng()) * 0x1p-32;
    return std::ranges::upper_bound(sums_, drawn) - sums_.begin();
  }

 private:
  std::vector<double> sums_;
};

}  // namespace

RoutedTokens route_tokens(Routing routing, int64_t tokens, int64_t experts, int64_t top_k, uint32_t seed) {
  std::mt19937 rng(seed);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound));
  };
  // By popularity. Neighbours in memory are no neighbours in it.
  std::vector<int32_t> order(static_cast<size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  if (routing != Routing::uniform) {
    for (int64_t i = experts - 1; i > 0; --i) std::swap(order[i], order[below(i + 1)]);
  }
  // Sets of one case have weights of their own to read, as far as there are experts.
  const auto hot = static_cast<int32_t>(seed % experts);
  const int64_t choices = experts_to_choose(routing, experts);
  const Zipf zipf(experts);
  RoutedTokens routed;
  std::vector<bool> visited(static_cast<size_t>(experts));
  std::vector<int64_t> last_token(static_cast<size_t>(experts), -1);
  const auto choose = [&](int32_t id) {
    routed.ids.push_back(id);
    routed.weights.push_back(static_cast<float>(0.05 + 0.25 * static_cast<double>(below(1000)) / 1000.0));
    if (id < 0) return;
    ++routed.rows;
    visited[id] = true;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < top_k;) {
      int32_t id = hot;
      if (routing == Routing::one_local) {
        if (j > 0) id = -1;
      } else if (routing != Routing::one) {
        id = order[routing == Routing::zipf ? zipf(rng) : below(choices)];
        if (std::exchange(last_token[id], t) == t) continue;
      }
      choose(id);
      ++j;
    }
  }
  routed.visited_experts = std::ranges::count(visited, true);
  return routed;
}

MoeCost moe_cost(const OpWorkload& workload, std::span<const RoutedTokens> routings) {
  const auto number = [&](std::string_view field) { return static_cast<double>(workload.number(field)); };
  double experts = 0, rows = 0;
  for (const RoutedTokens& routed : routings) {
    experts += static_cast<double>(routed.visited_experts) / static_cast<double>(routings.size());
    rows += static_cast<double>(routed.rows) / static_cast<double>(routings.size());
  }
  const bool bf16 = workload.text("quant") == "bf16";
  const double element = bf16 ? 2 : 1, expert = 3 * number("hidden") * number("intermediate");
  return {.floor = {.bytes = experts * expert * element + number("tokens") * number("hidden") * (element + 2),
                    .flops = 2 * expert * rows,
                    .flop_rate = bf16 ? kBf16Rate : kFp8Rate},
          .out_bytes = 2 * number("hidden") * rows};
}

double MoeCost::formula_us() const {
  constexpr double kL2Keeps = 40e6, kLaunches = 10, kMemory = 1.08, kProducts = 1.36, kShorter = 0.324;
  const double bytes = floor.bytes + (out_bytes > kL2Keeps ? out_bytes : 0);
  const double memory = kMemory * 1e6 * bytes / kReadRate;
  const double products = kProducts * 1e6 * floor.flops / floor.flop_rate;
  return kLaunches + std::max(memory, products) + kShorter * std::min(memory, products);
}

}  // namespace vivace::bench
