#include "apps/vivace/schedule_map.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>

#include "src/core/error.h"
#include "src/ops/attention_decode/gpu_schedule.h"

namespace vivace::cli {

namespace {

constexpr int64_t kMostPieces = int64_t{1} << 26;  // a walk over as many takes about a second

TileRange tiles_of_request(int64_t length, const OpsScheduleArgs& args, const DecodeScheduleParams& params) {
  return tiles_of(length, args.query_tokens, params.tile_tokens, params.window);
}

int64_t pieces_of(const OpsScheduleArgs& args, const DecodeScheduleParams& params, int64_t piece_tiles) {
  int64_t groups = 0;
  for (const int64_t length : args.lengths) {
    groups += groups_of(tiles_of_request(length, args, params), piece_tiles);
  }
  return groups * params.heads_kv;
}

/// Gives each request its class. Where there are more lengths than letters, those share one whose tiles have as many
/// binary digits: a map has fewer than 2^26 tiles a request.
void classify(const CutStep& step, ScheduleSummary& summary) {
  constexpr size_t kLetters = 26;
  const ScheduleView view = step.view();
  const auto own_tiles = [&](size_t request) {
    return int64_t{view.record(static_cast<int64_t>(request)).tiles};
  };
  const auto digits_of = [&](size_t request) -> int64_t {
    return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, own_tiles(request))));
  };
  std::map<int64_t, uint8_t, std::greater<>> keys;  // of classes, in their order
  for (size_t r = 0; r < step.lengths.size() && keys.size() <= kLetters; ++r)
    keys.emplace(step.lengths[r], 0);
  const bool by_length = keys.size() <= kLetters;
  const auto key_of = [&](size_t request) { return by_length ? step.lengths[request] : digits_of(request); };
  if (!by_length) {
    keys.clear();
    for (size_t r = 0; r < step.lengths.size(); ++r) keys.emplace(key_of(r), 0);
  }
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  for (auto& [key, index] : keys) {
    index = static_cast<uint8_t>(summary.classes.size());
    summary.classes.push_back({.letter = static_cast<char>('A' + index),
                               .shortest = kNone,
                               .least_tiles = kNone,
                               .least_pieces = kNone});
  }
  for (size_t r = 0; r < step.lengths.size(); ++r) {
    summary.class_of.push_back(keys.at(key_of(r)));
    RequestClass& c = summary.classes[summary.class_of.back()];
    const int64_t length = step.lengths[r];
    ++c.requests;
    c.units += step.params.heads_kv;
    c.shortest = std::min(c.shortest, length);
    c.longest = std::max(c.longest, length);
    c.least_tiles = std::min(c.least_tiles, own_tiles(r));
    c.most_tiles = std::max(c.most_tiles, own_tiles(r));
  }
}

/// Counts the pieces of each unit: they come in the order of units.
class UnitCounter {
 public:
  explicit UnitCounter(ScheduleSummary& summary) : summary_(summary) {}
  void begin(RequestClass& of) {
    end();
    class_ = &of;
  }
  void add() { ++pieces_; }
  void end() {
    if (class_ == nullptr) return;
    class_->least_pieces = std::min(class_->least_pieces, pieces_);
    class_->most_pieces = std::max(class_->most_pieces, pieces_);
    summary_.most_pieces = std::max(summary_.most_pieces, pieces_);
    class_->cut_units += pieces_ > 1;
    summary_.cut_units += pieces_ > 1;
    ++summary_.units;
    pieces_ = 0;
  }

 private:
  ScheduleSummary& summary_;
  RequestClass* class_ = nullptr;
  int64_t pieces_ = 0;
};

ScheduleSummary summary_of(const CutStep& step) {
  ScheduleSummary s;
  const ScheduleView view = step.view();
  classify(step, s);
  s.active = view.active_workers();
  UnitCounter units(s);
  for (int64_t worker = 0; worker < s.active; ++worker) {
    int64_t weight = 0;
    view.for_each_piece(worker, [&](const SchedulePiece& piece) {
      if (step.begins_unit(piece)) units.begin(s.classes[s.class_of[static_cast<size_t>(piece.request)]]);
      units.add();
      weight += step.weight_of(piece);
      s.tiles += piece.tiles;
      s.partials += piece.slot >= 0;
      ++s.pieces;
    });
    s.weight += weight;
    s.used += weight > 0;
    s.heaviest = std::max(s.heaviest, weight);
  }
  units.end();
  const int64_t requests = std::ssize(step.lengths);
  s.most_partials = max_partial_slots(step.params, requests, *std::ranges::max_element(step.lengths));
  // Per row its maximum, its sum of weights, and the weighted values.
  const int64_t rows = step.query_tokens * (step.heads_q / step.params.heads_kv);
  s.slot_bytes = rows * (2 + ScheduleSummary::kHeadDim) * static_cast<int64_t>(sizeof(float));
  return s;
}

