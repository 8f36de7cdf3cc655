#include "src/ops/decode_schedule/cases.h"

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "src/ops/attention_decode/gpu_schedule.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/decode_schedule/view.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// What every map must have: each tile of each unit exactly once and in order, slots of their own inside the
/// promised number, and balance.
void expect_sound(const DecodeScheduleProblem& p) {
  const ScheduleView view(p.schedule.as<const int32_t>());
  const DecodeScheduleParams& params = p.args.params;
  const int64_t requests = p.args.kv_lengths.shape[0];
  std::map<std::pair<int64_t, int64_t>, std::vector<SchedulePiece>> units;
  std::set<int64_t> slots;
  int64_t total = 0, tiles = 0, heaviest = 0, longest = 0;
  std::tuple<int64_t, int64_t, int64_t> last{-1, 0, 0};
  for (int64_t worker = 0; worker < params.workers; ++worker) {
    int64_t weight = 0;
    view.for_each_piece(worker, [&](const SchedulePiece& piece) {
      ASSERT_LT(worker, view.active_workers());
      const std::tuple at(piece.request, piece.head_kv, piece.first_tile);
      EXPECT_GT(at, last) << "pieces go on where the ones before end";
      last = at;
      auto& unit = units[{piece.request, piece.head_kv}];
      if (unit.empty()) weight += params.request_cost;
      weight += std::max<int64_t>(1, piece.tiles);
      tiles += std::max<int64_t>(1, piece.tiles);
      unit.push_back(piece);
      if (piece.slot >= 0) {
        EXPECT_TRUE(slots.insert(piece.slot).second) << "slot " << piece.slot << " twice";
      }
    });
    total += weight;
    heaviest = std::max(heaviest, weight);
  }
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t keys = p.kv_lengths.as<int32_t>()[b], start = p.query_start.as<int32_t>()[b];
    const int64_t rows = p.query_start.as<int32_t>()[b + 1] - start;
    longest = std::max(longest, keys);
    for (int64_t h = 0; h < params.heads_kv; ++h) {
      const auto found = units.find({b, h});
      if (rows == 0) {
        ASSERT_EQ(found, units.end());
        continue;
      }
      ASSERT_NE(found, units.end()) << b << ", " << h;
      const std::vector<SchedulePiece>& unit = found->second;
      // Every key that any row sees lies in the tiles, and no tile lies wholly before the window.
      const int64_t first_seen =
          params.window > 0 ? std::max<int64_t>(0, keys - rows + 1 - params.window) : 0;
      int64_t next = unit.front().first_tile;
      if (keys > 0) {
        EXPECT_EQ(next, std::min(first_seen, keys) / params.tile_tokens);
      }
      for (const SchedulePiece& piece : unit) {
        EXPECT_EQ(piece.first_tile, next);
        next += piece.tiles;
        EXPECT_EQ(piece.slot < 0, unit.size() == 1);
        if (params.piece_tiles == 0) continue;
        EXPECT_TRUE(&piece == &unit.front() || piece.first_tile % params.piece_tiles == 0);
        EXPECT_LE(piece.tiles, params.piece_tiles);
      }
      EXPECT_EQ(next, keys == 0 ? 0 : div_up(keys, params.tile_tokens));
      units.erase(found);
    }
  }
  EXPECT_TRUE(units.empty());
  const int64_t promised = max_partial_slots(params, requests, longest);
  EXPECT_LT(slots.empty() ? -1 : *slots.rbegin(), promised);
  if (view.active_workers() > 0) {
    const int64_t slack = params.piece_tiles > 0 ? params.piece_tiles - 1 : 0;
    // A cut inside a unit's cost hands the whole cost to the worker that has its first tile.
    EXPECT_LE(heaviest, div_up(total, view.active_workers()) + slack + params.request_cost);
    const int64_t n = std::min(params.workers, std::max<int64_t>(1, total / params.min_tiles));
    const bool even = view.header(schedule_map::kUnitWeight) > 0;
    EXPECT_GE(8 * view.active_workers(), even ? 7 * std::min(n, tiles) : 8 * n);
  }
  // The merge sees exactly the slots that were written, unit by unit and in order.
  std::set<int64_t> merged;
  for (int64_t task = 0; task < view.merge_tasks(); ++task) {
    ScheduleSplit split;
    if (!view.split_at(task, split)) continue;
    for (int64_t i = 0; i < split.pieces; ++i) EXPECT_TRUE(merged.insert(split.slot(i)).second);
  }
  EXPECT_EQ(merged, slots);
}

