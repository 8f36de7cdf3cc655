#include <gtest/gtest.h>

#include <random>

#include "src/model/tokenizer.h"

namespace vivace::model {
namespace {

struct Outcome {
  std::string text, matched;
  bool stopped = false;
  bool operator==(const Outcome&) const = default;
};

Outcome run(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const auto& piece : pieces) {
    const auto result = matcher.push(piece);
    outcome.text += result.text;
    if (result.stopped) return {outcome.text, result.matched, true};
  }
  outcome.text += matcher.finish();
  return outcome;
}

// H34 https://github.com/vllm-project/vllm/issues/3574: the beginning of a stop string was streamed before
// its end came.
TEST(StopMatcher, H34StopStringAcrossTokens) {
  EXPECT_EQ(run({"###END"}, {"ab", "c##", "#E", "ND", "x"}), (Outcome{"abc", "###END", true}));
  EXPECT_EQ(run({"###END"}, {"ab", "c##", "#EN", "Z"}), (Outcome{"abc###ENZ", "", false}));
  EXPECT_EQ(run({"##", "###END"}, {"ab", "c##", "#E", "ND", "x"}), (Outcome{"abc", "##", true}));
  EXPECT_EQ(run({"###END"}, {"c##", "#ENDing"}), (Outcome{"c", "###END", true})) << "ends inside a token";
  EXPECT_EQ(run({"日本"}, {"x\xE6\x97", "\xA5\xE6", "\x9C\xAC", "y"}), (Outcome{"x", "日本", true}));
  EXPECT_EQ(run({"###END"}, {"ab", "c##"}), (Outcome{"abc##", "", false}))
      << "held back when generation ends";
}

TEST(StopMatcher, NothingOfAStopIsDeliveredEarly) {
  StopMatcher matcher({"###END"});
  EXPECT_EQ(matcher.push("c##").text, "c");
  EXPECT_EQ(matcher.push("#").text, "");
  EXPECT_EQ(matcher.push("#").text, "#") << "four # can only be a stop from the second one on";
  EXPECT_EQ(matcher.push("").text, "");
  EXPECT_TRUE(matcher.push("END").stopped);
}

TEST(StopMatcher, TheFirstCompletedMatchWins) {
  EXPECT_EQ(run({"abcd", "bc"}, {"xabcd"}), (Outcome{"xa", "bc", true}));
  EXPECT_EQ(run({"bc", "abc"}, {"xabc"}), (Outcome{"x", "abc", true}))
      << "of two completed at once, the longest";
  EXPECT_EQ(run({"aab"}, {"aaab"}), (Outcome{"a", "aab", true}));
  EXPECT_EQ(run({"", "b"}, {"ab"}), (Outcome{"a", "b", true})) << "an empty stop string never matches";
  EXPECT_EQ(run({}, {"ab", "c"}), (Outcome{"abc", "", false}));
}

TEST(StopMatcher, AnyCutGivesTheSameOutcome) {
  std::mt19937 random(3);
  auto text_of = [&](int length) {
    std::string text;
    for (int i = 0; i < length; ++i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::string> stops;
    for (unsigned i = 0; i <= random() % 3; ++i) stops.push_back(text_of(2 + random() % 5));
    const std::string text = text_of(random() % 20);
    // The definition: the smallest end, then the longest stop that ends there.
    Outcome expected{text, "", false};
    for (size_t end = 1; end <= text.size() && !expected.stopped; ++end) {
      for (const auto& stop : stops) {
        if (stop.size() > end || text.compare(end - stop.size(), stop.size(), stop) != 0) continue;
        if (stop.size() > expected.matched.size()) expected = {text.substr(0, end - stop.size()), stop, true};
      }
    }
    std::vector<std::string> pieces(1);
    for (char c : text) {
      if (random() % 2) pieces.emplace_back();
      pieces.back() += c;
    }
    EXPECT_EQ(run(stops, {text}), expected);
    EXPECT_EQ(run(stops, pieces), expected);
  }
}

}  // namespace
}  // namespace vivace::model
