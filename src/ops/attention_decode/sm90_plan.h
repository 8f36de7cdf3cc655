#pragma once

// How the sm90.* rows lay a call over warps, CTAs and clusters: what host and kernel agree on.

#include <cstdint>

namespace vivace::attention_sm90 {

/// CTAs of a cluster: two SMs are neighbours everywhere, so that clusters of two leave none idle.
inline constexpr int kClusterLog2 = 1, kClusterCtas = 1 << kClusterLog2;
inline constexpr int kCtasPerSm = 2;
inline constexpr int kMaxCtas = 320;  ///< of a grid
/// Warps of a CTA. With two CTAs an SM each scheduler has two, which have all registers.
inline constexpr int kCtaWarpsLog2 = 2, kCtaWarps = 1 << kCtaWarpsLog2;

/// What sm90.few takes: (request, KV head) units of a call, query rows of one.
inline constexpr int kFewUnits = 16, kFewRows = 8;

inline constexpr int kMostRows = 64;  ///< of a unit; 32 with heads of 256
/// Floats from one row of a piece to the next: rows 2 t and 2 t + 1 of a lane land 8 t banks apart.
constexpr int piece_pitch(int head_dim) {
  return head_dim + 4;
}

/// Rows of the kernel of a call: blocks of 8 a warp and warps of a team.
struct RowsPlan {
  int blocks, team_log2;
  constexpr int rows() const { return 8 * blocks << team_log2; }
};
/// A warp has the registers for 16 query rows of heads up to 128, which read keys from its ring once, and for 8 of wider ones; up to
/// four of them share a read of K and V.
constexpr RowsPlan rows_plan(int64_t rows, int64_t head_dim) {
  const int blocks = rows > 8 && head_dim <= 128 ? 2 : 1;
  return {blocks, rows > 16 * blocks ? 2 : rows > 8 * blocks ? 1 : 0};
}

/// Keys of a box of K or V, 8 KB where those are at most 64 keys: what a worker takes at a time.
constexpr int64_t sm90_box_keys(int64_t row_bytes) {
  return row_bytes > 256 ? 16 : row_bytes > 128 ? 32 : 64;
}
/// Workers of a CTA.
constexpr int64_t workers_per_cta(const RowsPlan& plan) {
  return kCtaWarps >> plan.team_log2;
}
constexpr int64_t ctas_of(int64_t workers, const RowsPlan& plan) {
  const int64_t each = workers_per_cta(plan);
  return (workers + each - 1) / each;
}

}  // namespace vivace::attention_sm90
