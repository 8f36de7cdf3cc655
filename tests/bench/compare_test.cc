#include "src/bench/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "src/bench/report.h"

namespace vivace::bench {
namespace {

using Json = nlohmann::ordered_json;

/// A run of two rounds of two requests: TTFT and TPOT of a round are as given, in ms.
Json run(std::vector<std::pair<double, double>> rounds, const std::vector<std::string>& texts) {
  Report report;
  report.plan = "1+2";
  report.model = "<model>";
  report.rounds = static_cast<int64_t>(rounds.size());
  size_t text = 0;
  for (const auto& [ttft, tpot] : rounds) {
    LoadResult round;
    for (int i = 0; i < 2; ++i) {
      RequestRecord r;
      r.completion_tokens = r.wanted_tokens = 3;
      r.chunk_s = {ttft / 1000, (ttft + tpot) / 1000, (ttft + 2 * tpot) / 1000};
      r.end_s = r.chunk_s.back();
      r.text = texts[text++ % texts.size()];
      round.requests.push_back(r);
    }
    round.duration_s = 1;
    append_round(report.load, std::move(round));
  }
  report.metrics = measure(report.load);
  return to_json(report);
}

const ComparedValue& value(const Comparison& comparison, const std::string& name) {
  for (const ComparedValue& v : comparison.values) {
    if (v.name == name) return v;
  }
  ADD_FAILURE() << name;
  return comparison.values.front();
}

TEST(Compare, RatiosOfAllAndOfRounds) {
  const Json a = run({{100, 10}, {200, 20}}, {"x"}), b = run({{110, 30}, {180, 20}}, {"x"});
  const auto c = compare(a, "a.json", b, "b.json");
  ASSERT_TRUE(c.ok()) << c.status().message();
  const ComparedValue& ttft = value(*c, "TTFT median");
  EXPECT_NEAR(ttft.a, 150, 1e-6);
  EXPECT_NEAR(ttft.b, 145, 1e-6);
  EXPECT_NEAR(ttft.ratio, 145.0 / 150, 1e-9);
  ASSERT_TRUE(ttft.rounds);
  EXPECT_NEAR(ttft.rounds->least, 0.9, 1e-6);
  EXPECT_NEAR(ttft.rounds->median, 1, 1e-6);
  EXPECT_NEAR(ttft.rounds->largest, 1.1, 1e-6);
  const ComparedValue& tpot = value(*c, "TPOT median");
  EXPECT_NEAR(tpot.ratio, 25.0 / 15, 1e-6);
  EXPECT_NEAR(tpot.rounds->least, 1, 1e-6);
  EXPECT_NEAR(tpot.rounds->largest, 3, 1e-6);
  EXPECT_NEAR(value(*c, "throughput").a, 6, 1e-9) << "12 tokens in 2 s";
  EXPECT_TRUE(std::isnan(value(*c, "failures").ratio)) << "0 of 0";
  EXPECT_EQ(c->agreement.compared, 4);
  EXPECT_EQ(c->agreement.equal, 4);
  EXPECT_EQ(to_json(*c)["outputs"]["common_share"], 1.0);
}

TEST(Compare, OutputsAgreeUpToTheirFirstDifference) {
  Json a = run({{1, 1}}, {"abcd", "same"}), b = run({{1, 1}}, {"abXdefgh", "same"});
  Agreement agreement = compare(a, "a", b, "b")->agreement;
  EXPECT_EQ(agreement.compared, 2);
  EXPECT_EQ(agreement.equal, 1);
  EXPECT_DOUBLE_EQ(agreement.common_share, (2.0 / 8 + 1) / 2);
  EXPECT_NE(to_text(*compare(a, "a", b, "b")).find("1 of 2 are equal; 62.5 % of the text"),
            std::string::npos);

  b["per_request"][0]["error"] = "failed";
  agreement = compare(a, "a", b, "b")->agreement;
  EXPECT_EQ(agreement.compared, 1) << "a failed request has no output to compare";
  EXPECT_EQ(agreement.equal, 1);
  b["per_request"][1]["error"] = "failed";
  EXPECT_EQ(compare(a, "a", b, "b")->agreement.why_not, "no request succeeded in both");
  b["plan"] = "3";
  EXPECT_EQ(compare(a, "a", b, "b")->agreement.why_not, "the runs had different requests");
  a["temperature"] = 0.5;
  b["plan"] = a["plan"];
  EXPECT_NE(compare(a, "a", b, "b")->agreement.why_not.find("greedy"), std::string::npos);
}

TEST(Compare, CachesThatWereNotEquallyWarmAreSaid) {
  Json a = run({{1, 1}}, {"x"}), b = a;
  EXPECT_TRUE(compare(a, "a", b, "b")->notes.empty());
  a["prompt_tokens"] = b["prompt_tokens"] = 1000;
  b["cached_tokens"] = 51;
  ASSERT_EQ(compare(a, "a", b, "b")->notes.size(), 1u);
  EXPECT_NE(to_text(*compare(a, "a", b, "b")).find("gave 0 and 51 tokens"), std::string::npos);
  b["cached_tokens"] = 49;
  EXPECT_TRUE(compare(a, "a", b, "b")->notes.empty());
}

TEST(Compare, RefusesWhatIsNoRun) {
  const Json good = run({{1, 1}}, {"x"});
  for (const char* field : {"requests", "failures", "duration_s", "throughput_tok_s", "ttft_ms", "tpot_ms",
                            "itl_ms", "per_request"}) {
    Json bad = good;
    bad[field] = "x";
    const auto c = compare(good, "good.json", bad, "bad.json");
    ASSERT_FALSE(c.ok()) << field;
    EXPECT_NE(c.status().message().find(std::string("bad.json: ") + field + " is no "), std::string::npos)
        << c.status().message();
  }
  EXPECT_FALSE(compare(Json::array(), "a", good, "b").ok());
  Json odd = good;  // what may be missing, and numbers that no run has
  odd["per_request"] = {1, "x", {{"round", 1e300}, {"ttft_ms", "x"}}, {{"round", -1}, {"ttft_ms", 1}}};
  odd["itl_by_batch"] = {{{"batch", 1e300}}, 7};
  odd["requests"] = 1e300;
  EXPECT_TRUE(compare(good, "a", odd, "b").ok());
}

TEST(Rows, ComeFromMetrics) {
  const std::string before =
      "# HELP vivace_op_calls_total Calls\nvivace_op_calls_total{op=\"linear\",row=\"cpu\"} 5\n"
      "vivace_op_calls_total{op=\"rope\",row=\"cpu\"} 2\nother{op=\"a\",row=\"b\"} 3\n";
  const std::string after =
      "vivace_op_calls_total{op=\"linear\",row=\"cpu\"} 12\nvivace_op_calls_total{op=\"rope\",row=\"cpu\"} "
      "2\n"
      "vivace_op_calls_total{row=\"reference\",op=\"linear\"} 1";
  const std::vector<RowUse> rows = rows_since(rows_of_metrics(after), rows_of_metrics(before));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].op + "=" + rows[0].row, "linear=cpu");
  EXPECT_EQ(rows[0].calls, 7);
  EXPECT_EQ(rows[1].row, "reference");
  EXPECT_FALSE(rows[1].explained);
  EXPECT_EQ(rows_text(rows).find("first in the table"), std::string::npos) << "a server does not say why";
  for (const char* odd :
       {"vivace_op_calls_total{", "vivace_op_calls_total{op=\"a\"} 1",
        "vivace_op_calls_total{op=\"a\",row=\"b\"} x", "vivace_op_calls_total{op=\"a\",row=\"b"})
    EXPECT_TRUE(rows_of_metrics(odd).empty()) << odd;
}

TEST(Rows, ThoseWithOneReasonStandTogether) {
  EXPECT_EQ(refusals_text({{"a", "x"}, {"b", "y"}, {"c", "x"}}), "a, c: x; b: y");
  EXPECT_EQ(refusals_text({}), "");
}

TEST(Compare, PageStandsAloneAndEscapes) {
  Json a = run({{1, 1}}, {"x"});
  a["command"] = "<script>";
  const auto c = compare(a, "<a>", a, "b&");
  const std::string html = to_html(*c);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("<a>"), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_NE(html.find("b&amp;"), std::string::npos);
  EXPECT_GE(std::count(html.begin(), html.end(), '\n'), 20);
  EXPECT_NE(html.find("TPOT median, B / A"), std::string::npos);
}

}  // namespace
}  // namespace vivace::bench