TEST(DecodeSchedule, EveryRowGivesTheSameSoundMap) {
  for (const DecodeScheduleCase& c : decode_schedule_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    DecodeScheduleProblem want(c);
    ASSERT_OK(decode_schedule_reference(want.args, Stream{}));
    expect_sound(want);
    EXPECT_OK(
        check_schedule("test", want.schedule.as<int32_t>(), c.params, want.kv_lengths, want.query_start));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kDecodeSchedule, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        DecodeScheduleProblem got(c);
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_EQ(std::memcmp(got.schedule.as<char>(), want.schedule.as<char>(), got.schedule.bytes()), 0);
        EXPECT_TRUE(got.schedule.canaries_intact());
      });
    }
  }
}

/// A kind of random batch.
struct Traffic {
  const char* name;
  int64_t most_requests, most_workers;
  int on_cpu, on_gpu;  ///< batches; a GPU gets fewer, each is a launch and a few allocations
  DecodeScheduleCase (*draw)(std::mt19937& rng);
};

int64_t below(std::mt19937& rng, uint32_t n) {
  return static_cast<int64_t>(rng() % n);
}
/// In half of the cases 0, else anything below n.
int64_t often_0(std::mt19937& rng, uint32_t n) {
  return below(rng, 2) == 0 ? 0 : below(rng, n);
}
/// From 1 to `most`, each factor of two as likely as another.
int64_t log_uniform(std::mt19937& rng, double most) {
  const double share = static_cast<double>(rng()) / 4294967296.0;
  return std::max<int64_t>(1, static_cast<int64_t>(std::exp(share * std::log(most + 1))));
}

/// Small and awkward: tiles of any size, more workers than tiles, requests without keys or without rows.
DecodeScheduleCase draw_awkward(std::mt19937& rng) {
  DecodeScheduleCase c{"", {}, {}};
  c.params = {.heads_kv = 1 + below(rng, 4),
              .tile_tokens = 1 + below(rng, 80),
              .workers = 1 + below(rng, 40),
              .min_tiles = 1 + below(rng, 4),
              .request_cost = often_0(rng, 6),
              .window = often_0(rng, 300),
              .piece_tiles = often_0(rng, 6)};
  const int64_t requests = below(rng, 20);
  for (int64_t b = 0; b < requests; ++b) {
    c.lengths.push_back(static_cast<int32_t>(below(rng, 2) == 0 ? below(rng, 10) : below(rng, 2000)));
    c.rows.push_back(static_cast<int32_t>(below(rng, 9)));
  }
  return c;
}

/// As a GPU cuts steps that serving has, requests of a bucket's padding included.
DecodeScheduleCase draw_serving(std::mt19937& rng) {
  constexpr int64_t kMostSms = 132;
  DecodeScheduleCase c{"", {}, {}};
  const int64_t heads_kv = below(rng, 2) == 0 ? 1 : 1 + below(rng, 8), sms = 1 + below(rng, kMostSms);
  const int64_t head_dim = 64 << below(rng, 3), row_bytes = head_dim << below(rng, 2);
  c.params = below(rng, 2) == 0 ? mma_decode_schedule(heads_kv, sms)
                                : sm90_decode_schedule(heads_kv, 1 + below(rng, head_dim == 256 ? 32 : 64),
                                                       head_dim, row_bytes, sms);
  c.params.window = below(rng, 4) == 0 ? log_uniform(rng, 8192) : 0;
  c.params.piece_tiles = below(rng, 3) == 0 ? log_uniform(rng, 64) : 0;
  const int64_t requests = log_uniform(rng, 256), rows = 1 + often_0(rng, 8);
  const double longest = below(rng, 2) == 0 ? 4096 : 100000;
  const auto alike = static_cast<int32_t>(below(rng, 3) == 0 ? log_uniform(rng, longest) : 0);
  for (int64_t b = 0; b < requests; ++b) {
    const bool padding = below(rng, 16) == 0;
    const auto length = alike > 0 ? alike : static_cast<int32_t>(log_uniform(rng, longest));
    c.lengths.push_back(padding ? 0 : length);
    c.rows.push_back(static_cast<int32_t>(padding ? 0 : rows));
  }
  return c;
}

