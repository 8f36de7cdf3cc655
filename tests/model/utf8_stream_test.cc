#include <gtest/gtest.h>

#include <random>

#include "src/model/tokenizer.h"
#include "src/model/utf8.h"

namespace vivace::model {
namespace {

std::string stream(const std::vector<std::string>& pieces) {
  Utf8Stream stream;
  std::string out;
  for (const auto& piece : pieces) {
    const std::string text = stream.push(piece);
    EXPECT_TRUE(is_valid_utf8(text));
    out += text;
  }
  return out + stream.finish();
}

// H33 https://github.com/ggml-org/llama.cpp/issues/9195: bytes that are not UTF-8 ended the server.
TEST(Utf8Stream, H33InvalidBytes) {
  Utf8Stream utf8;
  EXPECT_EQ(utf8.push("\xE6\x97"), "");
  EXPECT_EQ(utf8.push("\xA5"), "日");
  EXPECT_EQ(utf8.push("\x80"), "\uFFFD");
  EXPECT_EQ(utf8.push("\xFF"), "\uFFFD");
  EXPECT_EQ(utf8.push("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(utf8.push("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(utf8.push("\x41"), "A");
  EXPECT_EQ(utf8.finish(), "");
  EXPECT_EQ(replace_invalid_utf8("\xE6\x97\xA5\x80\xFF\xED\xA0\x80\xF4\x90\x80\x80\x41"),
            "日\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA");
}

TEST(Utf8Stream, MaximalSubparts) {
  // The example of the Unicode standard, section 3.9: one U+FFFD per maximal subpart.
  EXPECT_EQ(stream({"a\xF1\x80\x80\xE1\x80\xC2"
                    "b\x80"
                    "c\x80\xBF"
                    "d"}),
            "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd");
  EXPECT_EQ(stream({"\xE6\x97"}), "\uFFFD") << "held back at the end";
  EXPECT_EQ(stream({"\xE6", "\x97", "A"}), "\uFFFDA");
  EXPECT_EQ(stream({"\xC0\xAF\xE0\x80\xAF\xF5"}), "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(stream({""}), "");
}

TEST(Utf8Stream, FinishEmptiesIt) {
  Utf8Stream utf8;
  utf8.push("\xF0\x9F");
  EXPECT_EQ(utf8.finish(), "\uFFFD");
  EXPECT_EQ(utf8.finish(), "");
  EXPECT_EQ(utf8.push("A"), "A");
}

TEST(Utf8Stream, AnyCutGivesTheSameText) {
  std::mt19937 random(1);
  const std::string alphabet = "\x41\x7F\x80\x8F\x90\x9F\xA0\xBF\xC2\xE0\xE6\xED\xEF\xF0\xF4\xFF";
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    for (int i = 0; i < round % 24; ++i) bytes += alphabet[random() % alphabet.size()];
    const std::string whole = stream({bytes});
    std::vector<std::string> pieces(1);
    for (char c : bytes) {
      if (random() % 2) pieces.emplace_back();
      pieces.back() += c;
    }
    EXPECT_EQ(stream(pieces), whole);
    EXPECT_EQ(replace_invalid_utf8(bytes), whole);
  }
}

TEST(Utf8, EveryCodePointSurvives) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c == 0xD800) c = 0xE000;
    std::string text;
    append_utf8(text, c);
    const Utf8Step step = utf8_step(text, 0);
    ASSERT_EQ(step.kind, Utf8Step::character);
    ASSERT_EQ(step.value, c);
    ASSERT_EQ(static_cast<size_t>(step.length), text.size());
    if (text.size() == 1) continue;
    ASSERT_EQ(utf8_step(std::string_view(text).substr(0, text.size() - 1), 0).kind, Utf8Step::incomplete);
  }
}

}  // namespace
}  // namespace vivace::model