int64_t unit_rows_of(const OpsScheduleArgs& args) {
  return args.query_tokens * (args.heads_q / args.heads_kv);
}

DecodeScheduleParams sm90_params_of(const OpsScheduleArgs& args) {
  DecodeScheduleParams params =
      sm90_decode_schedule(args.heads_kv, unit_rows_of(args), ScheduleSummary::kHeadDim,
                           ScheduleSummary::kHeadDim * (args.fp8 ? 1 : 2), args.sms);
  if (args.workers) params.workers = *args.workers;
  return params;
}

int64_t sm90_ctas(const OpsScheduleArgs& args) {
  using namespace attention_sm90;
  return ctas_of(sm90_params_of(args).workers, rows_plan(unit_rows_of(args), ScheduleSummary::kHeadDim));
}

bool fits_sm90(const OpsScheduleArgs& args) {
  return args.piece_tiles == 0 && unit_rows_of(args) <= attention_sm90::kMostRows &&
         sm90_ctas(args) <= attention_sm90::kMaxCtas;
}

}  // namespace

std::string_view row_of(const OpsScheduleArgs& args) {
  if (!args.row.empty()) return args.row;
  return fits_sm90(args) ? kSm90Row : kMmaRow;
}

DecodeScheduleParams params_of(const OpsScheduleArgs& args) {
  DecodeScheduleParams params = sm90_params_of(args);
  if (row_of(args) != kSm90Row) {
    params = mma_decode_schedule(args.heads_kv, args.sms);
    if (args.workers) params.workers = *args.workers;
  }
  params.window = args.window;
  params.piece_tiles = args.piece_tiles;
  return params;
}

Status check_schedule_size(const OpsScheduleArgs& args) {
  constexpr int64_t kMostWeight = std::numeric_limits<int32_t>::max();
  if (args.row == kSm90Row && !fits_sm90(args)) {
    return invalid_argument(
        "--row is {}, needs --piece-tiles 0 (is {}), at most {} query rows of a KV head (are {}) and {} CTAs "
        "(are {})",
        args.row, args.piece_tiles, attention_sm90::kMostRows, unit_rows_of(args), attention_sm90::kMaxCtas,
        sm90_ctas(args));
  }
  const DecodeScheduleParams params = params_of(args);
  int64_t weight = 0;
  for (const int64_t length : args.lengths) {
    weight += weight_of(params, tiles_of_request(length, args, params));
  }
  if (weight > kMostWeight) {
    return invalid_argument(
        "--lengths is '{}': tiles of {} keys, and {} for each request, make {}, needs at most {} (2^31 - 1)",
        args.lengths_text, params.tile_tokens, params.request_cost, weight, kMostWeight);
  }
  const int64_t pieces = pieces_of(args, params, params.piece_tiles);
  if (pieces <= kMostPieces) return {};
  int64_t fits = params.piece_tiles;
  while (pieces_of(args, params, fits) > kMostPieces) fits *= 2;
  return invalid_argument(
      "--piece-tiles is {}, needs {} or more for these lengths: {} pieces, where at most {} fit",
      params.piece_tiles, fits, pieces, kMostPieces);
}

Result<CutStep> cut_step(const OpsScheduleArgs& args) {
  CutStep step{.lengths_text = args.lengths_text,
               .row = row_of(args),
               .heads_q = args.heads_q,
               .query_tokens = args.query_tokens,
               .params = params_of(args),
               .lengths = {args.lengths.begin(), args.lengths.end()}};
  const int64_t requests = std::ssize(step.lengths);
  step.map.resize(static_cast<size_t>(decode_schedule_ints(requests, step.params.workers)));
  std::vector<int32_t> query_start;
  for (int64_t r = 0; r <= requests; ++r) query_start.push_back(static_cast<int32_t>(r * args.query_tokens));
  VIVACE_TRY(decode_schedule({.kv_lengths = Tensor(step.lengths.data(), DType::i32, {requests}),
                              .query_start = Tensor(query_start.data(), DType::i32, {requests + 1}),
                              .params = step.params,
                              .schedule = Tensor(step.map.data(), DType::i32, {std::ssize(step.map)})},
                             Stream{}));
  step.summary = summary_of(step);
  return step;
}

}  // namespace vivace::cli
