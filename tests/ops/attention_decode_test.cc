#include "src/ops/attention_decode/cases.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "src/device/runtime.h"
#include "src/ops/attention_decode/form.h"
#include "src/ops/attention_decode/table.h"
#include "src/ops/decode_schedule/view.h"
#include "tests/large.h"
#include "tests/ops/attention_test.h"
#include "vivace/attention_prefill.h"

namespace vivace {
namespace {

TEST(AttentionDecode, EveryRowAgreesWithTheReference) {
  for (const AttentionDecodeCase& c : attention_decode_cases(CaseSize::test)) {
    SCOPED_TRACE(testing::Message() << c.attention.name << ", " << name_of(c.attention.q) << " over "
                                    << name_of(c.attention.kv));
    AttentionDecodeProblem want(c, 1);
    ASSERT_OK(attention_decode(want.args, Stream{}));
    EXPECT_TRUE(want.workspace.canaries_intact());
    ASSERT_OK(attention_decode_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      const AttentionBounds bounds = attention_bounds(want.args.attention, stream.device);
      for_each_fitting_row(kAttentionDecode, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        AttentionDecodeProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_TRUE(close(got.args.attention.output, want.args.attention.output, bounds.output));
        EXPECT_TRUE(close(got.lse, want.lse, bounds.lse));
        EXPECT_TRUE(got.output.canaries_intact() && got.lse.canaries_intact());
        EXPECT_TRUE(got.workspace.canaries_intact());
        const int64_t map_bytes = want.schedule.tensor().bytes();
        EXPECT_EQ(
            std::memcmp(got.schedule.as<char>(), want.schedule.as<char>(), static_cast<size_t>(map_bytes)), 0)
            << "the map's counters are at 0 again";
      });
    }
  }
}

/// Splitting into pieces costs fp32 roundings and nothing else, however many workers there are.
TEST(AttentionDecode, AnyNumberOfWorkers) {
  on_streams([](const Stream& stream, DType type) {
    const AttentionCase c{
        .name = "", .requests = {{1333, 2}, {64, 1}, {0, 1}, {2000, 3}}, .q = type, .kv = type};
    AttentionDecodeProblem want({c}, 1);
    ASSERT_OK(attention_decode_reference(want.args, Stream{}));
    const AttentionBounds bounds = attention_bounds(want.args.attention, stream.device);
    for (int64_t workers = 1; workers <= 24; ++workers) {
      SCOPED_TRACE(workers);
      AttentionDecodeProblem p({c, {.tile_tokens = 64, .workers = workers}}, 1);
      const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(p.args, stream)});
      p.args.workspace = workspace;
      ASSERT_OK(done(attention_decode(p.args, stream), stream));
      EXPECT_TRUE(close(p.args.attention.output, want.args.attention.output, bounds.output));
      EXPECT_TRUE(close(p.lse, want.lse, bounds.lse));
    }
  });
}

/// A NaN score makes its row NaN however the keys are cut; a score of -infinity weighs nothing.
TEST(AttentionDecode, NanShows) {
  on_streams([](const Stream& stream, DType type) {
    for (const NanCase& nan : kNanCases) {
      for (const NanOptions& options : kNanOptions) {
        for (const auto& [workers, piece_tiles] : {std::pair{1, 0}, {3, 0}, {24, 0}, {2, 1}, {5, 4}}) {
          SCOPED_TRACE(testing::Message() << nan.name << ", sinks " << options.sinks << ", " << workers
                                          << " workers, " << piece_tiles << " tiles a piece");
          const AttentionDecodeCase c{{.name = "",
                                       .requests = {{400, 2}, {64, 1}, {0, 1}},
                                       .q = type,
                                       .kv = type,
                                       .window = options.window,
                                       .soft_cap = options.soft_cap,
                                       .sinks = options.sinks},
                                      {.tile_tokens = 64, .workers = workers, .piece_tiles = piece_tiles}};
          AttentionDecodeProblem want(c, 1);
          set_nan(want, nan);
          ASSERT_OK(attention_decode_reference(want.args, Stream{}));
          if (options.window == 0) {
            EXPECT_EQ(std::isnan(values_of(want.args.attention.output.at(1))[0]), nan_expected(nan, options));
          }
          for_each_fitting_row(kAttentionDecode, want.args, stream, [&](const auto& row) {
            SCOPED_TRACE(row.name);
            AttentionDecodeProblem got(c, 1);
            set_nan(got, nan);
            ASSERT_OK(row.run(got.args, stream));
            EXPECT_TRUE(nan_alike(got.args.attention.output, want.args.attention.output));
            EXPECT_TRUE(nan_alike(got.lse, want.lse));
          });
        }
      }
    }
  });
}

