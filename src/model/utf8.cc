#include "src/model/utf8.h"

#include "src/model/tokenizer.h"

namespace vivace::model {
namespace {

// The range of the second byte depends on the first (no overlong forms, no surrogates, nothing above
// U+10FFFF); all later bytes are 80..BF.
struct LeadByte {
  int length;  // 0: cannot start a character
  unsigned char second_low, second_high;
};

LeadByte lead_byte(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

Utf8Step utf8_step(std::string_view text, size_t position) {
  auto byte_at = [&](size_t i) { return static_cast<unsigned char>(text[position + i]); };
  const LeadByte lead = lead_byte(byte_at(0));
  if (lead.length == 0) return {Utf8Step::invalid, 1, 0};
  if (lead.length == 1) return {Utf8Step::character, 1, byte_at(0)};
  uint32_t value = byte_at(0) & (0x7Fu >> lead.length);
  for (int i = 1; i < lead.length; ++i) {
    if (position + i >= text.size()) return {Utf8Step::incomplete, i, 0};
    const unsigned char low = i == 1 ? lead.second_low : 0x80, high = i == 1 ? lead.second_high : 0xBF;
    if (byte_at(i) < low || byte_at(i) > high) return {Utf8Step::invalid, i, 0};
    value = value << 6 | (byte_at(i) & 0x3Fu);
  }
  return {Utf8Step::character, lead.length, value};
}

void append_utf8(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    if (step.kind != Utf8Step::character) return false;
    i += step.length;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  Utf8Stream stream;
  std::string out = stream.push(text);
  out += stream.finish();
  return out;
}

std::string Utf8Stream::push(std::string_view bytes) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_);
    joined += bytes;
    bytes = joined;
    held_.clear();
  }
  std::string out;
  out.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, i);
    if (step.kind == Utf8Step::incomplete) {
      held_ = bytes.substr(i);
      break;
    }
    out += step.kind == Utf8Step::character ? bytes.substr(i, step.length) : kReplacementCharacter;
    i += step.length;
  }
  return out;
}

std::string Utf8Stream::finish() {
  const bool incomplete = !held_.empty();
  held_.clear();
  return incomplete ? std::string(kReplacementCharacter) : std::string();
}

}  // namespace vivace::model
