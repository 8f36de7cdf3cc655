#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "src/server/api.h"

namespace vivace::server {

/// Reads the fields of one object of a request. Null counts as absent. The first field that does not fit is kept as the
/// error, and all later reads return their defaults, so that a reader lists its fields and asks once.
class Fields {
 public:
  using Json = nlohmann::json;
  /// `place` ("sampling_params.") stands before names. `object` must outlive this.
  explicit Fields(const Json& object, std::string place = {}) : object_(object), place_(std::move(place)) {}

  bool ok() const { return !error_; }
  const ApiError& error() const { return *error_; }

  /// The value; null when it is absent or an error came before.
  const Json* find(std::string_view name) const;
  int64_t integer(std::string_view name, int64_t low, int64_t high, int64_t fallback);
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);
  /// `needs` says the range in words.
  double number(std::string_view name, double low, double high, bool above_low, std::string_view needs,
                double fallback);
  bool boolean(std::string_view name, bool fallback);
  std::string text(std::string_view name, size_t longest);

  /// "NAME is VALUE, needs NEEDS".
  void misfit(std::string_view name, const Json& value, std::string_view needs);
  void fail(std::string_view name, std::string message, std::string code = "invalid_value");
  void fail(ApiError error);
  /// An error when the field is there and is neither null nor one of `harmless`.
  void unsupported(std::string_view name, std::initializer_list<Json> harmless, std::string_view why);

  std::string path(std::string_view name) const { return place_ + std::string(name); }

 private:
  const Json& object_;
  std::string place_;
  std::optional<ApiError> error_;
};

/// A whole number, also one written as 7.0.
std::optional<int64_t> whole(const nlohmann::json& value, int64_t low, int64_t high);
/// A value for a message: short, valid UTF-8.
std::string shown(const nlohmann::json& value);

}  // namespace vivace::server
