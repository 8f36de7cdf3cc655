#include "src/ops/attention_prologue/cases.h"

#include <cstring>

#include "src/ops/attention_prologue/table.h"
#include "tests/ops/attention_test.h"

namespace vivace {
namespace {

/// Rotation: two products and a sum of fp32, of magnitude at most `largest`; norm: as in rms_norm, relative to the
/// rotated value at most `largest` too. Then the store, of the result and of the reference.
Bound bound_of(const AttentionPrologueCase& c, const Tensor& out, double largest) {
  const double arithmetic = (4 * std::sqrt(static_cast<double>(c.head_dim)) + 12) * 0x1p-24 * largest;
  return Bound{arithmetic, 0} + Bound::store(out.dtype) + Bound::store(out.dtype);
}

/// Dequantised fp8: both sides are rounded, and values a rounding apart may fall on neighbouring codes. Neighbours are 2^-3
/// of a value apart, 2^-9 of the scale near zero.
::testing::AssertionResult close_fp8(double got, double got_scale, double want, double want_scale) {
  const double difference = std::abs(got * got_scale - want * want_scale);
  const double allowed = std::max(std::abs(want) * 0x1p-3, 0x1p-9) * want_scale * (1 + 0x1p-16);
  if (difference <= allowed) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << got << " x " << got_scale << ", reference " << want << " x " << want_scale;
}

/// Every stored head of an fp8 output, with its scales; poison where nothing may be written. `scale_at(i)` is the scale's
/// index of head i in row-major order.
template <class ScaleAt>
::testing::AssertionResult close_heads(const Tensor& got, const Tensor& want, const Tensor& got_scale,
                                       const Tensor& want_scale, double scale_error, ScaleAt&& scale_at) {
  const std::vector<double> a = values_of(got), b = values_of(want);
  const std::vector<double> sa = values_of(got_scale), sb = values_of(want_scale);
  const size_t head_dim = static_cast<size_t>(got.shape[got.rank - 1]);
  int differing = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t s = scale_at(i / head_dim);
    if (std::isnan(b[i])) {
      if (std::isnan(a[i])) continue;
      return ::testing::AssertionFailure() << "element " << i << " was written";
    }
    if (!(std::abs(sa[s] - sb[s]) <= scale_error * sb[s]))
      return ::testing::AssertionFailure() << "scale " << s << " is " << sa[s] << ", reference " << sb[s];
    if (const auto close = close_fp8(a[i], sa[s], b[i], sb[s]); !close)
      return ::testing::AssertionFailure() << "element " << i << " is " << close.message();
    differing += a[i] != b[i];
  }
  // Neighbouring codes are for values on the border between them: few.
  if (static_cast<size_t>(differing) > 2 + a.size() / 100)
    return ::testing::AssertionFailure() << differing << " of " << a.size() << " codes differ";
  return ::testing::AssertionSuccess();
}

double largest_of(const Tensor& t) {
  double largest = 0;
  for (double v : values_of(t))
    if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
  return largest;
}

/// Poison in exactly the same places, values within the bound elsewhere.
::testing::AssertionResult close_or_untouched(const Tensor& got, const Tensor& want, const Bound& bound) {
  const std::vector<double> a = values_of(got), b = values_of(want);
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::abs(a[i] - b[i]) <= bound.absolute + bound.relative * std::abs(b[i])) continue;
    return ::testing::AssertionFailure() << "element " << i << " is " << a[i] << ", reference " << b[i];
  }
  return ::testing::AssertionSuccess();
}