/// The promise that preemption by recomputation, prefix caches and chunked prefill rest on: a token's row has the
/// same bits from one prefill, and from decode steps of any width in any company.
void expect_bits_of_prefill(const Stream& stream, DType q, std::initializer_list<DType> caches) {
  for (const DType kv : caches) {
    for (const int64_t head_dim : {64, 80}) {
      for (const int64_t piece_tiles : {0, 2, 5}) {
        for (const int64_t window : {0, 150}) {
          SCOPED_TRACE(testing::Message()
                       << name_of(kv) << " " << head_dim << " " << piece_tiles << " " << window);
          const AttentionCase c{.name = "",
                                .requests = {{400, 400}, {170, 170}, {65, 65}},
                                .heads_q = 6,
                                .heads_kv = 2,
                                .head_dim = head_dim,
                                .q = q,
                                .kv = kv,
                                .window = window,
                                .soft_cap = head_dim == 80 ? 30.0 : 0.0,
                                .sinks = window > 0};
          AttentionProblem whole(c, 1);
          constexpr int64_t kTile = 32;
          ASSERT_OK(
              done(attention_prefill({.attention = whole.args, .split_tokens = piece_tiles * kTile}, stream),
                   stream));

          std::mt19937 rng(3);
          for (int step = 0; step < 12; ++step) {
            // Up to 8 last tokens of a random part of each request, some requests left out.
            std::vector<AttentionRequest> parts;
            for (const AttentionRequest& r : c.requests) {
              const int64_t keys = 1 + static_cast<int64_t>(rng() % r.keys);
              parts.push_back({keys, std::min<int64_t>(keys, rng() % 9)});
            }
            AttentionCase decode_case = c;
            decode_case.requests = parts;
            // Without pieces nothing may be cut: one worker.
            AttentionDecodeProblem p(
                {decode_case,
                 {.tile_tokens = kTile, .workers = piece_tiles > 0 ? 5 : 1, .piece_tiles = piece_tiles}},
                2);
            p.args.attention.k = whole.args.k;
            p.args.attention.v = whole.args.v;
            p.args.attention.page_table = whole.args.page_table;
            p.args.attention.sinks = whole.args.sinks;
            p.args.attention.k_scale = whole.args.k_scale;
            p.args.attention.v_scale = whole.args.v_scale;
            const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(p.args, stream)});
            p.args.workspace = workspace;
            const auto row_in_whole = [&](size_t b, int64_t i) {
              return whole.query_start.as<int32_t>()[b] + parts[b].keys - parts[b].rows + i;
            };
            int64_t row = 0;
            for (size_t b = 0; b < parts.size(); ++b) {
              for (int64_t i = 0; i < parts[b].rows; ++i, ++row) {
                copy_elements(whole.args.q.at(row_in_whole(b, i)), p.args.attention.q.at(row), 6 * head_dim);
              }
            }
            ASSERT_OK(done(attention_decode(p.args, stream), stream));
            row = 0;
            for (size_t b = 0; b < parts.size(); ++b) {
              for (int64_t i = 0; i < parts[b].rows; ++i, ++row) {
                ASSERT_TRUE(
                    same_bits(p.args.attention.output.at(row), whole.args.output.at(row_in_whole(b, i))))
                    << "request " << b << " with " << parts[b].keys << " keys, row " << i;
                ASSERT_TRUE(same_bits(p.lse.tensor().at(row), whole.lse.tensor().at(row_in_whole(b, i))));
              }
            }
          }
        }
      }
    }
  }
}

TEST(AttentionDecode, BitsOfPrefill) {
  on_streams([](const Stream& stream, DType type) {
    if (stream.device == Device::cpu) {
      expect_bits_of_prefill(stream, type, {DType::f32, DType::bf16, DType::fp8_e4m3});
      return;
    }
    Dispatch mma;  // the rows that share their arithmetic
    ASSERT_OK(mma.prefer("attention_decode=cuda.mma,attention_prefill=cuda.mma"));
    Stream preferring = stream;
    preferring.dispatch = &mma;
    expect_bits_of_prefill(preferring, type, {DType::bf16, DType::fp8_e4m3});
  });
}

/// All keys 0, so that every visible key weighs the same, or one key of all 3 against queries of all 1, whose
/// logit of 34 drowns the rest; every other slot stays poisoned.
void set_flat(AttentionDecodeProblem& p, double query) {
  const Tensor& q = p.args.attention.q;
  for (int64_t t = 0; t < q.shape[0]; ++t)
    for (int64_t i = 0; i < q.shape[1] * q.shape[2]; ++i) store(q.dtype, q.at(t).data, i, query);
  for (int64_t b = 0; b < p.args.attention.page_table.shape[0]; ++b) {
    for (int64_t j = 0; j < p.kv_lengths.as<int32_t>()[b]; ++j)
      for (int64_t h = 0; h < p.args.attention.k.shape[2]; ++h) p.set_key(b, j, h, 0);
  }
}

/// https://github.com/Tencent/hpc-ops/issues/26 : 32-token pages with a wide head layout faulted at larger batches.
TEST(AttentionDecode, FieldCaseH01PageSizes) {
  const int64_t lengths[] = {1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 3071, 3072, 3073, 5000};
  for (const int64_t page : {16, 32, 64, 128}) {
    SCOPED_TRACE(page);
    AttentionCase c{.name = "",
                    .requests = {},
                    .heads_q = 32,
                    .heads_kv = 4,
                    .head_dim = 128,
                    .page_tokens = page,
                    .q = DType::bf16,
                    .kv = DType::bf16};
    for (int repeat = 0; repeat < (page == 32 ? 3 : 1); ++repeat)
      for (int64_t keys : lengths) c.requests.push_back({keys, 1});
    AttentionDecodeProblem p({c, {.workers = 13}}, 1);
    set_flat(p, 1);
    for (size_t b = 0; b < c.requests.size(); ++b) {
      const int64_t last = c.requests[b].keys - 1;
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t j = 0; j < last; ++j) p.set_value(b, j, h, -1);
        p.set_key(b, last, h, 3);
        p.set_value(b, last, h, 2);
      }
    }
    ASSERT_OK(attention_decode(p.args, cpu_streams()[1]));
    for (double v : values_of(p.args.attention.output)) ASSERT_EQ(v, 2.0);
  }
}

/// https://github.com/Tencent/hpc-ops/pull/6 : partial log-sum-exps of all KV heads landed in one place.
TEST(AttentionDecode, FieldCaseH02SeveralHeadsSplit) {
  for (const int64_t workers : {1, 2, 4, 31}) {
    for (const int64_t piece_tiles : {0, 8}) {
      SCOPED_TRACE(testing::Message() << workers << " " << piece_tiles);
      AttentionDecodeProblem p({{.name = "",
                                 .requests = {{4096, 1}, {1537, 1}},
                                 .heads_q = 24,
                                 .heads_kv = 3,
                                 .head_dim = 128,
                                 .page_tokens = 64,
                                 .kv = DType::bf16},
                                {.workers = workers, .piece_tiles = piece_tiles}},
                               1);
      set_flat(p, 1);
      for (int64_t b = 0; b < 2; ++b) {
        const int64_t keys = p.kv_lengths.as<int32_t>()[b];
        for (int64_t j = 0; j < keys; ++j)
          for (int64_t h = 0; h < 3; ++h) p.set_value(b, j, h, j < keys / 2 ? 1 : -1);
        p.set_key(b, 5, 1, 3);
        p.set_key(b, keys - 1, 2, 3);
      }
      ASSERT_OK(attention_decode(p.args, cpu_streams()[1]));
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 24; ++h) {
          const double want = h >= 16 ? -1 : h >= 8 ? 1 : b == 0 ? 0 : -1.0 / 1537;
          EXPECT_NEAR(p.args.attention.output.at(b).at(h).as<float>()[77], want, 1e-6) << b << " " << h;
        }
      }
    }
  }
}

