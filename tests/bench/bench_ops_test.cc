#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "src/bench/ops/moe_routing.h"
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
  EXPECT_EQ(table.end(), "geometric mean of us / target over 1 cases: 2.000, the largest 2.000\n");
}

OpWorkload moe_case(int64_t tokens, int64_t experts, int64_t hidden, int64_t intermediate,
                    std::string quant) {
  OpWorkload w{.suite = "fused_moe", .name = "hy3", .fields = {}};
  w.with("tokens", tokens).with("experts", experts).with("top_k", 8).with("hidden", hidden);
  return w.with("intermediate", intermediate).with("quant", std::move(quant)).with("routing", "uniform");
}

/// Rows of each expert; -1 counts the choices of other ranks.
std::map<int32_t, int64_t> rows_by_expert(const RoutedTokens& routed) {
  std::map<int32_t, int64_t> rows;
  for (const int32_t id : routed.ids) ++rows[id];
  return rows;
}

TEST(BenchOps, RoutingsOfTokens) {
  constexpr int64_t kTokens = 4096, kExperts = 24, kTopK = 8;
  const auto route = [](Routing routing, uint32_t seed) {
    RoutedTokens routed = route_tokens(routing, kTokens, kExperts, kTopK, seed);
    EXPECT_EQ(std::ssize(routed.ids), kTokens * kTopK);
    EXPECT_EQ(routed.weights.size(), routed.ids.size());
    EXPECT_GE(std::ranges::min(routed.weights), 0.05f);
    EXPECT_LE(std::ranges::max(routed.weights), 0.3f);
    auto rows = rows_by_expert(routed);
    rows.erase(-1);
    EXPECT_EQ(std::ssize(rows), routed.visited_experts);
    int64_t all = 0;
    for (const auto& [id, count] : rows) {
      EXPECT_TRUE(id >= 0 && id < kExperts) << id;
      all += count;
    }
    EXPECT_EQ(all, routed.rows);
    return routed;
  };
  for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::half}) {
    const RoutedTokens routed = route(routing, 1);
    EXPECT_EQ(routed.rows, kTokens * kTopK);
    for (int64_t t = 0; t < kTokens; ++t) {
      std::vector<int32_t> of_token(routed.ids.begin() + t * kTopK, routed.ids.begin() + (t + 1) * kTopK);
      std::ranges::sort(of_token);
      ASSERT_EQ(std::ranges::adjacent_find(of_token), of_token.end())
          << "token " << t << " has an expert twice";
    }
    EXPECT_EQ(routed.ids, route(routing, 1).ids);
    EXPECT_NE(routed.ids, route(routing, 2).ids);
  }
  // The draws of the figures that were taken before there were other routings.
  const RoutedTokens uniform = route_tokens(Routing::uniform, 2, 192, 8, 1);
  EXPECT_EQ(uniform.ids,
            (std::vector<int32_t>{37, 12, 127, 11, 143, 80, 76, 109, 6, 50, 126, 146, 75, 106, 29, 68}));

  EXPECT_EQ(route(Routing::uniform, 1).visited_experts, kExperts);
  EXPECT_EQ(route(Routing::half, 1).visited_experts, kExperts / 2);
  const RoutedTokens one = route(Routing::one, 1);
  EXPECT_EQ(one.visited_experts, 1);
  EXPECT_EQ(one.rows, kTokens * kTopK);
  for (int64_t experts = 1; experts <= 40; ++experts) {
    std::set<int32_t> hot;
    for (uint32_t seed : {1, 2, 3, 4}) hot.insert(route_tokens(Routing::one, 1, experts, 1, seed).ids[0]);
    EXPECT_EQ(std::ssize(hot), std::min<int64_t>(experts, 4)) << experts << " experts";
  }
  const RoutedTokens local = route(Routing::one_local, 1);
  EXPECT_EQ(local.visited_experts, 1);
  EXPECT_EQ(local.rows, kTokens);
  EXPECT_EQ(rows_by_expert(local)[-1], kTokens * (kTopK - 1));
  EXPECT_EQ(local.ids[0], one.ids[0]);

  EXPECT_EQ(experts_to_choose(Routing::half, 5), 3);
  EXPECT_EQ(experts_to_choose(Routing::zipf, 5), 5);
}

TEST(BenchOps, ZipfWeighsTheRthExpertByItsRank) {
  // With one choice a token repeats do not count: rows are as 1, 1/2, 1/3, ...
  constexpr int64_t kTokens = 200'000, kExperts = 16;
  std::vector<int64_t> rows;
  for (const auto& [id, count] : rows_by_expert(route_tokens(Routing::zipf, kTokens, kExperts, 1, 3))) {
    rows.push_back(count);
  }
  std::ranges::sort(rows, std::greater());
  ASSERT_EQ(std::ssize(rows), kExperts);
  double sum = 0;
  for (int64_t r = 1; r <= kExperts; ++r) sum += 1 / static_cast<double>(r);
  for (int64_t r = 1; r <= kExperts; ++r) {
    const double want = kTokens / (sum * static_cast<double>(r));
    EXPECT_NEAR(static_cast<double>(rows[r - 1]), want, 5 * std::sqrt(want)) << "rank " << r;
  }
}