/// All of a kind into one buffer: what an earlier call left there must not show.
TEST(DecodeSchedule, RandomBatchesIntoOneBuffer) {
  constexpr Traffic kTraffic[] = {{"awkward", 20, 40, 6000, 500, draw_awkward},
                                  {"serving", 256, 8 * 132, 2000, 200, draw_serving}};
  for (const Traffic& traffic : kTraffic) {
    SCOPED_TRACE(traffic.name);
    for (const Stream& stream : test_streams()) {
      const DecodeScheduleProblem any({"", {1}, {}});
      for_each_fitting_row(kDecodeSchedule, any.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        std::mt19937 rng(1);
        Guarded buffer(DType::i32, {decode_schedule_ints(traffic.most_requests, traffic.most_workers)});
        const int repeats = stream.device == Device::cpu ? traffic.on_cpu : traffic.on_gpu;
        for (int repeat = 0; repeat < repeats; ++repeat) {
          const DecodeScheduleCase c = traffic.draw(rng);
          DecodeScheduleProblem want(c), got(c);
          got.args.schedule = buffer;
          ASSERT_OK(decode_schedule_reference(want.args, Stream{}));
          ASSERT_OK(row.run(got.args, stream));
          ASSERT_EQ(std::memcmp(buffer.as<char>(), want.schedule.as<char>(), want.schedule.bytes()), 0)
              << repeat;
          if (row.name == "cpu.scan") expect_sound(want);  // the map of all rows
          if (testing::Test::HasFailure()) FAIL() << "at " << repeat;
        }
        EXPECT_TRUE(buffer.canaries_intact());
      });
    }
  }
}

/// Units of one length have workers of their own, where these divide among them.
TEST(DecodeSchedule, UnitsThatAreAlikeShareNoWorker) {
  struct Case {
    int64_t requests, heads_kv, tiles, workers, active,
        each;  ///< each: workers of a unit, 0 where units share them
  };
  constexpr Case kCases[] = {
      {64, 1, 16, 528, 512, 8}, {64, 8, 64, 528, 512, 1},
      {64, 1, 4, 528, 256, 4},  // no more than there are tiles
      {64, 1, 3, 528, 192, 0},  // a tile a worker; two for three tiles would idle a third
      {60, 1, 16, 500, 480, 8}, {60, 1, 16, 320, 320, 0},  // four each would leave a quarter idle
      {65, 8, 16, 528, 520, 1}, {67, 8, 16, 528, 528, 0},  // fewer workers than units
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.requests << " x " << c.heads_kv << ", " << c.tiles << " tiles");
    DecodeScheduleCase batch{"", {}, {}};
    batch.params = {.heads_kv = c.heads_kv, .tile_tokens = 16, .workers = c.workers};
    batch.lengths.assign(static_cast<size_t>(c.requests), static_cast<int32_t>(16 * c.tiles));
    batch.rows.assign(static_cast<size_t>(c.requests), 1);
    DecodeScheduleProblem p(batch);
    ASSERT_OK(decode_schedule(p.args, Stream{}));
    expect_sound(p);
    const ScheduleView view(p.schedule.as<const int32_t>());
    EXPECT_EQ(view.active_workers(), c.active);
    EXPECT_EQ(view.header(schedule_map::kUnitWeight), c.each > 0 ? c.tiles : 0);
    for (int64_t worker = 0; c.each > 0 && worker < c.active; ++worker) {
      const ScheduleView::Start& start = view.start(worker);
      EXPECT_EQ(start.request * c.heads_kv + start.head_kv, worker / c.each);
      EXPECT_EQ(start.tile, worker % c.each * c.tiles / c.each);
    }
  }
}

/// A map that differs anywhere from the one that its lengths give is found.
TEST(DecodeSchedule, CheckFindsEveryChange) {
  std::mt19937 rng(3);
  int changes = 0;
  for (int repeat = 0; repeat < 100; ++repeat) {
    const DecodeScheduleCase c = draw_awkward(rng);
    DecodeScheduleProblem p(c);
    ASSERT_OK(decode_schedule(p.args, Stream{}));
    const auto check = [&] {
      return check_schedule("test", p.schedule.as<int32_t>(), c.params, p.kv_lengths, p.query_start);
    };
    ASSERT_OK(check());
    const int64_t ints = p.args.schedule.shape[0];
    for (int64_t i = 0; i < ints; ++i) {
      const bool free_header = i > schedule_map::kPerUnitLog2 && i < schedule_map::kHeaderInts;
      const bool tiles_of_sums = i == ints - 4 || i == ints - 3;
      if (free_header || tiles_of_sums) continue;
      p.schedule.as<int32_t>()[i] += 1;
      EXPECT_FALSE(check().ok()) << "repeat " << repeat << ", " << i;
      p.schedule.as<int32_t>()[i] -= 1;
      ++changes;
    }
  }
  EXPECT_GT(changes, 5000);
}