/// https://github.com/flashinfer-ai/flashinfer/pull/4975 : rows without keys kept what the output buffer held.
TEST(AttentionDecode, FieldCaseH03RowsWithoutKeys) {
  for (const bool all_empty : {false, true}) {
    for (const int64_t piece_tiles : {0, 1}) {
      const int64_t lengths[] = {0, all_empty ? 0 : 5, 0, all_empty ? 0 : 130};
      AttentionCase c{.name = "", .requests = {}};
      for (int64_t keys : lengths) c.requests.push_back({keys, 1});
      AttentionDecodeProblem p({c, {.tile_tokens = 16, .workers = 3, .piece_tiles = piece_tiles}}, 1);
      set_flat(p, 0);
      for (int64_t b = 0; b < 4; ++b)
        for (int64_t j = 0; j < lengths[b]; ++j)
          for (int64_t h = 0; h < 3; ++h) p.set_value(b, j, h, 1);
      std::fill_n(p.lse.as<float>(), 4 * 9, 7.0f);
      ASSERT_OK(attention_decode(p.args, Stream{}));
      for (int64_t b = 0; b < 4; ++b) {
        for (int64_t h = 0; h < 9; ++h) {
          const float out = p.args.attention.output.at(b).at(h).as<float>()[3],
                      lse = p.lse.as<float>()[b * 9 + h];
          if (lengths[b] == 0) {
            EXPECT_EQ(out, 0);
            EXPECT_EQ(lse, -INFINITY);
          } else {
            EXPECT_NEAR(out, 1, 1e-6);
            EXPECT_NEAR(lse, std::log(static_cast<double>(lengths[b])), 1e-6);
          }
        }
      }
    }
  }
  int32_t map[decode_schedule_ints(0, 1)];
  AttentionDecodeArgs empty{{.q = Tensor(nullptr, DType::f32, {0, 4, 64}),
                             .k = Tensor(nullptr, DType::f32, {0, 16, 2, 64}),
                             .v = Tensor(nullptr, DType::f32, {0, 16, 2, 64}),
                             .page_table = Tensor(nullptr, DType::i32, {0, 0}),
                             .kv_lengths = Tensor(nullptr, DType::i32, {0}),
                             .output = Tensor(nullptr, DType::f32, {0, 4, 64})},
                            1,
                            {.heads_kv = 2},
                            Tensor(map, DType::i32, {std::ssize(map)})};
  EXPECT_OK(decode_schedule(
      {.kv_lengths = empty.attention.kv_lengths, .params = empty.params, .schedule = empty.schedule},
      Stream{}));
  EXPECT_OK(attention_decode(empty, Stream{}));
}

/// https://github.com/flashinfer-ai/flashinfer/issues/941 : NaN in unused slots of the last page reached the output.
TEST(AttentionDecode, FieldCaseH05UnusedSlots) {
  on_streams([](const Stream& stream, DType type) {
    for (const int64_t workers : {1, 2}) {
      const AttentionDecodeCase c{
          {.name = "", .requests = {{77, 2}}, .page_tokens = 64, .q = type, .kv = type},
          {.workers = workers}};
      AttentionDecodeProblem zero(c, 1), nan(c, 1), infinite(c, 1);
      for (int64_t slot = 77; slot < 128; ++slot) {
        for (int64_t h = 0; h < 3; ++h) {
          zero.set_key(0, slot, h, 0), zero.set_value(0, slot, h, 0);
          infinite.set_key(0, slot, h, INFINITY), infinite.set_value(0, slot, h, INFINITY);
        }
      }
      const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(zero.args, stream)});
      for (AttentionDecodeProblem* p : {&zero, &nan, &infinite}) {
        p->args.workspace = workspace;
        ASSERT_OK(done(attention_decode(p->args, stream), stream));
      }
      EXPECT_TRUE(same_bits(nan.args.attention.output, zero.args.attention.output));
      EXPECT_TRUE(same_bits(infinite.args.attention.output, zero.args.attention.output));
    }
  });
}

/// https://github.com/flashinfer-ai/flashinfer/pull/3136 : a page offset of 2^31 elements wrapped and read elsewhere.
TEST(AttentionDecode, FieldCaseH06PageOffsetBeyond32Bits) {
  const AttentionDecodeCase c{{.name = "", .requests = {{64, 1}}, .page_tokens = 64}};
  AttentionDecodeProblem near(c, 1), far(c, 1);
  constexpr int64_t kPageStride = 5'242'880, kPage = 410, kElements = 64 * 3 * 64;
  const SparseMemory memory(static_cast<size_t>((kPage + 1) * kPageStride * 4));
  ASSERT_TRUE(memory.ok());
  const int64_t page = near.page_table.as<int32_t>()[0];
  auto* pool = static_cast<float*>(memory.data());
  AttentionArgs& a = far.args.attention;
  std::copy_n(a.k.as<float>() + page * kElements, kElements, pool + kPage * kPageStride);
  std::copy_n(a.v.as<float>() + page * kElements, kElements, pool + kPage * kPageStride + kElements);
  a.k.data = pool;
  a.v.data = pool + kElements;
  for (Tensor* t : {&a.k, &a.v}) t->shape[0] = kPage + 1, t->stride[0] = kPageStride;
  far.page_table.as<int32_t>()[0] = kPage;
  ASSERT_OK(attention_decode(near.args, Stream{}));
  ASSERT_OK(attention_decode(far.args, Stream{}));
  EXPECT_TRUE(same_bits(a.output, near.args.attention.output));
}

/// The same with a pool that really is that large: 32,769 pages of 65,536 elements.
TEST(AttentionDecode, FieldCaseH06_large) {
  VIVACE_LARGE_TEST("needs 9 GB");
  const AttentionDecodeCase c{{.name = "",
                               .requests = {{64, 1}},
                               .heads_q = 16,
                               .heads_kv = 8,
                               .head_dim = 128,
                               .page_tokens = 64,
                               .kv = DType::bf16}};
  AttentionDecodeProblem near(c, 1), far(c, 1);
  constexpr int64_t kPages = 32769, kElements = 65536;
  Guarded k(DType::bf16, {kPages, 64, 8, 128}), v(DType::bf16, {kPages, 64, 8, 128});
  const int64_t page = near.page_table.as<int32_t>()[0];
  AttentionArgs& a = far.args.attention;
  std::copy_n(a.k.as<uint16_t>() + page * kElements, kElements, k.as<uint16_t>() + (kPages - 1) * kElements);
  std::copy_n(a.v.as<uint16_t>() + page * kElements, kElements, v.as<uint16_t>() + (kPages - 1) * kElements);
  a.k = k;
  a.v = v;
  far.page_table.as<int32_t>()[0] = kPages - 1;
  ASSERT_OK(attention_decode(near.args, Stream{}));
  ASSERT_OK(attention_decode(far.args, Stream{}));
  EXPECT_TRUE(same_bits(a.output, near.args.attention.output));
}

