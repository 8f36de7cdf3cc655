#include "src/ops/gemm/sm90_wide_plan.h"
#include "src/ops/grouped_gemm/cases.h"
#include "src/ops/grouped_gemm/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

/// Of each row and column: the sum of |x w|, NaN for rows of no group, and what fp8 products of warp groups may lose: in a
/// step of 32, of 32 products and the sum so far, from 0 in each block of 128, each to 2^-13 of the largest.
struct Magnitudes {
  std::vector<double> sum, lost;
};

Magnitudes magnitudes_of(const GroupedGemmArgs& args) {
  const int64_t k = args.x.shape[1], n = args.weight.shape[1];
  const std::vector<double> none(static_cast<size_t>(args.x.shape[0] * n), NAN);
  Magnitudes result{none, none};
  const Fp8Scales x_scales = activation_scales(args.x_scale);
  for (int64_t g = 0; g < args.weight.shape[0]; ++g) {
    const Fp8Scales scales = args.weight_scale.present() ? fp8_scales(args.weight_scale.at(g)) : Fp8Scales();
    const GroupRows rows = rows_of_group(args, g);
    std::vector<double> w(static_cast<size_t>(k));
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < k; ++i)
        w[i] = load(args.weight.dtype, args.weight.at(g).at(j).data, i) * scales.at(j, i);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        double sum = 0, lost = 0, of_block = 0;
        for (int64_t step = 0; step < k; step += 32) {
          if (step % 128 == 0) of_block = 0;
          double largest = std::abs(of_block);
          for (int64_t i = step; i < std::min(step + 32, k); ++i) {
            const double product = load(args.x.dtype, args.x.at(r).data, i) * x_scales.at(r, i) * w[i];
            sum += std::abs(product), of_block += product;
            largest = std::max(largest, std::abs(product));
          }
          lost += 33 * 0x1p-13 * std::max(largest, std::abs(of_block));
        }
        result.sum[r * n + j] = sum;
        result.lost[r * n + j] = lost;
      }
    }
  }
  return result;
}

TEST(GroupedGemm, EveryRowAgreesWithTheReference) {
  for (const GroupedGemmCase& c : grouped_gemm_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    GroupedGemmProblem want(c, 1);
    ASSERT_OK(grouped_gemm_reference(want.args, Stream{}));
    const std::vector<double> expected = values_of(want.args.y);
    const Magnitudes magnitude = magnitudes_of(want.args);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kGroupedGemm, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        GroupedGemmProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        const std::vector<double> values = values_of(got.args.y);
        ASSERT_EQ(values.size(), expected.size());
        // fp32: roundings of products and sums. Tensor cores: for 16 products 17 addends truncated to 2^-25 and a sum to
        // 2^-23 of the largest.
        const double k = static_cast<double>(c.k);
        const bool tensor_cores = stream.device == Device::cuda;
        const double sum =
            tensor_cores ? (17 * 0x1p-25 + 0x1p-23) * (k / 16 + 1) : 4 * 0x1p-24 * std::sqrt(k) + 0x1p-23;
        const double lost = row.name.starts_with("sm90") && c.x == DType::fp8_e4m3 ? 1 : 0;
        for (size_t i = 0; i < values.size(); ++i) {
          if (std::isnan(magnitude.sum[i])) {
            ASSERT_TRUE(std::isnan(values[i])) << "a row of no group was written, at " << i;
            continue;
          }
          const double allowed = sum * magnitude.sum[i] + lost * magnitude.lost[i] +
                                 2 * Bound::store(c.y).relative * std::abs(expected[i]);
          ASSERT_LE(std::abs(values[i] - expected[i]), allowed) << i;
        }
        EXPECT_TRUE(got.y.canaries_intact());
      });
    }
  }
}

TEST(GroupedGemm, HandWorked) {
  float x[] = {1, 2, 3, 4}, weight[] = {1, 1, 10, 100}, y[] = {0, 0};
  int32_t start[] = {1, 0}, rows[] = {1, 1};
  const GroupedGemmArgs args{.x = Tensor(x, DType::f32, {2, 2}),
                             .weight = Tensor(weight, DType::f32, {2, 1, 2}),
                             .group_start = Tensor(start, DType::i32, {2}),
                             .group_rows = Tensor(rows, DType::i32, {2}),
                             .y = Tensor(y, DType::f32, {2, 1})};
  ASSERT_OK(grouped_gemm(args, Stream{}));
  EXPECT_EQ(y[0], 210);
  EXPECT_EQ(y[1], 7);
}

