#pragma once

// How the rows for compute capability 9.0 lay a call over CTAs. Plain arithmetic: tests need no GPU for it.

#include <algorithm>
#include <cstdint>

namespace vivace::router {

inline constexpr int kStep = 64;     // of k
inline constexpr int kPieces = 8;    // of k, where a score does not depend on how many tokens there are
inline constexpr int kMostCtas = 8;  // of a cluster, that share k

constexpr int64_t steps_of(int64_t hidden) {
  return (hidden + kStep - 1) / kStep;
}

struct Problem {
  int64_t tokens, experts, hidden;
  int terms;
};

/// CTAs that the device holds at once, one an SM, in clusters of that many: [1] to [kMostCtas]. Clusters do not cross the
/// parts of a GPU, so large ones leave SMs over.
struct Residents {
  int ctas[kMostCtas + 1];
};

/// sm90_few.cu: a CTA has 16 tokens and 8 experts; a cluster of `ctas`, 2, 4 or 8, shares k. 0 where a tile is better.
struct FewPlan {
  static constexpr int kTokens = 16, kExperts = 8, kWarps = 8;
  int ctas;
};

constexpr FewPlan few_plan(const Problem& p) {
  constexpr int64_t kResident = 264;               // two an SM
  constexpr int64_t kRound = 2 * FewPlan::kWarps;  // steps that the warps of a CTA have under way
  constexpr int64_t kMostSteps = 200;              // of a CTA: what its sums may take of shared memory
  const int64_t steps = steps_of(p.hidden);
  const int64_t tiles = (p.tokens + FewPlan::kTokens - 1) / FewPlan::kTokens *
                        ((p.experts + FewPlan::kExperts - 1) / FewPlan::kExperts);
  int ctas = 2;
  while (ctas < kMostCtas &&
         (steps > kMostSteps * ctas || (steps > kRound * ctas && tiles * ctas * 2 <= kResident)))
    ctas *= 2;
  // Tokens that take more than one round are loaded by too many CTAs.
  const bool fits = tiles * ctas <= kResident && (steps <= kRound * ctas || p.tokens <= FewPlan::kTokens / 2);
  return {fits && steps <= kMostSteps * ctas ? ctas : 0};
}

/// sm90_tile.cu: tiles of groups · 64 tokens by `columns` experts, k shared by `ctas` of a cluster.
struct TilePlan {
  int groups, columns, ctas;
  bool in_pieces = false;  ///< the order of sums of sm90_few.cu
  constexpr int64_t tiles(const Problem& p) const {
    return (p.tokens + 64 * groups - 1) / (64 * groups) * ((p.experts + columns - 1) / columns);
  }
};

/// With kPieces CTAs: the smallest tile that needs one wave.
constexpr TilePlan pieces_plan(const Problem& p, const Residents& residents) {
  constexpr TilePlan kTiles[] = {
      {1, 32, kPieces, true}, {1, 64, kPieces, true}, {2, 64, kPieces, true}, {2, 128, kPieces, true}};
  for (const TilePlan& plan : kTiles)
    if (plan.tiles(p) * kPieces <= residents.ctas[kPieces]) return plan;
  return {2, 192, kPieces, true};
}

/// The plan that takes the fewest cycles by a model fitted to an H200: a step takes as long as its products or its bytes, the
/// parts of a tile are added at a rate, and a wave costs its start.
constexpr TilePlan prompt_plan(const Problem& p, const Residents& residents) {
  constexpr double kBytesPerCycle = 44, kStart = 500, kMergePerColumn = 12;
  TilePlan best = {};
  double least = 0;
  for (const int columns : {64, 96, 128, 192}) {
    if (columns == 192 && p.terms == 3) continue;  // no registers are left for totals
    for (int ctas = 1; ctas <= kMostCtas; ++ctas) {
      if (columns == 64 && ctas < 4) continue;  // two of these share an SM: the model does not hold
      const TilePlan plan = {2, columns, ctas};
      const int64_t waves = (plan.tiles(p) * ctas + residents.ctas[ctas] - 1) / residents.ctas[ctas];
      const int64_t steps = (steps_of(p.hidden) + ctas - 1) / ctas;
      const double products = 4.0 * p.terms * columns;
      const double bytes = (128.0 + p.terms * columns) * 2 * kStep;
      const double step = std::max(products, bytes / kBytesPerCycle);
      const double merge = ctas == 1 ? 0 : kMergePerColumn * columns * std::min(ctas, 4);
      const double cycles = static_cast<double>(waves) * (static_cast<double>(steps) * step + kStart + merge);
      if (best.columns == 0 || cycles < least) best = plan, least = cycles;
    }
  }
  return best;
}

}  // namespace vivace::router