/// https://github.com/flashinfer-ai/flashinfer/issues/996 : ratios 5, 6, 7 prefilled and then failed to decode.
TEST(AttentionDecode, FieldCaseH08HeadRatios) {
  const std::pair<int64_t, int64_t> heads[] = {{10, 2}, {12, 2}, {14, 2}, {24, 2}, {32, 2},
                                               {3, 1},  {8, 8},  {1, 1},  {2, 1},  {16, 1}};
  for (const auto& [heads_q, heads_kv] : heads) {
    SCOPED_TRACE(testing::Message() << heads_q << "/" << heads_kv);
    AttentionDecodeProblem p({{.name = "",
                               .requests = {{200, 1}},
                               .heads_q = heads_q,
                               .heads_kv = heads_kv,
                               .head_dim = 128,
                               .page_tokens = 64},
                              {.workers = 3}},
                             1);
    set_flat(p, 1);
    for (int64_t h = 0; h < heads_kv; ++h) {
      for (int64_t j = 0; j < 200; ++j) p.set_value(0, j, h, j == 199 ? 2 : -1);
      p.set_key(0, 199, h, 3);
    }
    ASSERT_OK(attention_decode(p.args, Stream{}));
    for (double v : values_of(p.args.attention.output)) EXPECT_NEAR(v, 2.0, 1e-6);
    p.output.poison();
    ASSERT_OK(attention_prefill({p.args.attention}, Stream{}));
    for (double v : values_of(p.args.attention.output)) EXPECT_NEAR(v, 2.0, 1e-6);
  }
}

/// https://github.com/Tencent/hpc-ops/pull/84 : five query tokens per request gave NaN in dynamic decode.
TEST(AttentionDecode, FieldCaseH09QueryTokens) {
  for (int64_t rows = 1; rows <= 8; ++rows) {
    SCOPED_TRACE(rows);
    AttentionDecodeProblem p({{.name = "",
                               .requests = {{130, rows}},
                               .heads_q = 8,
                               .heads_kv = 1,
                               .head_dim = 128,
                               .page_tokens = 64},
                              {.workers = 3}},
                             1);
    set_flat(p, 0);
    for (int64_t j = 0; j < 130; ++j) p.set_value(0, j, 0, static_cast<double>(j % 2));
    ASSERT_OK(attention_decode(p.args, Stream{}));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t keys = 130 - rows + i + 1;
      for (double v : values_of(p.args.attention.output.at(i)))
        EXPECT_NEAR(v, static_cast<double>(keys / 2) / static_cast<double>(keys), 1e-6);
    }
  }
}

/// https://github.com/deepseek-ai/FlashMLA/issues/212 : a row's bits depended on how many rows shared the launch.
TEST(AttentionDecode, FieldCaseH28Company) {
  on_streams([](const Stream& stream, DType type) {
    // One pool of 20,000 keys that all requests look at; the target is request 0.
    AttentionProblem pool(
        {.name = "", .requests = {{20000, 1}}, .heads_q = 2, .heads_kv = 1, .q = type, .kv = type}, 1);
    std::mt19937 rng(5);
    for (const int64_t piece_tiles : {16, 0}) {
      Guarded first;
      for (const int64_t companions : {0, 1, 15, 63}) {
        const int64_t requests = companions + 1;
        for (int repeat = 0; repeat < (companions == 63 ? 2 : 4); ++repeat) {
          std::vector<int64_t> lengths = {9000};
          for (int64_t b = 1; b < requests; ++b) lengths.push_back(1 + static_cast<int64_t>(rng() % 20000));
          AttentionDecodeProblem p({{.name = "",
                                     .requests = requests_of(requests, 1),
                                     .heads_q = 2,
                                     .heads_kv = 1,
                                     .q = type,
                                     .kv = type,
                                     .lse = false},
                                    {.workers = 7, .piece_tiles = piece_tiles}},
                                   1);
          AttentionArgs& a = p.args.attention;
          a.k = pool.args.k;
          a.v = pool.args.v;
          a.page_table = pool.args.page_table;
          a.page_table.shape[0] = requests;
          a.page_table.stride[0] = 0;
          for (int64_t b = 0; b < requests; ++b)
            p.kv_lengths.as<int32_t>()[b] = static_cast<int32_t>(lengths[b]);
          copy_elements(pool.q, p.q, 128);
          ASSERT_OK(p.reschedule());
          const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(p.args, stream)});
          p.args.workspace = workspace;
          ASSERT_OK(done(attention_decode(p.args, stream), stream));
          if (first.bytes() == 0) {
            first = Guarded(type, {2, 64});
            copy_elements(p.output, first, 128);
          }
          if (piece_tiles > 0) {
            ASSERT_TRUE(same_bits(a.output.at(0), first)) << companions;
          } else {  // fp32 roundings of sums whose terms add up to at most max |v|, and those of the rows on a GPU
            const double weights = type == DType::bf16 ? 2 * 0x1p-9 : 0;
            ASSERT_TRUE(close(a.output.at(0), first,
                              Bound::fp32_sum(9000, 5.0) + Bound{weights, 0} + Bound::store(type)));
          }
        }
      }
    }
  });
}