// With a long k these have tiles of their own on Hopper; in float64 they would take minutes.
const std::vector<int32_t> kManyRows = {130, 133, 0, 190, 220, 256, 1, 100};

TEST(GroupedGemm, LongProductsOfManyRowsHaveThreeWarpGroups) {
  for (const DType x : {DType::fp8_e4m3, DType::bf16}) {
    const gemm::Problem long_k{
        .type = x, .rows = 1030, .n = 2056, .k = x == DType::bf16 ? 520 : 1040, .groups = 8};
    EXPECT_EQ(gemm::wide_plan(long_k, 132), (gemm::WidePlan{3, 192}));
    gemm::Problem short_k = long_k;
    short_k.k = 256;
    EXPECT_EQ(gemm::wide_plan(short_k, 132),
              x == DType::bf16 ? (gemm::WidePlan{2, 256}) : (gemm::WidePlan{3, 192, true}));
    gemm::Problem mostly_elsewhere = long_k;  // places for rows that no group here takes
    mostly_elsewhere.rows_of_group = 20;
    EXPECT_EQ(gemm::wide_plan(mostly_elsewhere, 132).rows, 64);
  }
}

TEST(GroupedGemm, RowsThatFallToGroupsByChanceHaveThreeWarpGroups) {
  gemm::Problem alike{.type = DType::fp8_e4m3, .rows = 8 * 341, .n = 4096, .k = 4096, .groups = 8};
  EXPECT_EQ(gemm::wide_plan(alike, 132), (gemm::WidePlan{2, 256, true}));
  gemm::Problem by_chance = alike;
  by_chance.rows_of_group = 341;
  EXPECT_EQ(gemm::wide_plan(by_chance, 132), (gemm::WidePlan{3, 192, true}));
  by_chance.rows_of_group = 2000;
  EXPECT_EQ(gemm::wide_plan(by_chance, 132), (gemm::WidePlan{2, 256, true}));
}

// Each row's bits, whatever its group's size and place: tiles of all sizes add in one order.
TEST(GroupedGemm, ARowDoesNotDependOnTheOtherRows) {
  const DType bf16 = DType::bf16, fp8 = DType::fp8_e4m3, f32 = DType::f32;
  for (const GroupedGemmCase& c :
       {GroupedGemmCase{"f32", {150, 60}, 41, 72, f32, bf16, f32},
        GroupedGemmCase{"bf16", {900, 500}, 1160, 264},
        GroupedGemmCase{"fp8", {200, 90}, 72, 272, fp8, fp8, f32},
        GroupedGemmCase{"fp8 blocks", {900, 500}, 1160, 272, fp8, fp8, f32, true},
        GroupedGemmCase{"fp8, pairs of CTAs", {900, 500}, 5128, 2064, fp8, fp8, bf16},
        GroupedGemmCase{"fp8 blocks, pairs of CTAs", {900, 500}, 5128, 2064, fp8, fp8, bf16, true},
        GroupedGemmCase{"fp8, three warp groups", kManyRows, 2056, 1040, fp8, fp8, f32},
        GroupedGemmCase{"bf16, three warp groups", kManyRows, 2056, 520}}) {
    SCOPED_TRACE(c.name);
    const GroupedGemmProblem shapes(c, 2);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kGroupedGemm, shapes.args, stream, [&](const auto& row) {
        if (row.name == "reference") return;
        SCOPED_TRACE(row.name);
        GroupedGemmProblem all(c, 2), few(c, 2);
        ASSERT_OK(row.run(all.args, stream));
        for (const int32_t count : {1, 20, 100}) {
          few.y.poison();
          std::fill_n(few.group_rows.as<int32_t>(), few.args.group_rows.shape[0], 0);
          few.group_start.as<int32_t>()[0] = 11;
          few.group_rows.as<int32_t>()[0] = count;
          // The rows of x that a group may have decide the tile.
          GroupedGemmArgs args = few.args;
          args.x = few.args.x.rows(0, 11 + count);
          if (args.x_scale.rank == 2) args.x_scale = few.args.x_scale.rows(0, 11 + count);
          args.y = few.args.y.rows(0, 11 + count);
          ASSERT_OK(row.run(args, stream));
          ASSERT_EQ(values_of(args.y.rows(11, count)), values_of(all.args.y.rows(11, count))) << count;
        }
      });
    }
  }
}

