#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/model/jinja_parser.h"
#include "src/model/jinja_value.h"

namespace vivace::model::jinja {

/// Arguments of a filter, test, method or function.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  /// The argument at `index` or of that name; null when neither is there.
  const Value* get(size_t index, std::string_view name) const;
  /// Error::runtime if there are more than `count` positional arguments or a named one that is not in `names` ("*" allows any).
  void allow(std::string_view callee, size_t count, std::initializer_list<std::string_view> names = {}) const;
};

/// What rendering may use; each is counted over one rendering.
struct Budget {
  int64_t steps = 10'000'000;
  size_t text_bytes = size_t{64} << 20;  // of one string, and of the output

  /// Error::limit when spent.
  void charge(size_t amount);
  void check_text(size_t bytes) const;
};

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments, Budget& budget);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments);
Value call_method(const std::string& name, const Value& self, const Arguments& arguments, Budget& budget);
/// target.name as Jinja resolves it: a method first, then an item.
Value get_attribute(const Value& target, std::string_view name);
/// target[key]: an item first, then an attribute.
Value get_item(const Value& target, const Value& key);
/// The elements of a list, the keys of a dict, the characters of a text; nothing for undefined.
std::vector<Value> iterate(const Value& value, Budget& budget);
bool contains(const Value& container, const Value& item);
int64_t length_of(const Value& value);

/// Renders `block` with `variables` as its outermost names. Throws Error.
Text render(const Block& block, std::vector<std::pair<std::string, Value>> variables);

}  // namespace vivace::model::jinja