TEST(AttentionPrologue, EveryRowAgreesWithTheReference) {
  for (const AttentionPrologueCase& c : attention_prologue_cases(CaseSize::test)) {
    SCOPED_TRACE(testing::Message() << c.name << " " << c.heads_q << "/" << c.heads_kv << " x "
                                    << c.head_dim);
    AttentionPrologueProblem want(c, 1);
    ASSERT_OK(attention_prologue(want.args, Stream{}));
    ASSERT_OK(attention_prologue_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kAttentionPrologue, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        AttentionPrologueProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        // A rotated pair is as long as it was; the norm keeps values below sqrt(head_dim) times the weight.
        const double q = 2 * largest_of(want.args.q), kv = 2 * largest_of(want.args.k);
        // A made scale follows one value: its rounding, and that of the arithmetic before it.
        const double scale_error = (4 * std::sqrt(static_cast<double>(c.head_dim)) + 16) * 0x1p-24 * 2;
        if (c.q == DType::fp8_e4m3) {
          EXPECT_TRUE(close_heads(got.args.q, want.args.q, got.q_scale, want.q_scale, scale_error,
                                  [](size_t head) { return head; }));
        } else {
          EXPECT_TRUE(close(got.args.q, want.args.q, bound_of(c, got.q, q)));
        }
        if (c.kv == DType::fp8_e4m3) {
          EXPECT_TRUE(close_heads(got.args.k, want.args.k, got.k_scale, want.k_scale, scale_error,
                                  [&](size_t head) { return c.made_k_scale ? head : 0; }));
          EXPECT_TRUE(close_heads(got.args.v, want.args.v, got.v_scale, want.v_scale, 0, [&](size_t head) {
            return c.v_scale_per_head ? head % static_cast<size_t>(c.heads_kv) : 0;
          }));
          EXPECT_TRUE(got.k_scale.canaries_intact() && got.q_scale.canaries_intact());
        } else {
          EXPECT_TRUE(close_or_untouched(got.args.k, want.args.k, bound_of(c, got.k, kv)));
          EXPECT_TRUE(close_or_untouched(got.args.v, want.args.v, Bound::store(c.kv)));
        }
        EXPECT_TRUE(got.q.canaries_intact() && got.k.canaries_intact() && got.v.canaries_intact());
      });
    }
  }
}

/// One head of 2, position 1 of a table that turns by 90 degrees; then both orders of the norm.
TEST(AttentionPrologue, HandWorked) {
  float qkv[] = {3, 4, 1, 2, 5, 6}, cos_sin[] = {1, 0, 0, 1}, weight[] = {1, 10}, q[2], k[4], v[4];
  int32_t positions[] = {1};
  int64_t slots[] = {1};
  AttentionPrologueArgs args{.qkv = Tensor(qkv, DType::f32, {1, 6}),
                             .cos_sin = Tensor(cos_sin, DType::f32, {2, 2}),
                             .positions = Tensor(positions, DType::i32, {1}),
                             .slots = Tensor(slots, DType::i64, {1}),
                             .q = Tensor(q, DType::f32, {1, 1, 2}),
                             .k = Tensor(k, DType::f32, {1, 2, 1, 2}),
                             .v = Tensor(v, DType::f32, {1, 2, 1, 2}),
                             .eps = 0};
  const double rms = std::sqrt(12.5);
  for (const Row<AttentionPrologueArgs>& row : kAttentionPrologueRows) {
    if (row.device != Device::cpu) continue;  // these tensors are on the stack
    SCOPED_TRACE(row.name);
    args.qk_norm = QkNorm::none;
    args.q_norm_weight = args.k_norm_weight = {};
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_EQ(q[0], -4);
    EXPECT_EQ(q[1], 3);
    EXPECT_EQ(k[2], -2);
    EXPECT_EQ(k[3], 1);
    EXPECT_EQ(v[2], 5);
    EXPECT_EQ(v[3], 6);
    args.q_norm_weight = args.k_norm_weight = Tensor(weight, DType::f32, {2});
    args.qk_norm = QkNorm::norm_then_rope;
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_NEAR(q[0], -40 / rms, 1e-5);
    EXPECT_NEAR(q[1], 3 / rms, 1e-6);
    args.qk_norm = QkNorm::rope_then_norm;
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_NEAR(q[0], -4 / rms, 1e-6);
    EXPECT_NEAR(q[1], 30 / rms, 1e-5);
  }
}

/// Two requests share a page: storing one token leaves every other slot as it was.
TEST(AttentionPrologue, WritesItsSlotsOnly) {
  const AttentionPrologueCase c{.name = "", .tokens = 1};
  AttentionPrologueProblem p(c, 1);
  p.slots.as<int64_t>()[0] = 20;
  ASSERT_OK(attention_prologue(p.args, Stream{}));
  for (const Tensor* cache : {&p.args.k, &p.args.v}) {
    const std::vector<double> values = values_of(*cache);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(std::isnan(values[i]), i / (3 * 64) != 20) << i;
  }
}

