#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"

// Values of the command line from text. A failure says what was given and what would fit; the caller adds the flag.

namespace vivace::cli {

/// A decimal integer in [low, high]; nothing may follow it.
Result<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high);
/// As the end of a range: what is computed in fp32 has no other.
inline constexpr double kMostFp32 = std::numeric_limits<float>::max();
/// A finite decimal number in [low, high], or in (low, high] when `above_low`.
Result<double> parse_number(std::string_view text, double low, double high, bool above_low = false);
/// "512M": an integer with an optional suffix K, M, G or T (powers of 1024).
Result<int64_t> parse_bytes(std::string_view text);
struct Heads {
  int64_t q, kv;
};
/// "64/8": query heads, and KV heads that divide them; each from 1 to 1024.
Result<Heads> parse_heads(std::string_view text);
/// "1,2,3": token ids, at least one.
Result<std::vector<int32_t>> parse_ids(std::string_view text);
/// A file of token ids below `vocab`: numbers between white space, commas or brackets, as JSON lists have them.
Result<std::vector<int32_t>> parse_id_file(std::string_view text, int64_t vocab);
/// "17=-2.5": a token id and a finite number.
Result<std::pair<int32_t, float>> parse_bias(std::string_view text);

}  // namespace vivace::cli