/// https://github.com/Tencent/hpc-ops/pull/59 : the size query promised fewer slots than the scheduler used.
TEST(AttentionDecode, FieldCaseH10WorkspaceOfExactlyTheSize) {
  const int64_t lengths[] = {1, 63, 64, 65, 4097, 8192};
  AttentionProblem pool({.name = "", .requests = {{8192, 1}}, .heads_q = 2, .heads_kv = 1, .head_dim = 16},
                        1);
  std::mt19937 rng(6);
  for (const int64_t workers : {1, 2, 3, 5, 8, 33}) {
    for (const int64_t piece_tiles : {0, 16}) {
      const DecodeScheduleParams params{.heads_kv = 1, .workers = workers, .piece_tiles = piece_tiles};
      // The largest batch, from which the exact size is asked once.
      AttentionDecodeProblem most(
          {{.name = "", .requests = requests_of(7, 1), .heads_q = 2, .heads_kv = 1, .head_dim = 16}, params},
          1);
      const auto look_at_pool = [&](AttentionDecodeArgs& args, int64_t requests) {
        args.attention.k = pool.args.k;
        args.attention.v = pool.args.v;
        args.attention.page_table = pool.args.page_table;
        args.attention.page_table.shape = {requests, 8192 / 16};
        args.attention.page_table.stride[0] = 0;
      };
      look_at_pool(most.args, 7);
      const Guarded exact(DType::u8, {*attention_decode_workspace_bytes(most.args, Stream{})});
      const Guarded roomy(DType::u8, {16 * exact.bytes() + 64});
      const Guarded schedule(DType::i32, {decode_schedule_ints(7, workers)});
      for (int64_t requests = 1; requests <= 8; ++requests) {
        AttentionDecodeProblem p(
            {{.name = "", .requests = requests_of(requests, 1), .heads_q = 2, .heads_kv = 1, .head_dim = 16},
             params},
            1);
        look_at_pool(p.args, requests);
        for (int64_t b = 0; b < requests; ++b)
          p.kv_lengths.as<int32_t>()[b] = static_cast<int32_t>(lengths[rng() % 6]);
        p.args.schedule = schedule;
        const DecodeScheduleArgs step{.kv_lengths = p.kv_lengths,
                                      .query_start = p.query_start,
                                      .params = p.args.params,
                                      .schedule = schedule};
        if (requests == 8) {
          EXPECT_FAILS(decode_schedule(step, Stream{}), Code::invalid_argument, "schedule.shape[0]");
          EXPECT_FAILS(attention_decode(p.args, Stream{}), Code::invalid_argument, "schedule.shape[0]");
          continue;
        }
        ASSERT_OK(decode_schedule(step, Stream{}));
        p.args.workspace = roomy;
        ASSERT_OK(attention_decode(p.args, Stream{}));
        const std::vector<double> want = values_of(p.args.attention.output);
        p.output.poison();
        p.args.workspace = exact;
        ASSERT_OK(attention_decode(p.args, cpu_streams()[1]));
        EXPECT_EQ(values_of(p.args.attention.output), want);
        p.args.workspace = roomy;  // any address will do
        p.args.workspace.data = roomy.as<char>() + 1;
        p.args.workspace.shape[0] = exact.bytes();
        p.output.poison();
        ASSERT_OK(attention_decode(p.args, Stream{}));
        EXPECT_EQ(values_of(p.args.attention.output), want);
        p.args.workspace = exact;
        EXPECT_TRUE(exact.canaries_intact() && schedule.canaries_intact());
        if (exact.bytes() > 0 && requests == 7) {
          p.args.workspace.shape[0] -= 1;
          EXPECT_FAILS(attention_decode(p.args, Stream{}), Code::invalid_argument, "workspace.shape[0] is");
          p.args.workspace = exact;
        }
        p.kv_lengths.as<int32_t>()[0] = 8193;
        EXPECT_FAILS(attention_decode(p.args, Stream{}), Code::invalid_argument,
                     "kv_lengths[0] is 8193, needs 0 .. 8192");
      }
    }
  }
}

/// All scores far below zero: the running maximum must not start at 0, or every weight underflows to 0/0.
TEST(AttentionDecode, VeryNegativeScores) {
  AttentionDecodeProblem p({{.name = "", .requests = {{300, 1}}}, {.workers = 4}}, 1);
  set_flat(p, 1);
  for (int64_t j = 0; j < 300; ++j)
    for (int64_t h = 0; h < 3; ++h) p.set_key(0, j, h, -40), p.set_value(0, j, h, 1.5);
  ASSERT_OK(attention_decode(p.args, Stream{}));
  for (double v : values_of(p.args.attention.output)) EXPECT_NEAR(v, 1.5, 1e-6);
  EXPECT_NEAR(p.lse.as<float>()[0], -320 + std::log(300.0), 320 * 0x1p-20);
}

/// A long table of small pages, all requests on one physical page.
TEST(AttentionDecode, AMillionTokensInPagesOf16) {
  constexpr int64_t kKeys = 1 << 20;
  AttentionDecodeProblem p(
      {{.name = "", .requests = {{16, 1}}, .heads_q = 2, .heads_kv = 1, .head_dim = 16}, {.workers = 5}}, 1);
  AttentionArgs& a = p.args.attention;
  Guarded table(DType::i32, {1, kKeys / 16});
  std::fill_n(table.as<int32_t>(), kKeys / 16, p.page_table.as<int32_t>()[0]);
  std::fill_n(p.q.as<float>(), 32, 0.0f);
  double mean = 0;
  for (int64_t j = 0; j < 16; ++j) mean += a.v.as<float>()[p.offset(a.v, 0, j, 0)] / 16;
  a.page_table = table;
  p.kv_lengths.as<int32_t>()[0] = kKeys;
  ASSERT_OK(p.reschedule());
  ASSERT_OK(attention_decode(p.args, cpu_streams()[1]));
  EXPECT_NEAR(p.output.as<float>()[0], mean, Bound::fp32_sum(kKeys, 4.0).absolute);
  EXPECT_NEAR(p.lse.as<float>()[0], std::log(static_cast<double>(kKeys)), 1e-5);
}

