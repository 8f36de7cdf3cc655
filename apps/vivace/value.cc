#include "apps/vivace/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "src/core/error.h"

namespace vivace::cli {

namespace {

/// The whole text as a number; result_out_of_range for one that T does not hold.
template <class T>
std::errc parse_whole(std::string_view text, T& value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  return stop == end && !text.empty() ? code : std::errc::invalid_argument;
}

template <class T>
bool whole(std::string_view text, T& value) {
  return parse_whole(text, value) == std::errc();
}

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

}  // namespace

Result<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high) {
  int64_t value = 0;
  const std::errc code = parse_whole(text, value);
  if (code == std::errc() && value >= low && value <= high) return value;
  if (high == std::numeric_limits<int64_t>::max() && code != std::errc::result_out_of_range) {
    return invalid_argument("is '{}', needs an integer of at least {}", text, low);
  }
  return invalid_argument("is '{}', needs an integer from {} to {}", text, low, high);
}

Result<double> parse_number(std::string_view text, double low, double high, bool above_low) {
  double value = 0;
  const bool fits = whole(text, value) && std::isfinite(value) && (above_low ? value > low : value >= low);
  if (fits && value <= high) return value;
  const char* edge = above_low ? "above" : "of at least";
  if (!std::isfinite(high)) return invalid_argument("is '{}', needs a finite number {} {}", text, edge, low);
  if (high == kMostFp32)
    return invalid_argument("is '{}', needs a finite number {} {} in fp32", text, edge, low);
  return invalid_argument("is '{}', needs a number {} {} and at most {}", text, edge, low, high);
}

Result<int64_t> parse_bytes(std::string_view text) {
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    switch (digits.back()) {
      case 'K':
      case 'k':
        shift = 10;
        break;
      case 'M':
      case 'm':
        shift = 20;
        break;
      case 'G':
      case 'g':
        shift = 30;
        break;
      case 'T':
      case 't':
        shift = 40;
        break;
      default:
        break;
    }
    if (shift > 0) digits.remove_suffix(1);
  }
  int64_t value = 0;
  if (whole(digits, value) && value > 0 && value <= std::numeric_limits<int64_t>::max() >> shift) {
    return value << shift;
  }
  return invalid_argument(
      "is '{}', needs a positive number of bytes, alone or with K, M, G or T, such as 512M or 2G", text);
}

Result<Heads> parse_heads(std::string_view text) {
  constexpr int64_t kMost = 1024;
  const auto fits = [](int64_t heads) { return heads >= 1 && heads <= kMost; };
  const size_t slash = text.find('/');
  Heads heads{};
  if (slash != std::string_view::npos && whole(text.substr(0, slash), heads.q) &&
      whole(text.substr(slash + 1), heads.kv) && fits(heads.q) && fits(heads.kv) && heads.q % heads.kv == 0) {
    return heads;
  }
  return invalid_argument("is '{}', needs Q/KV heads, 1 to {} each and Q a multiple of KV, such as 64/8",
                          text, kMost);
}

Result<std::vector<int32_t>> parse_ids(std::string_view text) {
  std::vector<int32_t> ids;
  std::string_view rest = text;
  for (;;) {
    const size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    int64_t id = 0;
    if (!whole(item, id) || id < 0 || id > kMaxId) {
      return invalid_argument(
          "has '{}' at position {}, needs token ids of at least 0 joined by commas, such as 1,2,3", item,
          ids.size());
    }
    ids.push_back(static_cast<int32_t>(id));
    if (comma == std::string_view::npos) return ids;
    rest.remove_prefix(comma + 1);
  }
}

Result<std::vector<int32_t>> parse_id_file(std::string_view text, int64_t vocab) {
  constexpr std::string_view kBetween = " \t\r\n,[]";
  constexpr size_t kMostShown = 40;
  std::vector<int32_t> ids;
  for (size_t begin = text.find_first_not_of(kBetween); begin != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(kBetween, begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    int64_t id = 0;
    if (!whole(item, id) || id < 0 || id >= vocab) {
      return invalid_argument("id {} is '{}', needs 0 to {}", ids.size(), item.substr(0, kMostShown),
                              vocab - 1);
    }
    ids.push_back(static_cast<int32_t>(id));
    begin = text.find_first_not_of(kBetween, end);
  }
  return ids;
}

Result<std::pair<int32_t, float>> parse_bias(std::string_view text) {
  const size_t equal = text.find('=');
  int64_t id = 0;
  float bias = 0;
  if (equal != std::string_view::npos && whole(text.substr(0, equal), id) && id >= 0 && id <= kMaxId &&
      whole(text.substr(equal + 1), bias) && std::isfinite(bias)) {
    return std::pair<int32_t, float>(static_cast<int32_t>(id), bias);
  }
  return invalid_argument("is '{}', needs ID=BIAS with a token id and a finite number, such as 17=-2.5",
                          text);
}

}  // namespace vivace::cli
