#pragma once

// How sm90.cluster lays a call over clusters. Plain arithmetic: tests need no GPU for it.

#include <algorithm>
#include <cstdint>

#include "src/ops/route_top_k/memory.h"
#include "src/ops/router_gemm/sm90_plan.h"

namespace vivace::router {

/// A cluster of 16 has all experts of 8 or 16 tokens, and a CTA chooses for one of them. Two CTAs share an eighth of k, each with half
/// of the experts. A warp multiplies `tiles` of 16 experts by a step of k; `parts` warps share a step.
struct ClusterPlan {
  static constexpr int kCtas = 16, kHalves = kCtas / kPieces;
  static constexpr int kMostWarps = 16;                     // so that a thread has 128 registers
  static constexpr int kMostTiles = 3, kMostTermTiles = 4;  // of a warp: 64 of them
  static constexpr int kMostTerms = 2;
  static constexpr int64_t kMostExperts = 32 * kMostWarps;

  int tiles, parts, most_steps;  ///< steps of an eighth
  int warps, warps_of_crew;      ///< those of a crew choose
  int token_tiles;               ///< of 8
  uint32_t inverse;              ///< of the pairs of experts of a half, times 2^32 and rounded up
  // Of shared memory: where things begin. The weight comes first.
  int sums_at, received_at, crew_at, barrier_at, bytes;

  constexpr int experts_of_half() const { return 16 * tiles * parts; }
  /// Of the sums of a token: what a warp stores at once lies in different banks.
  constexpr int pitch() const { return experts_of_half() + 4; }
};

/// Warps that such a router needs of a CTA, at most kMostWarps where it fits; `tiles` of a warp are those with which they are fewest,
/// and of equals those that leave the most registers.
constexpr int64_t cluster_warps(int64_t experts, int64_t hidden, int terms, int* tiles = nullptr) {
  const auto up = [](int64_t n, int64_t of) { return (n + of - 1) / of; };
  const int64_t steps = up(steps_of(hidden), kPieces), tiles_of_half = up(experts, 16 * ClusterPlan::kHalves);
  int64_t fewest = 0;
  for (int each = 1; each <= ClusterPlan::kMostTiles && each * terms <= ClusterPlan::kMostTermTiles; ++each) {
    const int64_t warps = std::max(up(tiles_of_half, each) * steps, up(experts, 32));
    // As many as there are anyway are welcome.
    if (fewest > 0 && (warps >= fewest || fewest <= ClusterPlan::kMostWarps)) continue;
    fewest = warps;
    if (tiles != nullptr) *tiles = each;
  }
  return fewest;
}

/// Of a call that fits, on a device that holds so many clusters at once.
constexpr ClusterPlan cluster_plan(const Problem& p, int64_t top_k, int64_t groups, int clusters) {
  const auto up = [](int64_t n, int64_t of) { return static_cast<int>((n + of - 1) / of); };
  ClusterPlan plan = {};
  plan.warps = static_cast<int>(cluster_warps(p.experts, p.hidden, p.terms, &plan.tiles));
  plan.parts = up(p.experts, 16 * ClusterPlan::kHalves * plan.tiles);
  plan.most_steps = up(steps_of(p.hidden), kPieces);
  plan.warps_of_crew = up(p.experts, 32);
  plan.token_tiles = up(p.tokens, 8) > clusters ? 2 : 1;
  const uint64_t pairs = static_cast<uint64_t>(plan.experts_of_half()) / 2;
  plan.inverse = static_cast<uint32_t>(((uint64_t{1} << 32) + pairs - 1) / pairs);
  plan.sums_at = plan.parts * plan.most_steps * plan.tiles * p.terms * 16 * 2 * kStep;
  plan.received_at = plan.sums_at + 4 * plan.most_steps * 8 * plan.token_tiles * plan.pitch();
  plan.crew_at = plan.received_at + 4 * kPieces * 4 * up(p.experts, 4);
  plan.barrier_at = plan.crew_at + route::kCrewBytes +
                    static_cast<int>(route::bytes_of_crew(32 * plan.warps_of_crew, 1, top_k, groups));
  plan.bytes = plan.barrier_at + 16;
  return plan;
}

}  // namespace vivace::router
