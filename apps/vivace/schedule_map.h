#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/vivace/arguments.h"
#include "src/ops/decode_schedule/view.h"

// The map of decode_schedule for a batch that exists as lengths alone: what `vivace ops schedule` shows.

namespace vivace::cli {

/// Requests whose units, one per KV head, have the same tiles.
struct RequestClass {
  char letter;                ///< in drawings
  int64_t shortest, longest;  ///< in tokens; differ where many lengths share a letter
  int64_t requests = 0;
  int64_t least_tiles = 0, most_tiles = 0;  ///< of one unit
  int64_t units = 0, cut_units = 0;
  int64_t least_pieces = 0, most_pieces = 0;  ///< of one unit
};

/// What a map makes of its batch. A worker's weight counts as the rule does: its tiles, and request_cost for each unit
/// that it begins.
struct ScheduleSummary {
  int64_t active = 0;  ///< workers that the map knows, the first ones
  /// Those of them that have a piece: where pieces are not divided, others fall between the cuts.
  int64_t used = 0;
  int64_t tiles = 0, units = 0, weight = 0, heaviest = 0;
  int64_t pieces = 0, partials = 0;  ///< a partial is a piece of a unit that was cut
  int64_t cut_units = 0, most_pieces = 0;
  int64_t most_partials = 0;          ///< over all steps of as many requests of at most the longest length
  int64_t slot_bytes = 0;             ///< of one partial, at kHeadDim
  std::vector<RequestClass> classes;  ///< longest first; at most one per letter
  std::vector<uint8_t> class_of;      ///< of each request

  static constexpr int64_t kHeadDim = 128;
  double mean() const { return static_cast<double>(weight) / static_cast<double>(used); }
  double imbalance() const { return static_cast<double>(heaviest) / mean(); }
  int64_t partial_bytes() const { return partials * slot_bytes; }
  double most_partial_bytes() const {  // may exceed 64 bits
    return static_cast<double>(most_partials) * static_cast<double>(slot_bytes);
  }
  /// Shares of the used workers' time, if a tile takes all of them equally long: waiting for the heaviest, and
  /// starting units.
  double share_waiting() const { return 1 - mean() / static_cast<double>(heaviest); }
  double share_starting(int64_t request_cost) const {
    return static_cast<double>(units * request_cost) / static_cast<double>(used * heaviest);
  }
};

/// A decode step of at least one request, cut.
struct CutStep {
  std::string lengths_text;
  std::string_view row;
  int64_t heads_q = 0, query_tokens = 0;
  DecodeScheduleParams params;
  std::vector<int32_t> lengths;
  std::vector<int32_t> map;
  ScheduleSummary summary;

  ScheduleView view() const { return ScheduleView(map.data()); }
  /// Whether a piece is the first of its unit.
  bool begins_unit(const SchedulePiece& piece) const {
    return piece.first_tile == view().record(piece.request).first_tile;
  }
  int64_t weight_of(const SchedulePiece& piece) const {
    return (begins_unit(piece) ? params.request_cost : 0) + std::max<int64_t>(1, piece.tiles);
  }
};

/// What --row may be.
inline constexpr std::string_view kSm90Row = "sm90", kMmaRow = "cuda.mma";
/// The one that is meant.
std::string_view row_of(const OpsScheduleArgs& args);
/// As a GPU cuts it for that row, see src/ops/attention_decode/gpu_schedule.h; heads have kHeadDim dimensions.
DecodeScheduleParams params_of(const OpsScheduleArgs& args);
/// That a map can be made and walked: the weights fit int32, and the pieces are not too many to look at each. The
/// message has the flag.
Status check_schedule_size(const OpsScheduleArgs& args);
/// Makes the map with the CPU's row, which gives the same as a GPU's, and sums it up. Takes what
/// check_schedule_size() lets pass.
Result<CutStep> cut_step(const OpsScheduleArgs& args);

/// Totals and a drawing, at most 100 columns wide.
std::string text_of(const CutStep& step);

}  // namespace vivace::cli
