#pragma once

// The shared memory of a choice, counted where no kernel is compiled.

#include <cstdint>

namespace vivace::route {

inline constexpr int kMostThreads = 1024;  // of a crew
inline constexpr int kAtOnce = 8;          // candidates that one is compared with

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

/// How many of a row of 32 experts are written down: whole quads.
constexpr int best_of_row(int64_t top_k) {
  return static_cast<int>(top_k < 32 ? round_up(top_k, 4) : 32);
}

/// Of a warp alone: keys of experts and groups, candidates and their scores, the chosen and theirs.
constexpr int64_t bytes_of_warp(int64_t experts, int64_t top_k, int64_t groups) {
  const int64_t keys = round_up(experts, 2) + (groups > 1 ? round_up(groups, 2) : 0);
  return round_up(4 * keys + 12 * experts + 8 * (kAtOnce + top_k), 16);
}

/// Of a crew of so many threads with experts_of_thread each: keys of experts and groups, the best of the rows with their experts
/// and scores, the chosen and their scores.
constexpr int64_t bytes_of_crew(int64_t threads, int64_t experts_of_thread, int64_t top_k, int64_t groups) {
  const int64_t experts = threads * experts_of_thread;
  const int64_t keys = experts + (groups > 1 ? round_up(groups, 4) : 0);
  return round_up(4 * keys + 12 * (experts / 32 * best_of_row(top_k)) + 8 * top_k, 16);
}

/// What the warps of a crew tell each other.
struct alignas(16) CrewMemory {
  uint32_t warp_keys[kMostThreads / 32];
  float warp_sums[kMostThreads / 32];
};
inline constexpr int kCrewBytes = sizeof(CrewMemory);

}  // namespace vivace::route