/// Without cost and pieces the load is even to one tile, whatever the mix.
TEST(DecodeSchedule, EvenToOneTile) {
  DecodeScheduleProblem p({"", lengths_of(1, 131072, 31, 4096), {.heads_kv = 8, .workers = 132}});
  ASSERT_OK(decode_schedule(p.args, Stream{}));
  const ScheduleView view(p.schedule.as<const int32_t>());
  int64_t least = 1 << 30, most = 0;
  for (int64_t worker = 0; worker < 132; ++worker) {
    int64_t tiles = 0;
    view.for_each_piece(worker, [&](const SchedulePiece& piece) { tiles += piece.tiles; });
    least = std::min(least, tiles);
    most = std::max(most, tiles);
  }
  EXPECT_LE(most - least, 1);
  EXPECT_EQ(most, div_up((131072 + 31 * 4096) / 64 * 8, 132));
}

/// With pieces the cuts of a request are its own: the same alone and in company.
TEST(DecodeSchedule, PiecesDependOnTheRequestOnly) {
  const DecodeScheduleParams params{.heads_kv = 2, .workers = 7, .piece_tiles = 8};
  std::map<std::pair<int64_t, int64_t>, int> cuts[2];
  for (const bool company : {false, true}) {
    DecodeScheduleProblem p(
        {"", company ? std::vector<int32_t>{9000, 1, 20000, 777} : std::vector<int32_t>{9000}, params});
    ASSERT_OK(decode_schedule(p.args, Stream{}));
    const ScheduleView view(p.schedule.as<const int32_t>());
    for (int64_t worker = 0; worker < 7; ++worker) {
      view.for_each_piece(worker, [&](const SchedulePiece& piece) {
        if (piece.request == 0 && piece.head_kv == 0) ++cuts[company][{piece.first_tile, piece.tiles}];
      });
    }
  }
  EXPECT_EQ(cuts[0], cuts[1]);
  EXPECT_EQ(cuts[0].size(), 18u);  // ceil(9000 / 512)
}

TEST(DecodeSchedule, SizesOfHugeCountsDoNotOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  static_assert(decode_schedule_ints(kMost, kMost) >
                decode_schedule_ints(int64_t{1} << 58, int64_t{1} << 58));
  static_assert(decode_schedule_ints(kMost, 1) > 0 && decode_schedule_ints(1, kMost) > 0);
  static_assert(decode_schedule_ints(2, 3) == 52);
}

TEST(DecodeSchedule, RefusesWhatDisagrees) {
  const DecodeScheduleCase c{"", {100, 200}, {.heads_kv = 2, .workers = 3}};
  const auto fails = [&](auto&& change, const char* text) {
    DecodeScheduleProblem p(c);
    change(p);
    EXPECT_FAILS(decode_schedule(p.args, Stream{}), Code::invalid_argument, text);
  };
  fails([](auto& p) { p.args.schedule.shape[0] -= 1; },
        "schedule.shape[0] is 51, needs decode_schedule_ints(2, 3) = 52");
  fails([](auto& p) { p.kv_lengths.template as<int32_t>()[1] = -1; },
        "kv_lengths[1] is -1, needs at least 0");
  fails([](auto& p) { p.query_start.template as<int32_t>()[2] = 0; },
        "query_start[2] is 0, needs at least 1");
  fails([](auto& p) { p.args.params.workers = 0; }, "params.workers is 0, needs 1 .. 2^30");
  fails([](auto& p) { p.args.params.tile_tokens = 0; }, "params.tile_tokens is 0, needs 1 .. 2^30");
  fails([](auto& p) { p.args.params.request_cost = 1 << 30; }, "exceed 2^31 - 1");
}

}  // namespace
}  // namespace vivace
