#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "vivace/status.h"

namespace vivace::model {

/// What keeps a text from being a JSON object that is taken.
struct JsonFault {
  enum class Kind { syntax, empty, elements, depth, key, number };
  Kind kind = Kind::syntax;  ///< the rest: not of empty; of syntax, where a value was being read
  std::string path = {};   ///< "prompt[3]", what has the fault; of a long one the end; empty: the whole text
  std::string field = {};  ///< the field of the whole that it is or is in: "prompt"
  bool list = false;       ///< elements: of a list
  bool of_number = false;  ///< elements: the one too many is a number
};

/// Parses `text`, which must be one JSON object. `place` ("config.json") starts every message.
/// Refused: malformed text, invalid UTF-8, more than 64 levels, a key that occurs twice in one object, a number beyond float64.
/// A list or an object with more than `max_elements` is resource_exhausted as soon as there is one too many, before memory holds
/// the rest. The message names what has the fault ("config.json: prompt[3] has ..."), and `fault`, when it is given, says more.
Result<nlohmann::json> parse_json_object(std::string_view place, std::string_view text,
                                         int64_t max_elements = INT64_MAX, JsonFault* fault = nullptr);

/// Typed reads of one object's fields. The first failure is kept and later reads return their defaults, so
/// that a reader lists its fields and asks for status() once. A field whose value is null counts as absent.
class JsonFields {
 public:
  /// `object` must outlive this. `place` starts every message.
  JsonFields(std::string_view place, const nlohmann::json& object) : place_(place), object_(&object) {}

  const Status& status() const { return status_; }
  bool has(const char* field) const;
  /// The value, or null when the field is absent.
  const nlohmann::json* find(const char* field) const;

  /// A whole number in [min, max]; absent: `fallback`, or an error when there is none.
  int64_t integer(const char* field, int64_t min, int64_t max, std::optional<int64_t> fallback = {});
  /// The same for a field with several names; two that are present must agree.
  int64_t integer(std::initializer_list<const char*> names, int64_t min, int64_t max,
                  std::optional<int64_t> fallback = {});
  double number(const char* field, std::optional<double> fallback = {});
  bool boolean(const char* field, bool fallback);
  std::string text(const char* field, std::string_view fallback);

  /// Keeps `status` if nothing failed before.
  void fail(Status status);

 private:
  std::string place_;
  const nlohmann::json* object_;
  Status status_;
};

/// A short rendering of a value for messages.
std::string excerpt(const nlohmann::json& value);

}  // namespace vivace::model
