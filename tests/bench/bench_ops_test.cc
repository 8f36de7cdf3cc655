#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "src/bench/ops/run.h"

namespace vivace::bench {
namespace {

OpWorkload router_case(std::string mode) {
  OpWorkload w{.suite = "router_gemm", .name = "hy3", .fields = {}};
  return w.with("m", 4).with("n", 192).with("k", 4096).with("mode", std::move(mode));
}

OpResult timed(std::string row, bool baseline) {
  OpResult result;
  result.workload = router_case("exact");
  result.row = std::move(row);
  result.baseline = baseline;
  result.timing = {.median_us = 4, .p10_us = 3, .p90_us = 5};
  result.floor_us = 2;
  result.max_abs_error = 0.25;
  return result;
}

TEST(BenchOps, LibrariesOfACase) {
  const auto libraries = [](std::string_view suite, const OpWorkload& workload) {
    const auto found = std::ranges::find(op_suites(), suite, &OpSuite::name);
    return found->libraries == nullptr ? std::vector<std::string>() : found->libraries(workload);
  };
  using Rows = std::vector<std::string>;
  const Rows all = {"cublas_fp32_with_cast", "cublas_fp32", "cublas_tf32", "cublas_bf16"};
  EXPECT_EQ(libraries("router_gemm", router_case("two_term")), all);
  EXPECT_EQ(libraries("router_gemm", router_case("exact")), all);
  EXPECT_EQ(libraries("router_gemm", router_case("bf16")), Rows{"cublas_bf16"});
  OpWorkload grouped{.suite = "grouped_gemm", .name = "8x16", .fields = {}};
  EXPECT_EQ(libraries("grouped_gemm", grouped.with("quant", "bf16")), Rows{"cublaslt_loop"});
  EXPECT_EQ(libraries("grouped_gemm", grouped.with("quant", "per_tensor")), Rows{"cublaslt_loop"});
  EXPECT_EQ(libraries("grouped_gemm", grouped.with("quant", "blockwise")), Rows());
  EXPECT_EQ(libraries("sampler", {.suite = "sampler", .name = "", .fields = {}}), Rows());
}

TEST(BenchOps, ListedCasesPassTheirChecks) {
  for (const OpSuite& suite : op_suites()) {
    for (const OpWorkload& workload : suite.workloads()) {
      const Status status = suite.check(workload);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

TEST(BenchOps, ASeedDrawsLengths) {
  const auto lengths = [](std::string_view name) {
    const auto parsed = parse_case_lengths(name);
    EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    return parsed.ok() ? *parsed : std::vector<int64_t>();
  };
  EXPECT_EQ(lengths("random:1"), lengths("random:1"));
  EXPECT_NE(lengths("random:9223372036854775808"), lengths("random:9223372036854775809"));
  EXPECT_NE(lengths("random:1"), lengths("random:2"));
  int64_t shortest = INT64_MAX, longest = 0, most = 0;
  for (int seed = 0; seed < 200; ++seed) {
    const std::vector<int64_t> drawn = lengths("random:" + std::to_string(seed));
    ASSERT_FALSE(drawn.empty());
    most = std::max(most, std::ssize(drawn));
    shortest = std::min(shortest, *std::ranges::min_element(drawn));
    longest = std::max(longest, *std::ranges::max_element(drawn));
  }
  EXPECT_EQ(shortest, 1);
  EXPECT_GT(longest, 190'000);
  EXPECT_LE(longest, 204'800);
  EXPECT_GT(most, 200);
  EXPECT_LE(most, 256);
  for (const char* name : {"random:", "random:x", "random:-1", "random:1x"}) {
    EXPECT_EQ(parse_case_lengths(name).status().message(),
              "case is '" + std::string(name) + "', needs a seed from 0 to 2^64 - 1, such as random:7");
  }
}

TEST(BenchOps, TargetsAreForOurRowAlone) {
  const auto targets = OpTargets::parse(
      R"({"router_gemm": [{"case": "hy3", "m": 4, "n": 192, "k": 4096, "target_us": 7, "exact_target_us": 2}]})");
  ASSERT_TRUE(targets.ok());
  OpResult ours = timed("cuda.mma", false), library = timed("cublas_fp32", true);
  targets->apply(ours);
  targets->apply(library);
  EXPECT_EQ(ours.target_us, 2);
  EXPECT_EQ(library.target_us, std::nullopt);
  OpTable table;
  EXPECT_NE(table.add(ours).find("cuda.mma"), std::string::npos);
  EXPECT_NE(table.add(library).find("cublas_fp32"), std::string::npos);
  EXPECT_EQ(table.end(), "geometric mean of us / target over 1 cases: 2.000\n");
}

TEST(BenchOps, JsonOfALibrary) {
  OpResult failed = timed("cublas_tf32", true);
  failed.failure = Status(Code::unsupported, "no algorithm");
  const auto rows = json_of({timed("cuda.mma", false), timed("cublas_fp32", true), failed});
  ASSERT_EQ(rows.size(), 3u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["suite"], "router_gemm");
    EXPECT_EQ(row["case"], "hy3");
    EXPECT_EQ(row["mode"], "exact");
    EXPECT_EQ(row["m"], 4);
  }
  EXPECT_EQ(rows[0]["row"], "cuda.mma");
  EXPECT_FALSE(rows[0].contains("baseline"));
  EXPECT_EQ(rows[1]["row"], "cublas_fp32");
  EXPECT_EQ(rows[1]["baseline"], true);
  EXPECT_EQ(rows[1]["us"], 4);
  EXPECT_EQ(rows[1]["share_of_floor"], 0.5);
  EXPECT_EQ(rows[1]["max_abs_error"], 0.25);
  EXPECT_EQ(rows[2]["row"], "cublas_tf32");
  EXPECT_EQ(rows[2]["failure"], "no algorithm");
  EXPECT_FALSE(rows[2].contains("us"));
}

}  // namespace
}  // namespace vivace::bench