// A GPU row cannot refuse what is in its memory: groups are clipped to the rows of x.
TEST(GroupedGemm, GpuRowsClipGroupsToTheRowsThereAre) {
  const int32_t start[] = {-3, 5, 40, 0},
                rows[] = {5, INT32_MAX, 3, -1};  // 0 and 1; 5 to the end; none; none
  const int32_t clipped_start[] = {0, 5, 0, 0}, clipped_rows[] = {2, 31, 0, 0};
  for (const DType type : {DType::bf16, DType::fp8_e4m3}) {
    const GroupedGemmCase c{"", {9, 9, 9, 9}, 72, 272, type, type, DType::f32};
    for (const Stream& stream : test_streams()) {
      if (stream.device == Device::cpu) continue;
      const GroupedGemmProblem shapes(c, 4);
      for_each_fitting_row(kGroupedGemm, shapes.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        GroupedGemmProblem odd(c, 4), plain(c, 4);
        for (int g = 0; g < 4; ++g) {
          odd.group_start.as<int32_t>()[g] = start[g], odd.group_rows.as<int32_t>()[g] = rows[g];
          plain.group_start.as<int32_t>()[g] = clipped_start[g],
          plain.group_rows.as<int32_t>()[g] = clipped_rows[g];
        }
        ASSERT_OK(row.run(odd.args, stream));
        ASSERT_OK(row.run(plain.args, stream));
        const std::vector<double> got = values_of(odd.args.y), want = values_of(plain.args.y);
        for (size_t i = 0; i < want.size(); ++i) {
          const size_t r = i / 72;
          ASSERT_EQ(std::isnan(got[i]), r >= 2 && r < 5) << r;
          if (!std::isnan(got[i])) {
            ASSERT_EQ(got[i], want[i]) << r;
          }
        }
        EXPECT_TRUE(odd.y.canaries_intact());
      });
    }
  }
}

TEST(GroupedGemm, BatchInvariantCallsHaveOneRow) {
  GroupedGemmProblem p({"", {200, 90}, 72, 272}, 1);
  const Stream hopper{.device = Device::cuda, .compute_capability = 90};
  if (grouped_gemm_explain(p.args, hopper).row.empty()) GTEST_SKIP() << "a build without nvcc";
  EXPECT_EQ(grouped_gemm_explain(p.args, hopper).row, "sm90.wide");
  p.args.batch_invariant = true;
  EXPECT_EQ(grouped_gemm_explain(p.args, hopper).row, "cuda.grouped");
}

TEST(GroupedGemm, RefusesWhatDisagrees) {
  const auto refuses = [](const GroupedGemmArgs& base, auto&& change, const char* text) {
    GroupedGemmArgs args = base;
    change(args);
    EXPECT_FAILS(grouped_gemm(args, Stream{}), Code::invalid_argument, text);
  };
  GroupedGemmProblem p({"", {2, 3}, 8, 144, DType::fp8_e4m3, DType::fp8_e4m3, DType::f32}, 1);
  EXPECT_OK(grouped_gemm(p.args, Stream{}));
  refuses(
      p.args, [](auto& a) { a.weight.shape[2] = 143; },
      "weight.shape[2] is 143, needs k = 144 (from x.shape[1])");
  refuses(
      p.args, [](auto& a) { a.group_rows.shape[0] = 1; }, "group_rows.shape[0] is 1, needs groups = 2");
  refuses(
      p.args, [](auto& a) { a.x_scale = Tensor(); }, "x_scale is absent, needs scales with fp8 x");
  refuses(
      p.args, [](auto& a) { a.weight_scale.shape[0] = 1; }, "weight_scale.shape[0] is 1, needs groups = 2");
  refuses(
      p.args, [](auto& a) { a.weight.dtype = DType::bf16; }, "needs weight of type fp8, got bf16");
  p.group_rows.as<int32_t>()[1] = 4;
  refuses(
      p.args, [](auto&) {}, "group 1 has 4 rows from 2, needs them inside the 5 rows of x");
  p.group_start.as<int32_t>()[0] = -1;
  refuses(
      p.args, [](auto&) {}, "group 0 has 2 rows from -1");
  GroupedGemmProblem blocks({"", {2}, 8, 144, DType::fp8_e4m3, DType::fp8_e4m3, DType::f32, true}, 1);
  refuses(
      blocks.args, [](auto& a) { a.x_scale.shape[1] = 1; }, "x_scale.shape[1] is 1, needs k blocks = 2");
  refuses(
      blocks.args, [](auto& a) { a.weight_scale.shape[2] = 3; },
      "weight_scale.shape[2] is 3, needs k blocks = 2");
  EXPECT_FAILS(grouped_gemm(GroupedGemmProblem({"", {2}, 8, 16, DType::f32, DType::f32, DType::f32}, 1).args,
                            Stream{.device = Device::cuda}),
               Code::invalid_argument, "x is on cpu, needs cuda");
}

}  // namespace
}  // namespace vivace
