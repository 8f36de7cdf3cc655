#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vivace::model::jinja {

/// Thrown inside the template engine only; ChatTemplate turns it into a Status.
struct Error {
  enum Kind {
    syntax,       ///< not Jinja
    unsupported,  ///< Jinja, but outside the subset
    runtime,      ///< what Python would raise, raise_exception included
    limit,        ///< steps, depth or size
  };
  Kind kind;
  std::string message;
};

/// A string whose bytes know where they came from: `marks[i]` is kTemplate if `bytes[i]` was written by the template
/// itself and kData if it came from a variable. Every operation carries the marks along.
struct Text {
  std::string bytes;
  std::string marks;  // as long as `bytes`

  void append(const Text& other) {
    bytes += other.bytes;
    marks += other.marks;
  }
  void append(std::string_view text, char mark) {
    bytes += text;
    marks.append(text.size(), mark);
  }
  Text slice(size_t begin, size_t end) const {
    return {bytes.substr(begin, end - begin), marks.substr(begin, end - begin)};
  }
};
inline constexpr char kTemplate = 1, kData = 0;

struct Value;
struct Callable;

struct List {
  std::vector<Value> items;
  bool tuple = false;
  int depth = 1;          // levels of containers below and including this one
  bool shareable = true;  // holds no namespace, so a namespace may hold it
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in insertion order
  int depth = 1;
  bool shareable = true;

  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
  bool assignable = true;  // false for `loop`
};

/// A Python value. Copying is cheap: texts, lists and dicts are shared and never change.
struct Value {
  enum Kind { undefined, none, boolean, integer, real, text, list, dict, name_space, callable };
  Kind kind = undefined;
  int64_t i = 0;                 // boolean, integer
  double d = 0;                  // real
  std::shared_ptr<void> object;  // the rest; for `undefined` its name as std::string, or null

  static Value of(bool value);
  static Value of(int64_t value);
  static Value of(double value);
  static Value of(Text value);
  static Value of(std::string_view value, char mark = kTemplate);
  static Value of(const char* value) { return of(std::string_view(value)); }  // else it would be a bool
  static Value make_none();
  static Value make_undefined(std::string name);
  /// Error::limit when containers nest too deep.
  static Value make_list(std::vector<Value> items, bool tuple = false);
  static Value make_dict(std::vector<std::pair<Value, Value>> items);
  static Value make_callable(Callable callable);

  bool is_number() const { return kind == boolean || kind == integer || kind == real; }
  bool is_whole() const { return kind == boolean || kind == integer; }
  double number() const { return kind == real ? d : static_cast<double>(i); }
  const Text& as_text() const { return *static_cast<const Text*>(object.get()); }
  const List& as_list() const { return *static_cast<const List*>(object.get()); }
  const Dict& as_dict() const { return *static_cast<const Dict*>(object.get()); }
  Namespace& as_namespace() const { return *static_cast<Namespace*>(object.get()); }
  const Callable& as_callable() const { return *static_cast<const Callable*>(object.get()); }
  bool shareable() const;
  int depth() const;
};

struct Macro;
struct Scope;

/// A global function, a bound method or a macro.
struct Callable {
  std::string name;
  Value self;  // of a method
  bool method = false;
  const Macro* macro = nullptr;
};

inline constexpr int kMaxContainerDepth = 64;

bool truthy(const Value& value);
bool equal(const Value& left, const Value& right);
/// -1, 0, 1; Error::runtime when Python has no order for the two.
int compare(const Value& left, const Value& right);
/// Python's type name: "str", "int", "dict", ...
std::string type_name(const Value& value);
/// str(value)
Text to_text(const Value& value);
/// repr(value)
std::string repr(const Value& value);
/// json.dumps(value, ensure_ascii=False, indent=indent), indent < 0 for None.
std::string to_json(const Value& value, int indent);
/// Invalid UTF-8 becomes U+FFFD. Error::limit when it nests too deep.
Value from_json(const nlohmann::ordered_json& json, char mark);

/// Byte offsets of the characters of `text`, and its size.
std::vector<size_t> character_offsets(std::string_view text);
/// Python's str.isspace for one character.
bool is_space(uint32_t code_point);

[[noreturn]] void fail(std::string message);

}  // namespace vivace::model::jinja