/// Addresses decide how values come and go, not what they are: rows that lie an odd number of elements apart.
TEST(AttentionPrologue, SameBitsWhereverRowsLie) {
  for (AttentionPrologueCase c : attention_prologue_cases(CaseSize::test)) {
    if (c.tokens == 0) continue;
    SCOPED_TRACE(testing::Message() << c.name << " " << c.heads_q << "/" << c.heads_kv << " x "
                                    << c.head_dim);
    c.qkv_padding = 0;
    const AttentionPrologueProblem any(c, 1);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kAttentionPrologue, any.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        AttentionPrologueProblem even(c, 1), odd(c, 1);
        const int64_t width = even.args.qkv.shape[1];
        const Guarded rows(c.qkv, {c.tokens, width}, width | 1);
        odd.args.qkv = rows;
        for (int64_t t = 0; t < c.tokens; ++t) {
          std::memcpy(odd.args.qkv.at(t).data, even.args.qkv.at(t).data,
                      static_cast<size_t>(even.args.qkv.at(t).bytes()));
        }
        ASSERT_OK(row.run(even.args, stream));
        ASSERT_OK(row.run(odd.args, stream));
        using Args = AttentionPrologueArgs;
        for (const auto output : {&Args::q, &Args::k, &Args::v, &Args::q_scale, &Args::k_scale}) {
          if (!(even.args.*output).present()) continue;
          EXPECT_TRUE(same_bits(odd.args.*output, even.args.*output));
        }
      });
    }
  }
}

/// https://github.com/flashinfer-ai/flashinfer/pull/3136 : a page offset of 2^31 elements wrapped, here on the store.
TEST(AttentionPrologue, FieldCaseH06OffsetsBeyond32Bits) {
  const AttentionPrologueCase c{.name = "", .tokens = 1, .page_tokens = 64};
  AttentionPrologueProblem near(c, 1), far(c, 1);
  constexpr int64_t kPageStride = 5'242'880, kPage = 410, kRowStride = (int64_t{1} << 31) + 64;
  const SparseMemory memory(static_cast<size_t>((kPage + 1) * kPageStride * 4)), rows(2 * kRowStride * 4);
  ASSERT_TRUE(memory.ok() && rows.ok());
  for (Tensor* t : {&far.args.k, &far.args.v}) {
    t->data = static_cast<float*>(memory.data()) + (t == &far.args.v ? 64 * 3 * 64 : 0);
    t->shape[0] = kPage + 1;
    t->stride[0] = kPageStride;
  }
  near.slots.as<int64_t>()[0] = 7;
  // Two rows that lie 2^31 elements apart: the second is the one that counts.
  int64_t slots[] = {-1, kPage * 64 + 7};
  int32_t positions[] = {0, near.positions.as<int32_t>()[0]};
  std::vector<float> q(2 * 9 * 64);
  far.args.slots = Tensor(slots, DType::i64, {2});
  far.args.positions = Tensor(positions, DType::i32, {2});
  far.args.q = Tensor(q.data(), DType::f32, {2, 9, 64});
  far.args.qkv.data = rows.data();
  far.args.qkv.shape[0] = 2;
  far.args.qkv.stride[0] = kRowStride;
  std::copy_n(near.qkv.as<float>(), 15 * 64, far.args.qkv.at(1).as<float>());
  ASSERT_OK(attention_prologue(near.args, Stream{}));
  ASSERT_OK(attention_prologue(far.args, Stream{}));
  EXPECT_TRUE(same_bits(far.args.q.at(1), near.args.q.at(0)));
  EXPECT_TRUE(same_bits(far.args.k.at(kPage).at(7), near.args.k.at(0).at(7)));
  EXPECT_TRUE(same_bits(far.args.v.at(kPage).at(7), near.args.v.at(0).at(7)));
}

