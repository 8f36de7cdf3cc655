#include "src/bench/ops/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "src/bench/random.h"
#include "src/core/error.h"

namespace vivace::bench {

namespace {

template <class T>
OpWorkload& set(OpWorkload& workload, std::string_view field, T value) {
  for (OpWorkload::Field& f : workload.fields) {
    if (f.name != field) continue;
    f.value = std::move(value);
    return workload;
  }
  workload.fields.push_back({std::string(field), std::move(value)});
  return workload;
}

/// 1 to 256 requests of 1 to 200K tokens.
std::vector<int64_t> drawn_lengths(uint64_t seed) {
  Random random(seed);
  const auto log_uniform = [&](int64_t most) {
    const double drawn = std::exp((1 - random.uniform()) * std::log(static_cast<double>(most + 1)));
    return std::clamp<int64_t>(static_cast<int64_t>(drawn), 1, most);
  };
  std::vector<int64_t> lengths(static_cast<size_t>(log_uniform(256)));
  for (int64_t& length : lengths) length = log_uniform(200 * 1024);
  return lengths;
}

/// A number up to the first other character; `text` is moved past it. The largest one for what 64 bits do not hold.
bool take_number(std::string_view& text, int64_t& value) {
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.starts_with('-') || failure == std::errc::invalid_argument) return false;
  if (failure == std::errc::result_out_of_range) value = std::numeric_limits<int64_t>::max();
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

OpWorkload& OpWorkload::with(std::string_view field, int64_t value) {
  return set(*this, field, value);
}
OpWorkload& OpWorkload::with(std::string_view field, std::string value) {
  return set(*this, field, std::move(value));
}
int64_t OpWorkload::number(std::string_view field) const {
  for (const Field& f : fields) {
    if (f.name == field && std::holds_alternative<int64_t>(f.value)) return std::get<int64_t>(f.value);
  }
  return 0;
}
std::string OpWorkload::text(std::string_view field) const {
  for (const Field& f : fields) {
    if (f.name == field && std::holds_alternative<std::string>(f.value))
      return std::get<std::string>(f.value);
  }
  return "";
}

std::string describe(const OpWorkload::Value& value) {
  const auto* number = std::get_if<int64_t>(&value);
  return number != nullptr ? std::to_string(*number) : "'" + std::get<std::string>(value) + "'";
}

std::string describe(const OpWorkload& workload) {
  return fmt::format("{} {} {}", workload.suite, workload.name, fields_text(workload, " "));
}

std::string fields_text(const OpWorkload& workload, std::string_view separator) {
  std::string text;
  for (const OpWorkload::Field& field : workload.fields) {
    if (!text.empty()) text += separator;
    std::visit([&](const auto& value) { text += fmt::format("{}={}", field.name, value); }, field.value);
  }
  return text;
}

Result<OpFilter> OpFilter::parse(std::string_view text) {
  OpFilter filter{.text = std::string(text), .name = {}, .fields = {}};
  std::string_view rest = text;
  for (bool first = true, more = true; more; first = false) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
    const size_t equal = item.find('=');
    if (equal == std::string_view::npos && first && !item.empty()) {
      filter.name = item;
      continue;
    }
    if (equal == std::string_view::npos || equal == 0 || equal + 1 == item.size()) {
      return invalid_argument("'{}' is not {}, such as tokens=64", item,
                              first ? "NAME or FIELD=VALUE" : "FIELD=VALUE");
    }
    OpWorkload::Field field{.name = std::string(item.substr(0, equal)), .value = {}};
    if (std::ranges::find(filter.fields, field.name, &OpWorkload::Field::name) != filter.fields.end()) {
      return invalid_argument("{} is given twice", field.name);
    }
    const std::string_view value = item.substr(equal + 1);
    int64_t number = 0;
    const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (end == value.data() + value.size() && failure == std::errc::result_out_of_range) {
      return invalid_argument("{} is {}, more than 64 bits hold", field.name, value);
    }
    field.value = std::string(value);
    if (end == value.data() + value.size()) field.value = number;
    filter.fields.push_back(std::move(field));
  }
  return filter;
}

bool OpFilter::accepts(const OpWorkload& workload) const {
  if (!name.empty() && name != workload.name) return false;
  return std::all_of(fields.begin(), fields.end(), [&](const OpWorkload::Field& field) {
    return std::find(workload.fields.begin(), workload.fields.end(), field) != workload.fields.end();
  });
}

Result<std::vector<int64_t>> parse_lengths(std::string_view text, const LengthLimits& limits) {
  const auto refused = [&] {
    return invalid_argument("is '{}', needs REQUESTSxTOKENS[+...], such as 64x4K or 1x16K+15x64", text);
  };
  std::vector<int64_t> lengths;
  std::string_view rest = text;
  while (true) {
    int64_t requests = 0, whole = 0, tokens = 0;
    if (!take_number(rest, requests) || !rest.starts_with('x')) return refused();
    rest.remove_prefix(1);
    if (!take_number(rest, whole)) return refused();
    tokens = whole = std::min(whole, limits.most_tokens + 1);
    if (rest.starts_with(".5K")) {
      tokens = whole * 1024 + 512;
      rest.remove_prefix(3);
    } else if (rest.starts_with('K')) {
      tokens = whole * 1024;
      rest.remove_prefix(1);
    }
    if (requests < 1 || requests > limits.most_requests - std::ssize(lengths) ||
        tokens < limits.least_tokens || tokens > limits.most_tokens) {
      return invalid_argument("is '{}', needs 1 to {} requests of {} to {} tokens", text,
                              limits.most_requests, limits.least_tokens, limits.most_tokens);
    }
    lengths.insert(lengths.end(), static_cast<size_t>(requests), tokens);
    if (rest.empty()) return lengths;
    if (!rest.starts_with('+')) return refused();
    rest.remove_prefix(1);
  }
}

Result<std::vector<int64_t>> parse_case_lengths(std::string_view name) {
  if (constexpr std::string_view kRandom = "random:"; name.starts_with(kRandom)) {
    std::string_view rest = name.substr(kRandom.size());
    uint64_t seed = 0;
    const auto [end, bad] = std::from_chars(rest.data(), rest.data() + rest.size(), seed);
    if (bad == std::errc() && end == rest.data() + rest.size()) return drawn_lengths(seed);
    return invalid_argument("case is '{}', needs a seed from 0 to 2^64 - 1, such as random:7", name);
  }
  Result<std::vector<int64_t>> lengths = parse_lengths(name, {});
  if (lengths.ok()) return lengths;
  return error(lengths.status().code(), "case {}", lengths.status().message());
}

}  // namespace vivace::bench