/// What fp8 loses is rounding of weights and values, each on its own: relative to the outputs it does not grow with the length.
TEST(AttentionDecode, Fp8ErrorDoesNotGrowWithTheLength) {
  for (const Stream& stream : test_streams()) {
    double shortest = 0;
    for (const int64_t keys : {256, 4096, 65536}) {
      const AttentionDecodeCase c{{.name = "",
                                   .requests = {{keys, 1}},
                                   .heads_q = 8,
                                   .heads_kv = 1,
                                   .head_dim = 128,
                                   .page_tokens = 64,
                                   .q = DType::fp8_e4m3,
                                   .kv = DType::fp8_e4m3,
                                   .output = DType::f32},
                                  {.tile_tokens = 64, .workers = 3}};
      AttentionDecodeProblem want(c, 1);
      ASSERT_OK(attention_decode_reference(want.args, Stream{}));
      for_each_fitting_row(kAttentionDecode, want.args, stream, [&](const auto& row) {
        if (row.name == "reference") return;
        AttentionDecodeProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        double squares = 0, errors = 0;
        for (int64_t i = 0; i < 8 * 128; ++i) {
          const double w = want.output.as<float>()[i], e = got.output.as<float>()[i] - w;
          squares += w * w;
          errors += e * e;
        }
        const double error = std::sqrt(errors / squares);
        SCOPED_TRACE(testing::Message() << row.name << ", " << keys << " keys: " << error);
        EXPECT_LT(error, 0x1p-9);
        if (keys == 256) shortest = std::max(shortest, error);
        EXPECT_LT(error, 2 * shortest + 0x1p-16);  // sums of 65,536 terms in fp32
      });
    }
  }
}

/// The workspace of a wide model does not grow with batch times workers.
TEST(AttentionDecode, WorkspaceStaysSmall) {
  AttentionDecodeArgs args;
  args.attention.q = Tensor(nullptr, DType::bf16, {512, 64, 128});
  args.attention.k = args.attention.v = Tensor(nullptr, DType::bf16, {0, 64, 8, 128});
  args.attention.page_table = Tensor(nullptr, DType::i32, {512, 2048});
  args.params = {.heads_kv = 8, .workers = 528};
  const Result<int64_t> bytes = attention_decode_workspace_bytes(args, Stream{});
  ASSERT_OK(bytes.status());
  EXPECT_LT(*bytes, 200'000'000);
}

TEST(AttentionDecode, LargeHeadsGoToTheReference) {
  const AttentionDecodeCase c{
      {.name = "", .requests = {{20, 1}}, .heads_q = 2, .heads_kv = 1, .head_dim = kMaxHeadDim + 1},
      {.workers = 1}};
  AttentionDecodeProblem p(c, 1);
  const Choice choice = attention_decode_explain(p.args, Stream{});
  EXPECT_EQ(choice.row, "reference");
  ASSERT_FALSE(choice.refused.empty());
  EXPECT_EQ(choice.refused.back().reason, "needs head_dim <= 512, got 513");
  EXPECT_OK(attention_decode(p.args, Stream{}));
  Dispatch preference;
  ASSERT_OK(preference.prefer("attention_decode=cpu"));
  EXPECT_FAILS(attention_decode(p.args, Stream{.dispatch = &preference}), Code::unsupported,
               "needs head_dim <= 512, got 513");
}

/// What the CPU refuses, a GPU row survives: page ids and lengths beyond what there is touch nothing outside the tensors and no
/// other request. The schedule is made for the lengths as they were.
TEST(AttentionDecode, OutOfRangeOnTheGpu) {
  const AttentionDecodeCase c{
      {.name = "", .requests = {{300, 1}, {200, 2}, {64, 1}}, .q = DType::bf16, .kv = DType::bf16},
      {.workers = 5}};
  for (const Stream& stream : test_streams()) {
    if (stream.device == Device::cpu) continue;
    const AttentionDecodeProblem any(c, 1);
    for_each_fitting_row(kAttentionDecode, any.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      AttentionDecodeProblem clean(c, 1), broken(c, 1);
      ASSERT_OK(row.run(clean.args, stream));
      int32_t* table = broken.page_table.template as<int32_t>();
      table[1] = -1;
      table[2] = 1 << 30;
      table[3] = INT32_MIN;
      broken.kv_lengths.template as<int32_t>()[0] = 1 << 30;
      ASSERT_OK(row.run(broken.args, stream));
      const Tensor &got = broken.args.attention.output, &want = clean.args.attention.output;
      EXPECT_TRUE(same_bits(got.rows(1, 3), want.rows(1, 3)));
      EXPECT_TRUE(broken.output.canaries_intact() && broken.lse.canaries_intact());

      // Rows that are not in q, of a request that the map has cut: it has no rows, and its neighbours do not notice.
      AttentionDecodeProblem outside(c, 1);
      outside.query_start.template as<int32_t>()[3] = 1000;
      ASSERT_OK(row.run(outside.args, stream));
      EXPECT_TRUE(same_bits(outside.args.attention.output.rows(0, 3), want.rows(0, 3)));
      AttentionDecodeProblem negative(c, 1);
      negative.query_start.template as<int32_t>()[0] = -5;
      negative.kv_lengths.template as<int32_t>()[1] = -1;
      ASSERT_OK(row.run(negative.args, stream));
      EXPECT_TRUE(same_bits(negative.args.attention.output.rows(3, 1), want.rows(3, 1)));
      for (const AttentionDecodeProblem* p : {&outside, &negative})
        EXPECT_TRUE(p->output.canaries_intact() && p->lse.canaries_intact());

      // A map for other parameters: nothing is done.
      AttentionDecodeProblem foreign(c, 1);
      int32_t* header = foreign.schedule.template as<int32_t>();
      header[0] = 1000, header[2] = 16, header[3] = 900;
      const auto bytes = static_cast<size_t>(foreign.output.bytes());
      std::memset(foreign.output.as<char>(), 0x55, bytes);
      ASSERT_OK(row.run(foreign.args, stream));
      EXPECT_EQ(std::count(foreign.output.as<char>(), foreign.output.as<char>() + bytes, 0x55),
                foreign.output.bytes());
      EXPECT_TRUE(foreign.output.canaries_intact() && foreign.lse.canaries_intact());

      // A map whose cuts no worker has pieces of.
      if (!row.name.starts_with("sm90.")) return;
      AttentionDecodeProblem garbage(c, 1);
      int32_t* starts = garbage.schedule.template as<int32_t>() + schedule_map::kHeaderInts;
      for (int64_t i = 1; i < c.params.workers; ++i)
        starts[4 * i] = (i * 7) % 3, starts[4 * i + 2] = 1 + i % 5;
      ASSERT_OK(row.run(garbage.args, stream));
      EXPECT_TRUE(garbage.output.canaries_intact() && garbage.lse.canaries_intact());
    });
  }
}

