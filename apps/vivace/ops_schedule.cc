#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/output.h"
#include "apps/vivace/schedule_map.h"
#include "src/core/guard.h"

namespace vivace::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostEntries = int64_t{1} << 17;  // pieces and merges that a document lists: some 10 MB

/// A worker's pieces; equal ones that follow each other are one entry with their number.
Json pieces_json(const ScheduleView& view, int64_t worker, int64_t& entries) {
  Json pieces = Json::array();
  SchedulePiece last{-1, -1, -1, -1, -1};
  int64_t times = 0;
  const auto flush = [&] {
    if (times == 0) return;
    pieces.push_back({{"request", last.request},
                      {"head", last.head_kv},
                      {"first_tile", last.first_tile},
                      {"tiles", last.tiles},
                      {"slot", last.slot < 0 ? Json(nullptr) : Json(last.slot)},
                      {"times", times}});
    ++entries;
  };
  view.for_each_piece(worker, [&](const SchedulePiece& piece) {
    const bool whole = last.slot < 0 && piece.slot < 0 && piece.first_tile == last.first_tile;
    const bool next_group = last.slot >= 0 && piece.slot == last.slot + times &&
                            piece.request == last.request && piece.head_kv == last.head_kv;
    if (times > 0 && (whole || next_group) && piece.tiles == last.tiles) {
      ++times;
      return;
    }
    flush();
    last = piece;
    times = 1;
  });
  flush();
  return pieces;
}

/// What each active worker does and what is merged, while it is not too long; else nothing.
void list_map(const CutStep& step, Json& document) {
  const ScheduleView view = step.view();
  int64_t entries = 0;
  Json workers = Json::array(), merges = Json::array();
  for (int64_t worker = 0; worker < step.summary.active && entries <= kMostEntries; ++worker) {
    int64_t weight = 0;
    view.for_each_piece(worker, [&](const SchedulePiece& piece) { weight += step.weight_of(piece); });
    workers.push_back(
        {{"worker", worker}, {"weight", weight}, {"pieces", pieces_json(view, worker, entries)}});
  }
  const int64_t tasks = view.merge_tasks();
  for (int64_t task = 0; task < tasks && entries <= kMostEntries; ++task) {
    ScheduleSplit split;
    if (!view.split_at(task, split)) continue;
    merges.push_back({{"request", split.request}, {"head", split.head_kv}, {"pieces", split.pieces}});
    ++entries;
  }
  if (entries > kMostEntries) {
    note(fmt::format("--json: more than {} pieces and merges, so it has the totals alone", kMostEntries));
    return;
  }
  document["map"] = std::move(workers);
  document["merges"] = std::move(merges);
}

Json json_of(const CutStep& step) {
  const ScheduleSummary& s = step.summary;
  const DecodeScheduleParams& p = step.params;
  Json classes = Json::array();
  for (const RequestClass& c : s.classes) {
    classes.push_back({{"letter", std::string(1, c.letter)},
                       {"tokens", {c.shortest, c.longest}},
                       {"requests", c.requests},
                       {"tiles_per_unit", {c.least_tiles, c.most_tiles}},
                       {"pieces_per_unit", {c.least_pieces, c.most_pieces}},
                       {"units", c.units},
                       {"cut_units", c.cut_units}});
  }
  Json document = {{"lengths", step.lengths_text},
                   {"requests", step.lengths.size()},
                   {"heads_q", step.heads_q},
                   {"heads_kv", p.heads_kv},
                   {"query_tokens", step.query_tokens},
                   {"row", step.row},
                   {"tile_tokens", p.tile_tokens},
                   {"workers", p.workers},
                   {"min_tiles", p.min_tiles},
                   {"request_cost", p.request_cost},
                   {"window", p.window},
                   {"piece_tiles", p.piece_tiles},
                   {"used_workers", s.used},
                   {"tiles", s.tiles},
                   {"units", s.units},
                   {"weight", s.weight},
                   {"heaviest", s.heaviest},
                   {"imbalance", s.imbalance()},
                   {"share_waiting", s.share_waiting()},
                   {"share_starting", s.share_starting(p.request_cost)},
                   {"pieces", s.pieces},
                   {"partials", s.partials},
                   {"cut_units", s.cut_units},
                   {"most_pieces_per_unit", s.most_pieces},
                   {"head_dim", ScheduleSummary::kHeadDim},
                   {"classes", std::move(classes)}};
  if (step.row == kMmaRow) {
    document["partial_bytes"] = s.partial_bytes();
    document["most_partials"] = s.most_partials;
    document["most_partial_bytes"] = s.most_partial_bytes();
  }
  list_map(step, document);
  return document;
}

Status run_schedule(const OpsScheduleArgs& args) {
  if (!args.json_file.empty() && args.json_file != "-") {
    VIVACE_TRY(check_writable(args.json_file).at("--json"));
  }
  VIVACE_TRY_ASSIGN(const CutStep step, cut_step(args));
  if (args.json_file == "-") {
    print_json(json_of(step));
    return {};
  }
  write_out(text_of(step));
  if (args.json_file.empty()) return {};
  return write_file(args.json_file, json_text(json_of(step))).at("--json");
}

}  // namespace

int run(const OpsScheduleArgs& args) {
  const Status status = guarded("ops schedule", [&] { return run_schedule(args); });
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
