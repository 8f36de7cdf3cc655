#include "src/ops/attention_prefill/cases.h"

#include "src/ops/attention_prefill/table.h"
#include "tests/ops/attention_test.h"

namespace vivace {
namespace {

TEST(AttentionPrefill, EveryRowAgreesWithTheReference) {
  for (const AttentionPrefillCase& c : attention_prefill_cases(CaseSize::test)) {
    SCOPED_TRACE(testing::Message() << c.attention.name << ", " << name_of(c.attention.q) << " over "
                                    << name_of(c.attention.kv));
    AttentionPrefillProblem want(c, 1);
    ASSERT_OK(attention_prefill(want.args, Stream{}));
    ASSERT_OK(attention_prefill_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      const AttentionBounds bounds = attention_bounds(want.args.attention, stream.device);
      for_each_fitting_row(kAttentionPrefill, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        AttentionPrefillProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_TRUE(close(got.args.attention.output, want.args.attention.output, bounds.output));
        EXPECT_TRUE(close(got.lse, want.lse, bounds.lse));
        EXPECT_TRUE(got.output.canaries_intact() && got.lse.canaries_intact());
      });
    }
  }
}

/// Two tokens, one head, head_dim 2: the second sees scores 0 and ln 3.
TEST(AttentionPrefill, HandWorked) {
  float q[] = {1, 0, 1, 0}, k[] = {0, 5, std::log(3.0f), 0}, v[] = {1, 2, 5, 6}, output[4], lse[2];
  int32_t table[] = {0}, lengths[] = {2}, start[] = {0, 2};
  AttentionPrefillArgs args{{.q = Tensor(q, DType::f32, {2, 1, 2}),
                             .k = Tensor(k, DType::f32, {1, 2, 1, 2}),
                             .v = Tensor(v, DType::f32, {1, 2, 1, 2}),
                             .page_table = Tensor(table, DType::i32, {1, 1}),
                             .kv_lengths = Tensor(lengths, DType::i32, {1}),
                             .query_start = Tensor(start, DType::i32, {2}),
                             .output = Tensor(output, DType::f32, {2, 1, 2}),
                             .lse = Tensor(lse, DType::f32, {2, 1}),
                             .softmax_scale = 1}};
  for (const Row<AttentionPrefillArgs>& row : kAttentionPrefillRows) {
    if (row.device != Device::cpu) continue;  // these tensors are on the stack
    SCOPED_TRACE(row.name);
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_NEAR(output[0], 1, 1e-6);
    EXPECT_NEAR(output[1], 2, 1e-6);
    EXPECT_NEAR(output[2], 4, 2e-6);  // (1 * 1 + 3 * 5) / 4
    EXPECT_NEAR(output[3], 5, 2e-6);
    EXPECT_NEAR(lse[0], 0, 1e-6);
    EXPECT_NEAR(lse[1], std::log(4.0), 1e-6);
  }
  float sinks[] = {std::log(4.0f)};  // as heavy as both keys together
  args.attention.sinks = Tensor(sinks, DType::f32, {1});
  for (const Row<AttentionPrefillArgs>& row : kAttentionPrefillRows) {
    if (row.device != Device::cpu) continue;  // these tensors are on the stack
    SCOPED_TRACE(row.name);
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_NEAR(output[2], 2, 2e-6);
    EXPECT_NEAR(lse[1], std::log(8.0), 1e-6);
  }
}

/// A row has the same bits whatever chunk it comes in.
TEST(AttentionPrefill, ChunksDoNotChangeABit) {
  const auto run = [](const Stream& stream, DType type) {
    for (const int64_t split : {int64_t{0}, int64_t{64}, int64_t{80}}) {
      for (const int64_t window : {int64_t{0}, int64_t{90}}) {
        const AttentionPrefillCase c{{.name = "",
                                      .requests = {{300, 300}},
                                      .heads_q = 6,
                                      .heads_kv = 2,
                                      .q = type,
                                      .kv = type,
                                      .window = window},
                                     split};
        AttentionPrefillProblem whole(c, 1), chunked(c, 1);
        ASSERT_OK(done(attention_prefill(whole.args, stream), stream));
        std::mt19937 rng(2);
        for (int64_t begin = 0; begin < 300;) {
          const int64_t rows = std::min<int64_t>(300 - begin, 1 + rng() % 70);
          AttentionPrefillArgs args = chunked.args;
          for (Tensor* t : {&args.attention.q, &args.attention.output, &args.attention.lse})
            *t = t->rows(begin, rows);
          if (args.attention.q_scale.present())
            args.attention.q_scale = args.attention.q_scale.rows(begin, rows);
          chunked.kv_lengths.as<int32_t>()[0] = static_cast<int32_t>(begin + rows);
          chunked.query_start.as<int32_t>()[1] = static_cast<int32_t>(rows);
          ASSERT_OK(done(attention_prefill(args, stream), stream));
          begin += rows;
        }
        EXPECT_TRUE(same_bits(chunked.args.attention.output, whole.args.attention.output)) << split;
        EXPECT_TRUE(same_bits(chunked.lse, whole.lse)) << split;
      }
    }
  };
  on_streams([&](const Stream& stream, DType type) {
    run(stream, type);
    run(stream, DType::fp8_e4m3);
  });
}

/// A key that a row does not see leaves no trace in it, even when it is NaN and another row of the call sees it.
TEST(AttentionPrefill, UnseenKeysLeaveNoTrace) {
  constexpr int64_t kTokens = 300, kKey = 250, kWindow = 40;
  on_streams([](const Stream& stream, DType plain) {
    struct Kind {
      DType type;
      int64_t head_dim;
    };
    constexpr DType kFp8 = DType::fp8_e4m3;
    for (const auto [type, head_dim] :
         {Kind{plain, 64}, {plain, 128}, {plain, 256}, {kFp8, 64}, {kFp8, 128}}) {
      for (const float value : {NAN, INFINITY, -INFINITY}) {
        if (type == kFp8 && !std::isnan(value)) continue;  // it has no infinity
        SCOPED_TRACE(testing::Message() << name_of(type) << ", head " << head_dim << ", " << value);
        const AttentionPrefillCase c{{.name = "",
                                      .requests = {{kTokens, kTokens}},
                                      .heads_q = 6,
                                      .heads_kv = 2,
                                      .head_dim = head_dim,
                                      .q = type,
                                      .kv = type,
                                      .window = kWindow}};
        AttentionPrefillProblem clean(c, 1), dirty(c, 1);
        for (int64_t h = 0; h < 2; ++h) {
          dirty.set_key(0, kKey, h, std::isnan(value) ? NAN : 0);
          dirty.set_value(0, kKey, h, value);
        }
        for (const int64_t window : {int64_t{0}, kWindow}) {
          clean.args.attention.window = dirty.args.attention.window = window;
          ASSERT_OK(done(attention_prefill(clean.args, stream), stream));
          ASSERT_OK(done(attention_prefill(dirty.args, stream), stream));
          const Tensor &got = dirty.args.attention.output, &want = clean.args.attention.output;
          EXPECT_TRUE(same_bits(got.rows(0, kKey), want.rows(0, kKey)));
          const int64_t after = window > 0 ? kKey + window : kTokens;
          EXPECT_TRUE(same_bits(got.rows(after, kTokens - after), want.rows(after, kTokens - after)));
          const double seen = values_of(got.at(kKey).at(0))[0];
          EXPECT_TRUE(std::isnan(value) ? std::isnan(seen) : seen == value)
              << "what is seen must show: " << value << " gave " << seen;
        }
      }
    }
  });
}

/// A NaN score makes its row NaN however the keys are cut; a score of -infinity weighs nothing.
TEST(AttentionPrefill, NanShows) {
  on_streams([](const Stream& stream, DType type) {
    for (const NanCase& nan : kNanCases) {
      for (const NanOptions& options : kNanOptions) {
        for (const int64_t split : {0, 64, 80}) {
          SCOPED_TRACE(testing::Message() << nan.name << ", sinks " << options.sinks << ", split " << split);
          const AttentionPrefillCase c{{.name = "",
                                        .requests = {{400, 3}, {64, 2}},
                                        .q = type,
                                        .kv = type,
                                        .window = options.window,
                                        .soft_cap = options.soft_cap,
                                        .sinks = options.sinks},
                                       split};
          AttentionPrefillProblem want(c, 1);
          set_nan(want, nan);
          ASSERT_OK(attention_prefill_reference(want.args, Stream{}));
          if (options.window == 0) {
            EXPECT_EQ(std::isnan(values_of(want.args.attention.output.at(2))[0]), nan_expected(nan, options));
          }
          for_each_fitting_row(kAttentionPrefill, want.args, stream, [&](const auto& row) {
            SCOPED_TRACE(row.name);
            AttentionPrefillProblem got(c, 1);
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

/// https://github.com/flashinfer-ai/flashinfer/issues/941 : NaN in unused slots of the last page reached the output.
TEST(AttentionPrefill, FieldCaseH05UnusedSlots) {
  on_streams([](const Stream& stream, DType type) {
    const AttentionPrefillCase c{
        {.name = "", .requests = {{77, 77}}, .page_tokens = 64, .q = type, .kv = type}};
    AttentionPrefillProblem zero(c, 1), nan(c, 1), infinite(c, 1);
    for (int64_t slot = 77; slot < 128; ++slot) {
      for (int64_t h = 0; h < 3; ++h) {
        zero.set_key(0, slot, h, 0), zero.set_value(0, slot, h, 0);
        infinite.set_key(0, slot, h, INFINITY), infinite.set_value(0, slot, h, INFINITY);
      }
    }
    for (AttentionPrefillProblem* p : {&zero, &nan, &infinite})
      ASSERT_OK(done(attention_prefill(p->args, stream), stream));
    EXPECT_TRUE(same_bits(nan.args.attention.output, zero.args.attention.output));
    EXPECT_TRUE(same_bits(infinite.args.attention.output, zero.args.attention.output));
  });
}

/// https://github.com/flashinfer-ai/flashinfer/pull/3136 : a page offset of 2^31 elements wrapped and read elsewhere.
TEST(AttentionPrefill, FieldCaseH06PageOffsetBeyond32Bits) {
  const AttentionPrefillCase c{{.name = "", .requests = {{40, 40}}, .page_tokens = 64}};
  AttentionPrefillProblem near(c, 1), far(c, 1);
  constexpr int64_t kPageStride = 5'242'880, kPage = 410;
  static_assert(kPage * kPageStride > int64_t{1} << 31);
  const SparseMemory memory(static_cast<size_t>((kPage + 1) * kPageStride * 4));
  ASSERT_TRUE(memory.ok());
  const int64_t page_elements = 64 * 3 * 64;
  const int64_t page = near.page_table.as<int32_t>()[0];
  auto* pool = static_cast<float*>(memory.data());
  std::copy_n(near.args.attention.k.as<float>() + page * page_elements, page_elements,
              pool + kPage * kPageStride);
  std::copy_n(near.args.attention.v.as<float>() + page * page_elements, page_elements,
              pool + kPage * kPageStride + page_elements);
  for (Tensor* t : {&far.args.attention.k, &far.args.attention.v}) {
    t->data = pool + (t == &far.args.attention.v ? page_elements : 0);
    t->shape[0] = kPage + 1;
    t->stride[0] = kPageStride;
  }
  far.page_table.as<int32_t>()[0] = kPage;
  ASSERT_OK(attention_prefill(near.args, Stream{}));
  ASSERT_OK(attention_prefill(far.args, Stream{}));
  EXPECT_TRUE(same_bits(far.args.attention.output, near.args.attention.output));
}

/// A row offset of q and output beyond 2^31 elements, as tokens * heads_q * head_dim has it at 300K tokens.
TEST(AttentionPrefill, RowOffsetBeyond32Bits) {
  const AttentionPrefillCase c{{.name = "", .requests = {{3, 3}}, .heads_q = 2, .heads_kv = 1, .lse = false}};
  AttentionPrefillProblem near(c, 1), far(c, 1);
  constexpr int64_t kStride = (int64_t{1} << 30) + 64;
  const SparseMemory memory(3 * kStride * 4);
  ASSERT_TRUE(memory.ok());
  AttentionArgs& a = far.args.attention;
  a.q.data = memory.data();
  a.output.data = static_cast<float*>(memory.data()) + 256;
  a.q.stride[0] = a.output.stride[0] = kStride;
  for (int64_t t = 0; t < 3; ++t) std::copy_n(near.q.as<float>() + t * 128, 128, a.q.at(t).as<float>());
  ASSERT_OK(attention_prefill(near.args, Stream{}));
  ASSERT_OK(attention_prefill(far.args, Stream{}));
  EXPECT_TRUE(same_bits(a.output, near.args.attention.output));
}

/// Empty batches may come with null pointers.
TEST(AttentionPrefill, NothingToDo) {
  AttentionPrefillArgs args{{.q = Tensor(nullptr, DType::f32, {0, 4, 64}),
                             .k = Tensor(nullptr, DType::f32, {0, 16, 2, 64}),
                             .v = Tensor(nullptr, DType::f32, {0, 16, 2, 64}),
                             .page_table = Tensor(nullptr, DType::i32, {0, 0}),
                             .kv_lengths = Tensor(nullptr, DType::i32, {0}),
                             .output = Tensor(nullptr, DType::f32, {0, 4, 64})}};
  EXPECT_OK(attention_prefill(args, Stream{}));
}

TEST(AttentionPrefill, LargeHeadsGoToTheReference) {
  const AttentionPrefillCase c{
      {.name = "", .requests = {{20, 5}}, .heads_q = 2, .heads_kv = 1, .head_dim = kMaxHeadDim + 1}};
  AttentionPrefillProblem p(c, 1);
  const Choice choice = attention_prefill_explain(p.args, Stream{});
  EXPECT_EQ(choice.row, "reference");
  ASSERT_FALSE(choice.refused.empty());
  EXPECT_EQ(choice.refused.back().reason, "needs head_dim <= 512, got 513");
  EXPECT_OK(attention_prefill(p.args, Stream{}));
  Dispatch preference;
  ASSERT_OK(preference.prefer("attention_prefill=cpu"));
  EXPECT_FAILS(attention_prefill(p.args, Stream{.dispatch = &preference}), Code::unsupported,
               "needs head_dim <= 512, got 513");
}

TEST(AttentionPrefill, RefusesWrongScales) {
  const AttentionPrefillCase c{{.name = "",
                                .requests = {{20, 5}, {7, 7}},
                                .q = DType::fp8_e4m3,
                                .kv = DType::fp8_e4m3,
                                .scale_per_key = true}};
  const auto fails = [&](auto&& change, const char* text) {
    AttentionPrefillProblem p(c, 1);
    change(p);
    EXPECT_FAILS(attention_prefill(p.args, Stream{}), Code::invalid_argument, text);
  };
  fails([](auto& p) { p.args.attention.q_scale = {}; }, "q_scale is absent");
  fails([](auto& p) { p.args.attention.k_scale = {}; }, "k_scale is absent");
  fails([](auto& p) { p.args.attention.v_scale = {}; }, "v_scale is absent");
  fails([](auto& p) { p.args.attention.q_scale.shape[1] = 8; }, "q_scale.shape[1] is 8, needs heads_q = 9");
  fails([](auto& p) { p.args.attention.k_scale.shape[2] = 2; }, "k_scale.shape[2] is 2, needs heads_kv = 3");
  fails([](auto& p) { p.args.attention.v_scale.shape[0] = 2; }, "v_scale.shape[0] is 2, needs heads_kv = 3");
  fails([](auto& p) { p.args.attention.output.dtype = DType::fp8_e4m3; }, "needs output of type");
  fails([](auto& p) { p.args.attention.q.dtype = p.args.attention.output.dtype = DType::bf16; },
        "q_scale.shape[0] is 12, needs no q_scale");
}

TEST(AttentionPrefill, RefusesWhatDisagrees) {
  const AttentionPrefillCase c{{.name = "", .requests = {{20, 5}, {7, 7}}}};
  const auto fails = [&](auto&& change, const char* text) {
    AttentionPrefillProblem p(c, 1);
    change(p);
    EXPECT_FAILS(attention_prefill(p.args, Stream{}), Code::invalid_argument, text);
  };
  fails([](auto& p) { p.args.attention.v.shape[3] = 60; }, "v.shape[3] is 60, needs head_dim = 64");
  fails([](auto& p) { p.args.attention.output.dtype = DType::bf16; }, "needs output of type f32, got bf16");
  fails([](auto& p) { p.args.attention.softmax_scale = NAN; }, "softmax_scale is nan");
  fails([](auto& p) { p.args.attention.window = -1; }, "window is -1, needs at least 0");
  fails([](auto& p) { p.args.max_query_tokens = -1; }, "max_query_tokens is -1, needs at least 0");
  fails([](auto& p) { p.args.max_query_tokens = 6; }, "request 1 has 7 query tokens, needs at most");
  fails([](auto& p) { p.args.split_tokens = -1; }, "split_tokens is -1, needs at least 0");
  fails([](auto& p) { p.kv_lengths.template as<int32_t>()[1] = -3; }, "kv_lengths[1] is -3, needs 0 .. 48");
  fails([](auto& p) { p.kv_lengths.template as<int32_t>()[1] = 49; }, "kv_lengths[1] is 49, needs 0 .. 48");
  fails([](auto& p) { p.query_start.template as<int32_t>()[2] = 4; }, "query_start[2] is 4, needs 5 .. 12");
  fails([](auto& p) { p.query_start.template as<int32_t>()[2] = 13; }, "query_start[2] is 13, needs 5 .. 12");
  fails([](auto& p) { p.page_table.template as<int32_t>()[1] = 5; }, "page_table[0, 1] is 5, needs 0 .. 4");
  fails(
      [](auto& p) {
        p.args.attention.q.shape[1] = p.args.attention.output.shape[1] = 8;
        p.args.attention.lse = {};
      },
      "heads_q is 8, needs a multiple of heads_kv");
  fails([](auto& p) { p.args.attention.query_start.shape[0] = 2; },
        "query_start.shape[0] is 2, needs requests + 1");
}

}  // namespace
}  // namespace vivace
