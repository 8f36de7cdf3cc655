#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "apps/vivace/schedule_map.h"

namespace vivace::cli {

namespace {

std::string bytes_text(double value) {
  if (value >= 1e12) return fmt::format("{:.2f} TB", value * 1e-12);
  if (value >= 1e9) return fmt::format("{:.2f} GB", value * 1e-9);
  if (value >= 1e6) return fmt::format("{:.1f} MB", value * 1e-6);
  if (value >= 1e3) return fmt::format("{:.1f} KB", value * 1e-3);
  return fmt::format("{:.0f} bytes", value);
}

std::string count_text(int64_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

std::string range_text(int64_t least, int64_t most) {
  return least == most ? fmt::format("{}", least) : fmt::format("{}-{}", least, most);
}

std::string classes_text(const ScheduleSummary& s) {
  std::string out = fmt::format("{:<6} {:>21} {:>9} {:>17} {:>14} {:>15}\n", "class", "tokens", "requests",
                                "tiles per unit", "pieces per unit", "units cut");
  for (const RequestClass& c : s.classes) {
    out +=
        fmt::format("{:<6} {:>21} {:>9} {:>17} {:>15} {:>15}\n", c.letter, range_text(c.shortest, c.longest),
                    c.requests, range_text(c.least_tiles, c.most_tiles),
                    range_text(c.least_pieces, c.most_pieces), fmt::format("{} of {}", c.cut_units, c.units));
  }
  return out;
}

std::string totals_text(const CutStep& step) {
  const ScheduleSummary& s = step.summary;
  const DecodeScheduleParams& p = step.params;
  std::string out;
  const auto line = [&](const char* name, const std::string& text) {
    out += fmt::format("{:<11} {}\n", name, text);
  };
  line("row",
       step.row == kSm90Row
           ? fmt::format("attention_decode {}: a worker is a warp, or a few for many query rows", step.row)
           : fmt::format("attention_decode {}: a worker is a CTA", step.row));
  line(
      "workers",
      fmt::format("{} of {} have work{}", s.used, p.workers,
                  step.view().header(schedule_map::kUnitWeight) > 0
                      ? fmt::format(": {} to a unit, which all weigh the same", s.used / s.units)
                  : s.used < s.active ? std::string(": a piece is whole, and the cuts of others fall into it")
                  : s.used == p.workers ? std::string()
                                        : fmt::format(": as many as get a weight of {} each", p.min_tiles)));
  line("tiles", fmt::format("{} of {} keys, in {} (request and KV head)", s.tiles, p.tile_tokens,
                            count_text(s.units, "unit")));
  line("weight", fmt::format("{} in all: the tiles, at least 1 a unit, and {} for starting each unit",
                             s.weight, p.request_cost));
  line("imbalance", fmt::format("{:.3f}: the heaviest worker has {}, the mean is {:.1f}", s.imbalance(),
                                s.heaviest, s.mean()));
  line("time lost", fmt::format("{:.1f} % waiting for the heaviest worker, {:.1f} % starting units",
                                100 * s.share_waiting(), 100 * s.share_starting(p.request_cost)));
  line("pieces", s.cut_units == 0
                     ? fmt::format("{}, each a whole unit: nothing to merge", s.pieces)
                     : fmt::format("{}, of which {} are parts of {}, at most {} of one", s.pieces, s.partials,
                                   count_text(s.cut_units, "cut unit"), s.most_pieces));
  if (step.row == kMmaRow) {
    line("partials",
         fmt::format("{} in {} slots; at most {} in {} (head size {})",
                     bytes_text(static_cast<double>(s.partial_bytes())), s.partials,
                     bytes_text(s.most_partial_bytes()), s.most_partials, ScheduleSummary::kHeadDim));
  }
  return out;
}

/// Draws workers as bars whose full width is the heaviest one's weight.
class Drawing {
 public:
  explicit Drawing(const CutStep& step) : step_(step), view_(step.view()) {}

  std::string text() const {
    const int64_t active = step_.summary.active;
    constexpr int64_t kMostLines = 34;
    std::string out = fmt::format(
        "A bar is a worker; its full width is the weight of the heaviest ({}). Capital: a whole unit.\n"
        "Small: a part, which is merged. Point: where a unit starts.\n\n",
        step_.summary.heaviest);
    int64_t drawn = active;
    if (active <= kMostLines) {
      out += lines_with_pieces();
    } else {
      int64_t per_line = 2;
      for (const int64_t next : {4, 8, 16, 32}) {
        if (per_line * kMostLines < active) per_line = next;
      }
      drawn = std::min(active, per_line * kMostLines);
      out += grid(drawn, per_line);
    }
    if (drawn < active) {
      out += fmt::format("workers {}-{} are not drawn; --json has them\n", drawn, active - 1);
    }
    if (active < step_.params.workers) {
      out += fmt::format("workers {} have nothing to do\n", range_text(active, step_.params.workers - 1));
    }
    return out;
  }

 private:
  static constexpr int64_t kColumns = 100, kLabel = 7;

  std::string bar(int64_t worker, int64_t width) const {
    std::string cells(static_cast<size_t>(width), ' ');
    const ScheduleSummary& s = step_.summary;
    // Column c shows what is done at weight (c + 1/2) heaviest / width.
    const auto column_of = [&](int64_t weight) {
      return (2 * weight * width + s.heaviest) / (2 * s.heaviest);
    };
    int64_t done = 0;
    view_.for_each_piece(worker, [&](const SchedulePiece& piece) {
      const char letter = s.classes[s.class_of[static_cast<size_t>(piece.request)]].letter;
      const char shown = static_cast<char>(piece.slot < 0 ? letter : letter - 'A' + 'a');
      const int64_t start = done, first = column_of(start);
      done += step_.weight_of(piece);
      const int64_t end = column_of(done);
      for (int64_t c = first; c < end; ++c) cells[static_cast<size_t>(c)] = shown;
      if (!step_.begins_unit(piece) || end - first < 2) return;
      const int64_t started = std::clamp(column_of(start + step_.params.request_cost), first + 1, end - 1);
      for (int64_t c = first; c < started; ++c) cells[static_cast<size_t>(c)] = '.';
    });
    return cells;
  }

  static std::string piece_text(const SchedulePiece& piece) {
    const std::string unit = fmt::format("{}.{}", piece.request, piece.head_kv);
    if (piece.slot < 0) return unit;
    return fmt::format("{}[{}]", unit, range_text(piece.first_tile, piece.first_tile + piece.tiles - 1));
  }

  /// A worker a line: bar, weight, and the pieces that fit.
  std::string lines_with_pieces() const {
    constexpr int64_t kBar = 40;
    std::string out = fmt::format("{:>{}} {:^{}} {:>6}  request.head, [tiles] of a part\n", "worker",
                                  kLabel - 1, "", kBar + 2, "weight");
    for (int64_t worker = 0; worker < step_.summary.active; ++worker) {
      int64_t weight = 0, hidden = 0;
      std::string pieces;
      view_.for_each_piece(worker, [&](const SchedulePiece& piece) {
        constexpr size_t kRoom = 30;
        weight += step_.weight_of(piece);
        const std::string text = piece_text(piece);
        if (hidden > 0 || pieces.size() + text.size() + 1 > kRoom) {
          ++hidden;
        } else {
          pieces += (pieces.empty() ? "" : " ") + text;
        }
      });
      out += fmt::format("{:>{}} |{}| {:>6}  {}{}\n", worker, kLabel - 1, bar(worker, kBar), weight, pieces,
                         hidden > 0 ? fmt::format(" +{}", hidden) : "");
    }
    return out;
  }

  /// Several workers a line; lines that look like the one before are counted.
  std::string grid(int64_t drawn, int64_t per_line) const {
    const int64_t width = (kColumns - kLabel - 1) / per_line - 1;
    std::string out, last;
    int64_t alike_from = 0, alike = 0;
    const auto flush = [&] {
      if (alike == 0) return;
      out += fmt::format(
          "{:>{}} {}: the same\n", "...", kLabel - 1,
          fmt::format("workers {}-{}", alike_from, std::min(drawn, alike_from + alike * per_line) - 1));
      alike = 0;
    };
    for (int64_t first = 0; first < drawn; first += per_line) {
      std::string line = "|";
      for (int64_t worker = first; worker < std::min(drawn, first + per_line); ++worker) {
        line += bar(worker, width) + "|";
      }
      if (line == last) {
        if (alike++ == 0) alike_from = first;
        continue;
      }
      flush();
      out += fmt::format("{:>{}} {}\n", first, kLabel - 1, line);
      last = std::move(line);
    }
    flush();
    return out;
  }

  const CutStep& step_;
  ScheduleView view_;
};

}  // namespace

std::string text_of(const CutStep& step) {
  const DecodeScheduleParams& p = step.params;
  std::string title = fmt::format("{} with {}/{} heads", count_text(std::ssize(step.lengths), "request"),
                                  step.heads_q, p.heads_kv);
  if (step.query_tokens > 1) title += fmt::format(", {} query tokens each", step.query_tokens);
  if (p.window > 0) title += fmt::format(", window {}", p.window);
  if (p.piece_tiles > 0) title += fmt::format(", cut at multiples of {}", count_text(p.piece_tiles, "tile"));
  return title + "\n\n" + classes_text(step.summary) + "\n" + totals_text(step) + "\n" + Drawing(step).text();
}

}  // namespace vivace::cli