/// Whatever a check looks at makes another form; an address only by its alignment.
TEST(AttentionDecode, TheFormOfACall) {
  AttentionDecodeArgs args;
  AttentionArgs& a = args.attention;
  DecodeScheduleParams& p = args.params;
  const std::array tensors = {&a.q,           &a.k,      &a.v,           &a.page_table,  &a.kv_lengths,
                              &a.query_start, &a.output, &a.q_scale,     &a.k_scale,     &a.v_scale,
                              &a.sinks,       &a.lse,    &args.schedule, &args.workspace};
  for (size_t i = 0; i < tensors.size(); i += 2)  // the others are absent
    *tensors[i] = Tensor(reinterpret_cast<void*>(0x10000 * (i + 1)), DType::bf16, {2, 3, 4}, Device::cuda);
  Stream stream{.device = Device::cuda, .compute_capability = 90};
  const CallForm form = attention_decode_form(args, stream);
  const auto changes = [&](auto& field, const auto& value) {
    const auto before = std::exchange(field, value);
    const bool changed = !(attention_decode_form(args, stream) == form);
    field = before;
    return changed;
  };
  for (Tensor* tensor : tensors) {
    SCOPED_TRACE(tensor - &a.q);
    const auto moved = [&](int64_t bytes) { return static_cast<char*>(tensor->data) + bytes; };
    EXPECT_TRUE(changes(tensor->dtype, DType::f32));
    EXPECT_TRUE(changes(tensor->device, tensor->present() ? Device::cpu : Device::cuda));
    EXPECT_TRUE(changes(tensor->rank, tensor->rank == 3 ? 2 : 1));
    EXPECT_TRUE(changes(tensor->rank, 7));
    EXPECT_TRUE(changes(tensor->rank, -1));
    for (int64_t bytes : {1, 2, 4, 8, 16, 32, 64, 128})
      EXPECT_TRUE(changes(tensor->data, static_cast<void*>(moved(bytes))));
    EXPECT_EQ(changes(tensor->data, static_cast<void*>(nullptr)), tensor->present());
    if (!tensor->present()) continue;
    EXPECT_FALSE(changes(tensor->data, static_cast<void*>(moved(256))));
    for (int i = 0; i < tensor->rank; ++i) {
      EXPECT_TRUE(changes(tensor->shape[i], tensor->shape[i] + 1));
      EXPECT_TRUE(changes(tensor->stride[i], tensor->stride[i] + 1));
    }
  }
  for (double* value : {&a.softmax_scale, &a.soft_cap}) {
    EXPECT_TRUE(changes(*value, 1.));
    EXPECT_TRUE(changes(*value, std::nan("")));
  }
  for (int64_t* value : {&a.window, &args.max_query_tokens, &p.heads_kv, &p.tile_tokens, &p.workers,
                         &p.min_tiles, &p.request_cost, &p.window, &p.piece_tiles}) {
    EXPECT_TRUE(changes(*value, *value + 1));
  }
  EXPECT_TRUE(changes(stream.ordinal, 1));
  EXPECT_TRUE(changes(stream.compute_capability, 80));
}

/// `good()` passes; so it does before and after each call that differs from `args` in one thing, and is refused for that.
template <class Good>
void expect_refusals_between(const AttentionDecodeArgs& args, const Stream& stream, const Good& good) {
  const auto refused = [&](const char* said, auto change) {
    AttentionDecodeArgs changed = args;
    change(changed);
    for (int i = 0; i < 2; ++i) {
      good();
      EXPECT_FAILS(attention_decode(changed, stream), Code::invalid_argument, said);
      EXPECT_FAILS(attention_decode(changed, stream), Code::invalid_argument, said);
    }
  };
  using Args = AttentionDecodeArgs;
  refused("k.shape[3] is", [](Args& args) { --args.attention.k.shape[3]; });
  refused("needs v of type ", [](Args& args) { args.attention.v.dtype = DType::f16; });
  refused("q.stride[2] is 2", [](Args& args) { args.attention.q.stride[2] = 2; });
  refused("kv_lengths is on ", [&](Args& args) {
    args.attention.kv_lengths.device = stream.device == Device::cpu ? Device::cuda : Device::cpu;
  });
  refused("lse.shape[0] is", [](Args& args) { --args.attention.lse.shape[0]; });
  refused("schedule.shape[0] is 20", [](Args& args) { args.schedule.shape[0] = 20; });
  refused("workspace is absent", [](Args& args) { args.workspace = Tensor(); });
  refused("max_query_tokens is 9", [](Args& args) { args.max_query_tokens = 9; });
  refused("soft_cap is -1", [](Args& args) { args.attention.soft_cap = -1; });
  refused("params.workers is 0", [](Args& args) { args.params.workers = 0; });
  refused("output is a null pointer", [](Args& args) { args.attention.output.data = nullptr; });
  std::thread([&] {
    refused("output.shape[1] is", [](Args& args) { --args.attention.output.shape[1]; });
  }).join();
}

/// Calls that were found good make none good that differs: at the same addresses, in any order, and from any thread.
TEST(AttentionDecode, AGoodCallVouchesForNoOther) {
  on_streams([](Stream stream, DType type) {
    Dispatch dispatch;
    stream.dispatch = &dispatch;
    AttentionCase c{.name = "", .requests = {{300, 1}, {64, 1}}, .q = type, .kv = type};
    AttentionDecodeProblem p({c, {.workers = 5}}, 1), want({c, {.workers = 5}}, 1);
    const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(p.args, stream)});
    p.args.workspace = workspace;
    ASSERT_OK(attention_decode_reference(want.args, Stream{}));
    const AttentionBounds bounds = attention_bounds(want.args.attention, stream.device);
    const auto good = [&] {
      p.output.poison();
      ASSERT_OK(done(attention_decode(p.args, stream), stream));
      EXPECT_TRUE(close(p.args.attention.output, want.args.attention.output, bounds.output));
    };
    expect_refusals_between(p.args, stream, good);
    // A preference counts for calls that were known before.
    ASSERT_OK(dispatch.prefer("attention_decode=reference"));
    const Status status = attention_decode(p.args, stream);
    EXPECT_EQ(status.code(), stream.device == Device::cuda ? Code::unsupported : Code::ok);
    EXPECT_EQ(attention_decode_explain(p.args, stream).row, stream.device == Device::cuda ? "" : "reference");
  });
}

