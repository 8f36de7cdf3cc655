#include "src/server/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/model/json.h"
#include "src/model/utf8.h"

namespace vivace::server {

using Json = nlohmann::json;

std::optional<int64_t> whole(const Json& value, int64_t low, int64_t high) {
  int64_t number = 0;
  if (value.is_number_unsigned()) {
    const auto bits = value.get<uint64_t>();
    if (bits > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    number = static_cast<int64_t>(bits);
  } else if (value.is_number_integer()) {
    number = value.get<int64_t>();
  } else if (value.is_number_float()) {
    const auto real = value.get<double>();
    if (real != std::trunc(real) || std::abs(real) > 9007199254740992.0) return std::nullopt;  // 2^53
    number = static_cast<int64_t>(real);
  } else {
    return std::nullopt;
  }
  if (number < low || number > high) return std::nullopt;
  return number;
}

std::string shown(const Json& value) {
  return model::replace_invalid_utf8(model::excerpt(value));
}

const Json* Fields::find(std::string_view name) const {
  if (error_) return nullptr;
  const auto it = object_.find(std::string(name));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = whole(*value, low, high);
  if (number) return number;
  const bool too_large = value->is_number() && value->get<double>() > static_cast<double>(low);
  if (high == std::numeric_limits<int64_t>::max() && !too_large)
    misfit(name, *value, fmt::format("a whole number of at least {}", low));
  else
    misfit(name, *value, fmt::format("a whole number of {}..{}", low, high));
  return std::nullopt;
}

int64_t Fields::integer(std::string_view name, int64_t low, int64_t high, int64_t fallback) {
  return integer(name, low, high).value_or(fallback);
}

double Fields::number(std::string_view name, double low, double high, bool above_low, std::string_view needs,
                      double fallback) {
  const Json* value = find(name);
  if (value == nullptr) return fallback;
  if (value->is_number()) {
    const auto real = value->get<double>();
    if ((above_low ? real > low : real >= low) && real <= high) return real;
  }
  misfit(name, *value, needs);
  return fallback;
}

bool Fields::boolean(std::string_view name, bool fallback) {
  const Json* value = find(name);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  misfit(name, *value, "true or false");
  return fallback;
}

std::string Fields::text(std::string_view name, size_t longest) {
  const Json* value = find(name);
  if (value == nullptr) return {};
  if (!value->is_string()) {
    misfit(name, *value, "a string");
    return {};
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > longest) {
    fail(name, fmt::format("{} has {} bytes, needs at most {}", path(name), text.size(), longest));
    return {};
  }
  return text;
}

void Fields::misfit(std::string_view name, const Json& value, std::string_view needs) {
  fail(name, fmt::format("{} is {}, needs {}", path(name), shown(value), needs));
}

void Fields::fail(std::string_view name, std::string message, std::string code) {
  fail(ApiError{.message = std::move(message), .param = path(name), .code = std::move(code)});
}

void Fields::fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

void Fields::unsupported(std::string_view name, std::initializer_list<Json> harmless, std::string_view why) {
  const Json* value = find(name);
  if (value == nullptr || std::ranges::find(harmless, *value) != harmless.end()) return;
  fail(name, fmt::format("{} is {}, which this server cannot do: {}", path(name), shown(*value), why),
       "unsupported_parameter");
}

}  // namespace vivace::server