/// What the CPU refuses, a GPU row skips: the query is zero, no key or value is stored, nothing beside it changes.
TEST(AttentionPrologue, OutOfRangeOnTheGpu) {
  const AttentionPrologueCase c{.name = "", .tokens = 4, .qkv = DType::bf16, .kv = DType::bf16};
  for (const Stream& stream : test_streams()) {
    if (stream.device == Device::cpu) continue;
    const AttentionPrologueProblem any(c, 1);
    for_each_fitting_row(kAttentionPrologue, any.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      AttentionPrologueProblem p(c, 1);
      p.positions.as<int32_t>()[0] = 1000;
      p.positions.as<int32_t>()[1] = -1;
      p.slots.as<int64_t>()[2] = 32;
      p.slots.as<int64_t>()[3] = 5;
      ASSERT_OK(row.run(p.args, stream));
      const std::vector<double> q = values_of(p.args.q), k = values_of(p.args.k);
      for (size_t i = 0; i < 3 * 9 * 64; ++i) ASSERT_EQ(q[i], 0) << i;
      EXPECT_NE(q[3 * 9 * 64], 0);
      for (size_t i = 0; i < k.size(); ++i) ASSERT_EQ(std::isnan(k[i]), i / (3 * 64) != 5) << i;
      EXPECT_TRUE(p.q.canaries_intact() && p.k.canaries_intact() && p.v.canaries_intact());
    });
  }
}

TEST(AttentionPrologue, RefusesWrongScales) {
  const AttentionPrologueCase c{
      .name = "", .tokens = 2, .kv = DType::fp8_e4m3, .q = DType::fp8_e4m3, .made_k_scale = true};
  const auto fails = [&](auto&& change, const char* text) {
    AttentionPrologueProblem p(c, 1);
    change(p);
    EXPECT_FAILS(attention_prologue(p.args, Stream{}), Code::invalid_argument, text);
  };
  fails([](auto& p) { p.args.q_scale = {}; }, "q_scale is absent");
  fails([](auto& p) { p.args.k_scale = {}; }, "k_scale is absent");
  fails([](auto& p) { p.args.v_scale = {}; }, "v_scale is absent");
  fails([](auto& p) { p.args.q_scale.shape[1] = 8; }, "q_scale.shape[1] is 8, needs heads_q = 9");
  fails([](auto& p) { p.args.k_scale.shape[1] = 8; }, "k_scale.shape[1] is 8, needs page_tokens = 16");
  fails([](auto& p) { p.args.v_scale.shape[0] = 2; }, "v_scale.shape[0] is 2, needs heads_kv = 3");
  fails([](auto& p) { p.args.q.dtype = DType::f32; }, "q_scale.shape[0] is 2, needs no q_scale");
  fails([](auto& p) { p.args.k.dtype = p.args.v.dtype = DType::f16; },
        "k_scale.shape[0] is 2, needs no k_scale");
}

TEST(AttentionPrologue, RefusesWhatDisagrees) {
  const AttentionPrologueCase c{.name = "", .tokens = 2, .qk_norm = QkNorm::norm_then_rope};
  const auto fails = [&](auto&& change, const char* text) {
    AttentionPrologueProblem p(c, 1);
    change(p);
    EXPECT_FAILS(attention_prologue(p.args, Stream{}), Code::invalid_argument, text);
    EXPECT_TRUE(std::isnan(p.q.template as<float>()[0])) << "written in spite of the error";
  };
  fails([](auto& p) { p.positions.template as<int32_t>()[1] = 1000; },
        "positions[1] is 1000, needs 0 .. 999");
  fails([](auto& p) { p.positions.template as<int32_t>()[1] = -1; }, "positions[1] is -1, needs 0 .. 999");
  fails([](auto& p) { p.slots.template as<int64_t>()[1] = 32; }, "slots[1] is 32, needs -1 .. 31");
  fails([](auto& p) { p.slots.template as<int64_t>()[1] = -2; }, "slots[1] is -2, needs -1 .. 31");
  fails([](auto& p) { p.args.qkv.shape[1] -= 1; },
        "qkv.shape[1] is 959, needs (heads_q + 2 heads_kv) * head_dim");
  fails([](auto& p) { p.args.cos_sin.shape[1] = 63; }, "cos_sin.shape[1] is 63, needs an even rotary_dim");
  fails([](auto& p) { p.args.k_norm_weight = {}; }, "k_norm_weight is absent, needs both present");
  fails([](auto& p) { p.args.qk_norm = QkNorm::none; }, "needs both absent with qk_norm = 0");
  fails([](auto& p) { p.args.eps = -1; }, "eps is -1, needs a finite number");
  fails([](auto& p) { p.args.positions = {}; }, "positions is absent");
}

}  // namespace
}  // namespace vivace
