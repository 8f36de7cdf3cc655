#include "src/model/score.h"

#include <cstring>
#include <sstream>

#include "tests/model/model_harness.h"
#include "tests/model/sanitizer.h"

namespace vivace::testing {
namespace {

const std::string kQwen = std::string(VIVACE_TEST_DATA) + "/tiny-qwen3-moe";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::unique_ptr<model::Tokenizer> tokenizer_of(const model::Checkpoint& checkpoint) {
  auto tokenizer = model::Tokenizer::create(checkpoint.tokenizer());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

TEST(ScoreIds, EachDocumentIsFollowedByTheSeparator) {
  const auto checkpoint = open_checkpoint(kQwen);
  const auto tokenizer = tokenizer_of(*checkpoint);
  ASSERT_NE(tokenizer, nullptr);
  const auto first = tokenizer->encode("one", model::SpecialTokens::as_text);
  const auto second = tokenizer->encode("two", model::SpecialTokens::as_text);
  ASSERT_TRUE(first.ok() && second.ok());
  std::vector<int32_t> expected = *first;
  expected.push_back(7);
  expected.push_back(7);  // the empty document between two NULs
  expected.insert(expected.end(), second->begin(), second->end());
  expected.push_back(7);
  for (const std::string_view text :
       {std::string_view("one\0\0two", 8), std::string_view("one\0\0two\0", 9)}) {
    const auto ids = model::score_ids(*tokenizer, text, 7);
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, expected);
    for (size_t most = 1; most <= expected.size() + 1; ++most) {
      const auto some = model::score_ids(*tokenizer, text, 7, static_cast<int64_t>(most));
      ASSERT_TRUE(some.ok());
      EXPECT_EQ(*some,
                std::vector<int32_t>(expected.begin(), expected.begin() + std::min(most, expected.size())));
    }
  }
  EXPECT_TRUE(model::score_ids(*tokenizer, "", 7)->empty());
}

TEST(Score, EqualsTheDefinition) {
  // A window of 20, 20 and 7 tokens: 19 + 19 + 6 predictions, each from the full logits of its own window. The small
  // page and step make slices and pages end inside the windows.
  LoadedModel loaded(open_checkpoint(kQwen), {.page_tokens = 4, .max_tokens = 6}, 64);
  ASSERT_TRUE(loaded.ok());
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 47; ++i) ids.push_back((i * 37 + 11) % 4096);
  double sum = 0;
  for (size_t begin = 0; begin < ids.size(); begin += 20) {
    Conversation request = loaded.conversation();
    for (size_t i = begin; i + 1 < std::min(begin + 20, ids.size()); ++i) {
      const auto logits = loaded.feed(request, std::span(ids).subspan(i, 1), 1);
      sum += log_probabilities(logits)[ids[i + 1]];
    }
  }
  std::vector<int64_t> done;
  const auto result = model::score(loaded.model(), ids,
                                   {.window = 20,
                                    .progress =
                                        [&](int64_t windows, int64_t total) {
                                          EXPECT_EQ(total, 3);
                                          done.push_back(windows);
                                        }},
                                   loaded.stream());
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->tokens, 44);
  EXPECT_NEAR(result->perplexity, std::exp(-sum / 44), 1e-4 * result->perplexity);
  EXPECT_EQ(done, (std::vector<int64_t>{1, 2, 3}));

  const auto first = model::score(loaded.model(), ids, {.window = 20, .max_windows = 1}, loaded.stream());
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->tokens, 19);
  const auto no_tail =
      model::score(loaded.model(), std::span(ids).first(41), {.window = 20}, loaded.stream());
  ASSERT_TRUE(no_tail.ok());
  EXPECT_EQ(no_tail->tokens, 38) << "a last window of one token predicts nothing";
}

TEST(Score, RefusesWhatCannotBeScored) {
  LoadedModel loaded(open_checkpoint(kQwen), {.max_model_len = 64}, 64);
  ASSERT_TRUE(loaded.ok());
  const auto refused = [&](std::vector<int32_t> ids, int64_t window, const char* text) {
    const auto result = model::score(loaded.model(), ids, {.window = window}, loaded.stream());
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), Code::invalid_argument);
    EXPECT_NE(result.status().message().find(text), std::string::npos) << result.status().message();
  };
  refused({1, 2, 3}, 1, "window is 1, needs 2 to the model's context of 64");
  refused({1, 2, 3}, 65, "window is 65");
  refused({}, 8, "has 0 tokens");
  refused({5}, 8, "has 1 tokens");
  refused({5, 4096}, 8, "ids[1] is 4096");
}

TEST(Score, PerplexityOfTheTinyModelsOwnText) {
  const nlohmann::json reference = read_json(kQwen + "/references.json").at("perplexity");
  const auto checkpoint = open_checkpoint(kQwen);
  const auto tokenizer = tokenizer_of(*checkpoint);
  ASSERT_NE(tokenizer, nullptr);
  const auto ids = model::score_ids(*tokenizer, read_text(kQwen + "/sample.txt"),
                                    reference.at("separator_id").get<int32_t>());
  ASSERT_TRUE(ids.ok()) << ids.status().message();
  LoadedModel loaded(checkpoint, {}, 64);
  ASSERT_TRUE(loaded.ok());
  const auto window = reference.at("window").get<int64_t>();
  if (kSanitized) {  // the same code in a twentieth of the time; the reference is for all windows
    const auto some =
        model::score(loaded.model(), *ids, {.window = window, .max_windows = 3}, loaded.stream());
    ASSERT_TRUE(some.ok()) << some.status().message();
    EXPECT_EQ(some->tokens, 3 * (window - 1));
    return;
  }
  const auto result = model::score(loaded.model(), *ids,
                                   {.window = window, .max_windows = reference.at("windows").get<int64_t>()},
                                   loaded.stream());
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->tokens, reference.at("predictions").get<int64_t>());
  const double expected = reference.at("fp32");
  EXPECT_NEAR(result->perplexity, expected, 0.005 * expected);
}

}  // namespace
}  // namespace vivace::testing