#if VIVACE_CUDA
/// The same where there is no GPU: a call that passes ends in what its row says of that.
TEST(AttentionDecode, AGoodCallVouchesForNoOtherWithoutAGpu) {
  if (device::device_count() > 0) GTEST_SKIP() << "it would run";
  const Stream stream{.device = Device::cuda, .compute_capability = 90};
  AttentionDecodeProblem p(
      {{.name = "", .requests = {{300, 1}, {64, 1}}, .q = DType::bf16, .kv = DType::bf16}, {.workers = 5}},
      1);
  AttentionArgs& a = p.args.attention;
  for (Tensor* tensor :
       {&a.q, &a.k, &a.v, &a.page_table, &a.kv_lengths, &a.query_start, &a.output, &a.lse, &p.args.schedule})
    tensor->device = Device::cuda;
  const Guarded workspace(DType::u8, {*attention_decode_workspace_bytes(p.args, stream)});
  p.args.workspace = workspace;
  p.args.workspace.device = Device::cuda;
  expect_refusals_between(p.args, stream, [&] {
    EXPECT_FAILS(attention_decode(p.args, stream), Code::device_error, "cuTensorMapEncodeTiled");
  });
}
#endif

#if VIVACE_CUDA
/// The cases that are there for the Hopper rows are none that they leave to another.
TEST(AttentionDecode, TheHopperRowsTakeTheirCases) {
  const Stream hopper{.device = Device::cuda, .compute_capability = 90};
  int cases = 0, few_cases = 0;
  for (const AttentionDecodeCase& c : attention_decode_cases(CaseSize::test)) {
    if (!c.sm90) continue;
    const AttentionDecodeProblem p(c, 1);
    const Tensor& k = p.args.attention.k;
    const bool few = p.args.attention.page_table.shape[0] * k.shape[2] <= attention_sm90::kFewUnits &&
                     unit_rows(p.args) <= attention_sm90::kFewRows && k.shape[3] <= 128;
    ++cases;
    few_cases += few ? 1 : 0;
    EXPECT_EQ(attention_decode_explain(p.args, hopper).row, few ? "sm90.few" : "sm90.warps") << c.name;
    AttentionDecodeArgs moved = p.args;  // it reads 16 bytes of a schedule at once
    moved.schedule.data = moved.schedule.as<int32_t>() + 1;
    EXPECT_EQ(attention_decode_explain(moved, hopper).row, "cuda.mma") << c.name;
  }
  EXPECT_GE(cases, 14);
  EXPECT_GE(few_cases, 4);
  EXPECT_GE(cases - few_cases, 4);
}

/// Any smaller call fits what the largest asked for, whichever row of a GPU takes either.
TEST(AttentionDecode, TheWorkspaceOfTheLargestCallCoversAll) {
  const Stream hopper{.device = Device::cuda, .compute_capability = 90};
  std::mt19937 rng(5);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint32_t>(n)); };
  const auto bytes_of = [&](const DecodeScheduleParams& params, int64_t group, int64_t heads_kv,
                            int64_t queries, int64_t width, int64_t page) {
    AttentionDecodeArgs args{.max_query_tokens = queries, .params = params};
    args.attention.q = Tensor(nullptr, DType::bf16, {1, group * heads_kv, width}, Device::cuda);
    args.attention.k = args.attention.v =
        Tensor(nullptr, DType::bf16, {100, page, heads_kv, width}, Device::cuda);
    args.attention.page_table = Tensor(nullptr, DType::i32, {3, 20}, Device::cuda);
    args.attention.output = args.attention.q;
    args.params.heads_kv = heads_kv;
    const Result<int64_t> bytes = attention_decode_workspace_bytes(args, hopper);
    EXPECT_TRUE(bytes.ok()) << bytes.status().message();
    return bytes.ok() ? *bytes : 0;
  };
  for (int repeat = 0; repeat < 3000; ++repeat) {
    const DecodeScheduleParams params{.tile_tokens = int64_t{16} << below(4), .workers = 1 + below(600)};
    const int64_t group = 1 + below(20), heads_kv = 1 + below(8), queries = 1 + below(8);
    const int64_t width = 8 * (1 + below(32)), page = int64_t{1} << below(9);
    const int64_t most = bytes_of(params, group, heads_kv, queries, width, page);
    const int64_t smaller =
        bytes_of(params, 1 + below(group), heads_kv, 1 + below(queries), 8 * (1 + below(width / 8)),
                 int64_t{1} << below(std::countr_zero(static_cast<uint64_t>(page)) + 1));
    EXPECT_LE(smaller, most) << "workers " << params.workers << ", group " << group << ", width " << width;
  }
}
#endif

/// Lengths or parameters that disagree with the map are refused, not followed.
TEST(AttentionDecode, RefusesAForeignSchedule) {
  const AttentionDecodeCase c{{.name = "", .requests = {{300, 2}, {64, 1}}}, {.workers = 3}};
  const auto fails = [&](auto&& change, const char* text) {
    AttentionDecodeProblem p(c, 1);
    change(p);
    EXPECT_FAILS(attention_decode(p.args, Stream{}), Code::invalid_argument, text);
  };
  fails([](auto& p) { p.kv_lengths.template as<int32_t>()[0] = 200; },
        "schedule was made for other lengths: request 0");
  fails([](auto& p) { p.args.params.tile_tokens = 32; }, "schedule was made for tile_tokens = 64, needs 32");
  fails([](auto& p) { p.args.params.workers = 2; }, "schedule was made for workers = 3, needs 2");
  fails([](auto& p) { p.args.params.heads_kv = 9; }, "params.heads_kv is 9, needs heads_kv");
  fails([](auto& p) { p.args.params.window = 9; }, "params.window is 9, needs the window of the attention");
  fails([](auto& p) { p.args.max_query_tokens = 1; }, "request 0 has 2 query tokens, needs at most");
  fails([](auto& p) { p.args.max_query_tokens = 9; }, "max_query_tokens is 9, needs 1 to 8");
  fails([](auto& p) { p.schedule.template as<int32_t>()[16 + 4] = 77; }, "schedule start 1 is request 77");
  fails([](auto& p) { p.args.workspace = {}; }, "workspace is absent, needs");
}

}  // namespace
}  // namespace vivace
