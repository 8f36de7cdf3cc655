#include "src/bench/ops/workload.h"

#include <algorithm>
#include <charconv>

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

/// A number up to the first other character; `text` is moved past it.
bool take_number(std::string_view& text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return false;
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
    if (f.name == field && std::holds_alternative<std::string>(f.value)) return std::get<std::string>(f.value);
  }
  return "";
}

Result<OpFilter> OpFilter::parse(std::string_view text) {
  OpFilter filter;
  std::string_view rest = text;
  for (bool first = true; !rest.empty(); first = false) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const size_t equal = item.find('=');
    if (equal == std::string_view::npos && first) {
      filter.name = item;
      continue;
    }
    if (equal == std::string_view::npos || equal == 0 || equal + 1 == item.size()) {
      return invalid_argument("'{}' in '{}' is not FIELD=VALUE, such as tokens=64", item, text);
    }
    const std::string name(item.substr(0, equal));
    std::string_view value = item.substr(equal + 1);
    int64_t number = 0;
    if (std::string_view left = value; take_number(left, number) && left.empty()) {
      filter.fields.push_back({name, number});
    } else {
      filter.fields.push_back({name, std::string(value)});
    }
  }
  return filter;
}

bool OpFilter::accepts(const OpWorkload& workload) const {
  if (!name.empty() && name != workload.name) return false;
  return std::all_of(fields.begin(), fields.end(), [&](const OpWorkload::Field& field) {
    return std::find(workload.fields.begin(), workload.fields.end(), field) != workload.fields.end();
  });
}

Result<std::vector<int64_t>> parse_lengths(std::string_view text) {
  constexpr int64_t kMostRequests = 4096, kMostTokens = int64_t{1} << 24;
  const auto refused = [&] {
    return invalid_argument("case is '{}', needs REQUESTSxTOKENS[+...], such as 64x4K or 1x16K+15x64", text);
  };
  std::vector<int64_t> lengths;
  std::string_view rest = text;
  while (true) {
    int64_t requests = 0, whole = 0, tokens = 0;
    if (!take_number(rest, requests) || !rest.starts_with('x')) return refused();
    rest.remove_prefix(1);
    if (!take_number(rest, whole)) return refused();
    tokens = whole;
    if (rest.starts_with(".5K")) {
      tokens = whole * 1024 + 512;
      rest.remove_prefix(3);
    } else if (rest.starts_with('K')) {
      tokens = whole * 1024;
      rest.remove_prefix(1);
    }
    if (requests > kMostRequests || tokens > kMostTokens ||
        std::ssize(lengths) + requests > kMostRequests) {
      return invalid_argument("case is '{}', needs at most {} requests of at most {} tokens", text, kMostRequests,
                              kMostTokens);
    }
    lengths.insert(lengths.end(), static_cast<size_t>(requests), tokens);
    if (rest.empty()) return lengths;
    if (!rest.starts_with('+')) return refused();
    rest.remove_prefix(1);
  }
}

}  // namespace vivace::bench