TEST(BenchOps, FloorsAreOfTheExpertsAndRowsOfACase) {
  const auto cost = [](Routing routing, const std::string& quant) {
    const std::vector<RoutedTokens> routings(4, route_tokens(routing, 16, 24, 8, 1));
    return moe_cost(moe_case(16, 24, 64, 48, quant), routings);
  };
  constexpr double kExpert = 3 * 64 * 48, kPairs = 16 * 8, kOut = kPairs * 64 * 2;
  const MoeCost uniform = cost(Routing::uniform, "per_tensor"), one = cost(Routing::one, "per_tensor");
  EXPECT_DOUBLE_EQ(uniform.floor.bytes, 24 * kExpert + 16 * 64 * 3);
  EXPECT_DOUBLE_EQ(cost(Routing::half, "per_tensor").floor.bytes, 12 * kExpert + 16 * 64 * 3);
  EXPECT_DOUBLE_EQ(one.floor.bytes, kExpert + 16 * 64 * 3);
  EXPECT_DOUBLE_EQ(cost(Routing::one, "bf16").floor.bytes, 2 * kExpert + 16 * 64 * 4);
  EXPECT_DOUBLE_EQ(cost(Routing::one, "bf16").floor.flop_rate, kBf16Rate);
  for (const MoeCost& all : {uniform, one}) {
    EXPECT_DOUBLE_EQ(all.floor.flops, 2 * kExpert * kPairs);
    EXPECT_DOUBLE_EQ(all.out_bytes, kOut);
    EXPECT_DOUBLE_EQ(all.floor.flop_rate, kFp8Rate);
  }
  EXPECT_DOUBLE_EQ(cost(Routing::one_local, "blockwise").floor.flops, 2 * kExpert * 16);
  EXPECT_DOUBLE_EQ(cost(Routing::one_local, "blockwise").out_bytes, kOut / 8);
}

// In these cases every expert has rows, so that the targets' own draw of a routing does not matter.
TEST(BenchOps, TheFormulaGivesTheTargets) {
  const auto formula = [](int64_t tokens, int64_t experts, int64_t hidden, int64_t intermediate) {
    const std::vector<RoutedTokens> routings(1, route_tokens(Routing::uniform, tokens, experts, 8, 1));
    EXPECT_EQ(routings[0].visited_experts, experts);
    return moe_cost(moe_case(tokens, experts, hidden, intermediate, "per_tensor"), routings).formula_us();
  };
  EXPECT_NEAR(formula(512, 192, 4096, 192), 125.2, 0.1);    // memory
  EXPECT_NEAR(formula(4096, 192, 4096, 192), 235.3, 0.1);   // memory with the rows' outputs
  EXPECT_NEAR(formula(512, 24, 4096, 1536), 169.4, 0.1);    // products
  EXPECT_NEAR(formula(4096, 24, 4096, 1536), 1059.6, 0.1);  // products with the rows' outputs
  EXPECT_NEAR(formula(2048, 32, 7168, 2048), 1295.8, 0.1);
}

TEST(BenchOps, AFormulaStandsInForATargetAndIsCountedApart) {
  // An entry without a routing is of the uniform one.
  const auto targets = OpTargets::parse(R"({"fused_moe": [{"case": "hy3", "tokens": 16, "target_us": 8}]})");
  ASSERT_TRUE(targets.ok());
  const auto moe = [&](const std::string& routing) {
    OpResult result = timed("sm90.stream", false);
    result.workload = moe_case(16, 192, 4096, 192, "per_tensor").with("routing", routing);
    result.formula_us = 2;
    targets->apply(result);
    return result;
  };
  const OpResult uniform = moe("uniform"), zipf = moe("zipf");
  EXPECT_EQ(uniform.target_us, 8);
  EXPECT_EQ(zipf.target_us, std::nullopt);
  OpTable table;
  EXPECT_EQ(table.add(uniform).find('~'), std::string::npos);
  EXPECT_NE(table.add(zipf).find("    ~2.0   2.00\n"), std::string::npos);
  EXPECT_EQ(table.end(),
            "geometric mean of us / target over 1 cases: 0.500, the largest 0.500\n"
            "geometric mean of us / the targets' formula (~) over 1 cases: 2.000, the largest 2.000\n");
  EXPECT_EQ(table.end(), "");
  const auto rows = json_of({uniform, zipf});
  EXPECT_EQ(rows[0]["target_us"], 8);
  EXPECT_EQ(rows[1]["formula_us"], 2);
  EXPECT_FALSE(rows[1].contains("target_us"));
}

TEST(BenchOps, ATargetOfItsOwnRoutingIsForNoOther) {
  const auto targets =
      OpTargets::parse(R"({"fused_moe": [{"case": "hy3", "routing": "zipf", "target_us": 9}]})");
  ASSERT_TRUE(targets.ok());
  for (const auto& [routing, target] :
       {std::pair{"uniform", std::optional<double>()}, {"zipf", 9.0}, {"half", {}}}) {
    OpResult result = timed("sm90.stream", false);
    result.workload = moe_case(16, 192, 4096, 192, "per_tensor").with("routing", routing);
    targets->apply(result);
    EXPECT_EQ(result.target_us, target) << routing;
  }
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
