#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "src/model/jinja_eval.h"
#include "src/model/utf8.h"

// Filters, tests, methods, and access to attributes and items.

namespace vivace::model::jinja {

const Value* Arguments::get(size_t index, std::string_view name) const {
  if (index < positional.size()) return &positional[index];
  for (const auto& [known, value] : named) {
    if (known == name) return &value;
  }
  return nullptr;
}

void Arguments::allow(std::string_view callee, size_t count,
                      std::initializer_list<std::string_view> names) const {
  if (positional.size() > count)
    fail(fmt::format("{} takes at most {} argument(s), got {}", callee, count, positional.size()));
  for (const auto& [name, value] : named) {
    const bool known = std::any_of(names.begin(), names.end(),
                                   [&, n = std::string_view(name)](auto k) { return k == n || k == "*"; });
    if (!known) fail(fmt::format("{} has no argument '{}'", callee, name));
  }
}

namespace {

constexpr std::string_view kFilters[] = {
    "trim",   "tojson", "length", "count",      "join",       "default",    "d",        "list",    "string",
    "int",    "float",  "upper",  "lower",      "title",      "capitalize", "replace",  "first",   "last",
    "map",    "select", "reject", "selectattr", "rejectattr", "items",      "dictsort", "reverse", "sort",
    "unique", "indent", "abs",    "round",      "sum",        "safe"};
constexpr std::string_view kTests[] = {
    "defined", "undefined",   "none", "string", "mapping", "sequence", "iterable",    "number", "integer",
    "float",   "boolean",     "true", "false",  "odd",     "even",     "divisibleby", "in",     "callable",
    "eq",      "equalto",     "==",   "ne",     "!=",      "lt",       "lessthan",    "<",      "le",
    "gt",      "greaterthan", ">",    "ge",     "upper",   "lower",    "sameas"};
constexpr std::string_view kMethods[] = {"startswith", "endswith", "strip",        "lstrip",      "rstrip",
                                         "split",      "replace",  "upper",        "lower",       "title",
                                         "capitalize", "join",     "items",        "keys",        "values",
                                         "get",        "count",    "index",        "find",        "isdigit",
                                         "splitlines", "rsplit",   "removeprefix", "removesuffix"};
constexpr std::string_view kTextMethods[] = {"startswith", "endswith", "strip",       "lstrip", "rstrip",
                                             "split",      "replace",  "upper",       "lower",  "title",
                                             "capitalize", "join",     "count",       "find",   "isdigit",
                                             "splitlines", "rsplit",   "removeprefix"};
constexpr std::string_view kDictMethods[] = {"items", "keys", "values", "get"};
constexpr std::string_view kListMethods[] = {"count", "index"};

template <size_t n>
bool has(const std::string_view (&names)[n], std::string_view name) {
  return std::find(names, names + n, name) != names + n;
}

// --- texts

const Text& text_of(const Value& value, std::string_view what) {
  if (value.kind != Value::text) fail(fmt::format("{} needs a str, got '{}'", what, type_name(value)));
  return value.as_text();
}

int64_t whole_of(const Value& value, std::string_view what) {
  if (!value.is_whole()) fail(fmt::format("{} needs an integer, got '{}'", what, type_name(value)));
  return value.i;
}

std::vector<uint32_t> code_points(std::string_view text) {
  std::vector<uint32_t> points;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    points.push_back(step.value);
    i += step.length;
  }
  return points;
}

// Python's strip: `characters` is a set; without one, whitespace.
Text strip(const Text& text, const Value* characters, bool left, bool right) {
  std::vector<uint32_t> set;
  const bool any_space = characters == nullptr || characters->kind == Value::none;
  if (!any_space) set = code_points(text_of(*characters, "strip()").bytes);
  auto strips = [&](uint32_t c) {
    return any_space ? is_space(c) : std::find(set.begin(), set.end(), c) != set.end();
  };
  const std::vector<size_t> at = character_offsets(text.bytes);
  size_t begin = 0, end = at.size() - 1;
  while (left && begin < end && strips(utf8_step(text.bytes, at[begin]).value)) ++begin;
  while (right && end > begin && strips(utf8_step(text.bytes, at[end - 1]).value)) --end;
  return text.slice(at[begin], at[end]);
}

// The methods upper, lower, title, capitalize, and "title filter", whose words begin at the start and after a space, a
// hyphen or an opening bracket. Character by character; a sharp s has two capitals, as in Python.
Text change_case(const Text& text, std::string_view how) {
  Text out;
  bool in_word = false, first = true;
  for (size_t i = 0; i < text.bytes.size();) {
    const Utf8Step step = utf8_step(text.bytes, i);
    const auto c = static_cast<utf8proc_int32_t>(step.value);
    const bool cased = utf8proc_toupper(c) != c || utf8proc_tolower(c) != c || c == 0xDF;
    const bool to_upper = how == "upper" || (how == "title" && !in_word) || (how == "capitalize" && first) ||
                          (how == "title filter" && !in_word);
    std::string mapped;
    if (c == 0xDF && to_upper) {
      mapped = how == "upper" ? "SS" : "Ss";
    } else if (how == "upper") {
      append_utf8(mapped, static_cast<uint32_t>(utf8proc_toupper(c)));
    } else {
      append_utf8(mapped, static_cast<uint32_t>(to_upper ? utf8proc_totitle(c) : utf8proc_tolower(c)));
    }
    out.append(mapped, text.marks[i]);
    in_word =
        how == "title filter" ? !is_space(step.value) && mapped.find_first_of("-({[<") == mapped.npos : cased;
    first = false;
    i += step.length;
  }
  return out;
}

Text replace(const Text& text, const Text& from, const Text& to, int64_t count, Budget& budget) {
  Text out;
  size_t at = 0;
  auto put = [&](const Text& part) {
    budget.charge(1 + part.bytes.size() / 16);
    budget.check_text(out.bytes.size() + part.bytes.size());
    out.append(part);
  };
  if (from.bytes.empty()) {
    const std::vector<size_t> offsets = character_offsets(text.bytes);
    for (size_t i = 0; i < offsets.size(); ++i) {
      if (count < 0 || static_cast<int64_t>(i) < count) put(to);
      if (i + 1 < offsets.size()) put(text.slice(offsets[i], offsets[i + 1]));
    }
    return out;
  }
  for (int64_t done = 0; count < 0 || done < count; ++done) {
    const size_t found = text.bytes.find(from.bytes, at);
    if (found == std::string::npos) break;
    put(text.slice(at, found));
    put(to);
    at = found + from.bytes.size();
  }
  put(text.slice(at, text.bytes.size()));
  return out;
}

Value split(const Text& text, const Value* separator, int64_t limit, bool from_right, Budget& budget) {
  std::vector<Value> parts;
  auto put = [&](size_t begin, size_t end) {
    budget.charge(1 + (end - begin) / 16);
    parts.push_back(Value::of(text.slice(begin, end)));
  };
  if (separator == nullptr || separator->kind == Value::none) {
    if (from_right && limit >= 0)
      throw Error{Error::unsupported, "rsplit() at whitespace with a limit is outside the subset"};
    size_t i = 0;
    while (true) {
      auto space_at = [&](size_t at) { return is_space(utf8_step(text.bytes, at).value); };
      while (i < text.bytes.size() && space_at(i)) i += utf8_step(text.bytes, i).length;
      if (i == text.bytes.size()) break;
      if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
        put(i, i + strip(text.slice(i, text.bytes.size()), nullptr, false, true).bytes.size());
        break;
      }
      const size_t begin = i;
      while (i < text.bytes.size() && !space_at(i)) i += utf8_step(text.bytes, i).length;
      put(begin, i);
    }
    return Value::make_list(std::move(parts));
  }
  const std::string& by = text_of(*separator, "split()").bytes;
  if (by.empty()) fail("empty separator");
  if (from_right) {
    size_t end = text.bytes.size();
    while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
      if (end < by.size()) break;
      const size_t found = text.bytes.rfind(by, end - by.size());
      if (found == std::string::npos) break;
      put(found + by.size(), end);
      end = found;
    }
    put(0, end);
    std::reverse(parts.begin(), parts.end());
    return Value::make_list(std::move(parts));
  }
  size_t at = 0;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t found = text.bytes.find(by, at);
    if (found == std::string::npos) break;
    put(at, found);
    at = found + by.size();
  }
  put(at, text.bytes.size());
  return Value::make_list(std::move(parts));
}

Value split_lines(const Text& text, Budget& budget) {
  std::vector<Value> lines;
  size_t begin = 0;
  for (size_t i = 0; i < text.bytes.size();) {
    const Utf8Step step = utf8_step(text.bytes, i);
    const uint32_t c = step.value;
    const bool ends =
        (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    size_t next = i + step.length;
    if (ends) {
      budget.charge(1 + (i - begin) / 16);
      lines.push_back(Value::of(text.slice(begin, i)));
      if (c == '\r' && next < text.bytes.size() && text.bytes[next] == '\n') ++next;
      begin = next;
    }
    i = next;
  }
  if (begin < text.bytes.size()) lines.push_back(Value::of(text.slice(begin, text.bytes.size())));
  return Value::make_list(std::move(lines));
}

Value join(const std::vector<Value>& items, const Text& separator, bool only_text, Budget& budget) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (only_text) text_of(items[i], "join()");
    const Text part = to_text(items[i]);
    budget.charge(1 + (part.bytes.size() + separator.bytes.size()) / 16);
    budget.check_text(out.bytes.size() + part.bytes.size() + separator.bytes.size());
    if (i > 0) out.append(separator);
    out.append(part);
  }
  return Value::of(std::move(out));
}

// --- filters over sequences

Value attribute_path(const Value& item, const Value& path) {
  if (path.kind != Value::text) return get_item(item, path);
  Value at = item;
  std::string_view rest = path.as_text().bytes;
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    int64_t index = 0;
    const bool number = !part.empty() && std::from_chars(part.data(), part.data() + part.size(), index).ptr ==
                                             part.data() + part.size();
    at = get_item(at, number && part[0] != '-' ? Value::of(index) : Value::of(part));
    if (dot == rest.npos) return at;
    rest.remove_prefix(dot + 1);
  }
}

Arguments without(const Arguments& arguments, size_t count) {
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin(),
                        rest.positional.begin() + std::min(count, rest.positional.size()));
  return rest;
}

std::string name_argument(const Arguments& arguments, size_t index, std::string_view filter) {
  if (index >= arguments.positional.size()) return {};
  return text_of(arguments.positional[index], filter).bytes;
}

Value filter_items(const std::string& name, const Value& value, const Arguments& arguments, Budget& budget) {
  const bool by_attribute = name == "selectattr" || name == "rejectattr";
  const bool keep = name == "select" || name == "selectattr";
  if (by_attribute && arguments.positional.empty()) fail(fmt::format("{} needs an attribute", name));
  const std::string test = name_argument(arguments, by_attribute, name);
  if (!test.empty() && !is_test(test))
    throw Error{Error::unsupported, fmt::format("test '{}' is outside the subset", test)};
  const Arguments rest = without(arguments, by_attribute ? 2 : 1);
  std::vector<Value> kept;
  for (const Value& item : iterate(value, budget)) {
    budget.charge(1);
    const Value tested = by_attribute ? attribute_path(item, arguments.positional[0]) : item;
    if ((test.empty() ? truthy(tested) : apply_test(test, tested, rest)) == keep) kept.push_back(item);
  }
  return Value::make_list(std::move(kept));
}

Value map_items(const Value& value, const Arguments& arguments, Budget& budget) {
  std::vector<Value> mapped;
  const Value* attribute = arguments.positional.empty() ? arguments.get(0, "attribute") : nullptr;
  const Value* otherwise = arguments.get(99, "default");
  if (attribute == nullptr && arguments.positional.empty()) fail("map needs a filter or an attribute");
  const std::string filter = attribute ? "" : name_argument(arguments, 0, "map");
  if (attribute == nullptr && !is_filter(filter)) {
    throw Error{Error::unsupported, fmt::format("filter '{}' is outside the subset", filter)};
  }
  const Arguments rest = without(arguments, 1);
  for (const Value& item : iterate(value, budget)) {
    budget.charge(1);
    Value out = attribute ? attribute_path(item, *attribute) : apply_filter(filter, item, rest, budget);
    if (attribute && otherwise && out.kind == Value::undefined) out = *otherwise;
    mapped.push_back(std::move(out));
  }
  return Value::make_list(std::move(mapped));
}

// What sort, unique and dictsort compare: without case unless asked.
Value sort_key(const Value& value, bool case_sensitive) {
  return value.kind == Value::text && !case_sensitive ? Value::of(change_case(value.as_text(), "lower"))
                                                      : value;
}

bool flag_argument(const Arguments& arguments, size_t index, std::string_view name) {
  const Value* value = arguments.get(index, name);
  return value != nullptr && truthy(*value);
}

void sort_values(std::vector<std::pair<Value, Value>>& keyed, bool descending, Budget& budget) {
  budget.charge(keyed.size() * 16);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return descending ? compare(b.first, a.first) < 0 : compare(a.first, b.first) < 0;
  });
}

Value sort_items(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.allow("sort", 3, {"reverse", "case_sensitive", "attribute"});
  const Value* attribute = arguments.get(2, "attribute");
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : iterate(value, budget)) {
    keyed.emplace_back(sort_key(attribute ? attribute_path(item, *attribute) : item,
                                flag_argument(arguments, 1, "case_sensitive")),
                       item);
  }
  sort_values(keyed, flag_argument(arguments, 0, "reverse"), budget);
  std::vector<Value> sorted;
  for (auto& [key, item] : keyed) sorted.push_back(std::move(item));
  return Value::make_list(std::move(sorted));
}

Value sort_dict(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.allow("dictsort", 3, {"case_sensitive", "by", "reverse"});
  if (value.kind != Value::dict) fail("dictsort needs a mapping");
  const Value* by = arguments.get(1, "by");
  const std::string name = by ? text_of(*by, "dictsort").bytes : "key";
  if (name != "key" && name != "value") fail("You can only sort by either \"key\" or \"value\"");
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, item] : value.as_dict().items) {
    keyed.emplace_back(sort_key(name == "key" ? key : item, flag_argument(arguments, 0, "case_sensitive")),
                       Value::make_list({key, item}, true));
  }
  sort_values(keyed, flag_argument(arguments, 2, "reverse"), budget);
  std::vector<Value> sorted;
  for (auto& [key, item] : keyed) sorted.push_back(std::move(item));
  return Value::make_list(std::move(sorted));
}

Value unique_items(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.allow("unique", 2, {"case_sensitive", "attribute"});
  const Value* attribute = arguments.get(1, "attribute");
  std::vector<Value> keys, kept;
  for (const Value& item : iterate(value, budget)) {
    Value key = sort_key(attribute ? attribute_path(item, *attribute) : item,
                         flag_argument(arguments, 0, "case_sensitive"));
    budget.charge(1 + keys.size());
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& seen) { return equal(seen, key); })) continue;
    keys.push_back(std::move(key));
    kept.push_back(item);
  }
  return Value::make_list(std::move(kept));
}

Value items_of(const Value& value) {
  std::vector<Value> items;
  if (value.kind == Value::undefined) return Value::make_list({});
  if (value.kind != Value::dict) fail("Can only get item pairs from a mapping.");
  for (const auto& [key, item] : value.as_dict().items) items.push_back(Value::make_list({key, item}, true));
  return Value::make_list(std::move(items));
}

// --- filters over numbers and texts

Value to_int(const Value& value, const Arguments& arguments) {
  arguments.allow("int", 2, {"default", "base"});
  if (arguments.get(1, "base"))
    throw Error{Error::unsupported, "filter 'int' with a base is outside the subset"};
  const Value* given = arguments.get(0, "default");
  const Value otherwise = given ? *given : Value::of(int64_t{0});
  auto from_real = [&](double real) {
    return std::isfinite(real) && std::fabs(real) < 9.2e18 ? Value::of(static_cast<int64_t>(real))
                                                           : otherwise;
  };
  if (value.is_whole()) return Value::of(value.i);
  if (value.kind == Value::real) return from_real(value.d);
  if (value.kind != Value::text) return otherwise;
  const std::string text = strip(value.as_text(), nullptr, true, true).bytes;
  const size_t plus = text.starts_with('+');
  int64_t whole = 0;
  double real = 0;
  const char *first = text.data() + plus, *last = text.data() + text.size();
  if (first != last && std::from_chars(first, last, whole).ptr == last) return Value::of(whole);
  if (first != last && std::from_chars(first, last, real).ptr == last) return from_real(real);
  return otherwise;
}

Value to_float(const Value& value, const Arguments& arguments) {
  arguments.allow("float", 1, {"default"});
  const Value* given = arguments.get(0, "default");
  const Value otherwise = given ? *given : Value::of(0.0);
  if (value.is_number()) return Value::of(value.number());
  if (value.kind != Value::text) return otherwise;
  const std::string text = strip(value.as_text(), nullptr, true, true).bytes;
  const size_t plus = text.starts_with('+');
  double real = 0;
  const char *first = text.data() + plus, *last = text.data() + text.size();
  return first != last && std::from_chars(first, last, real).ptr == last ? Value::of(real) : otherwise;
}

Value round_number(const Value& value, const Arguments& arguments) {
  arguments.allow("round", 2, {"precision", "method"});
  const Value *precision = arguments.get(0, "precision"), *method = arguments.get(1, "method");
  const int64_t digits = precision ? whole_of(*precision, "round") : 0;
  const std::string how = method ? text_of(*method, "round").bytes : "common";
  if (!value.is_number()) fail(fmt::format("type {} doesn't define __round__ method", type_name(value)));
  if (how != "common" && how != "ceil" && how != "floor") fail("method must be common, ceil or floor");
  if (digits < 0 || digits > 15)
    throw Error{Error::unsupported, "filter 'round' with such a precision is outside the subset"};
  if (how != "common") {
    const double scale = std::pow(10.0, static_cast<double>(digits));
    return Value::of(
        (how == "ceil" ? std::ceil(value.number() * scale) : std::floor(value.number() * scale)) / scale);
  }
  if (value.is_whole()) return Value::of(value.i);
  if (!std::isfinite(value.d)) return value;
  // Printing rounds the exact binary value, half to even, as Python's round() does.
  const std::string printed = fmt::format("{:.{}f}", value.d, digits);
  double rounded = 0;
  std::from_chars(printed.data(), printed.data() + printed.size(), rounded);
  return Value::of(rounded);
}

Value indent(const Text& text, const Arguments& arguments, Budget& budget) {
  arguments.allow("indent", 3, {"width", "first", "blank"});
  const Value* width = arguments.get(0, "width");
  Text pad;
  if (width && width->kind == Value::text) {
    pad = width->as_text();
  } else {
    const int64_t spaces = width ? whole_of(*width, "indent") : 4;
    if (spaces > 1000) throw Error{Error::limit, "filter 'indent' has a width above 1000"};
    pad.append(std::string(std::max<int64_t>(spaces, 0), ' '), kTemplate);
  }
  const bool blank = flag_argument(arguments, 2, "blank");
  // jinja2 adds a line end and splits again, so that a final one counts.
  Text source = text, newline;
  newline.append("\n", kTemplate);
  source.append(newline);
  const Value lines = split_lines(source, budget);
  Text out;
  if (flag_argument(arguments, 1, "first")) out.append(pad);
  bool first = true;
  for (const Value& line : lines.as_list().items) {
    budget.charge(1 + pad.bytes.size() / 16);
    budget.check_text(out.bytes.size() + pad.bytes.size() + line.as_text().bytes.size() + 1);
    if (!first) {
      out.append(newline);
      if (blank || !line.as_text().bytes.empty()) out.append(pad);
    }
    out.append(line.as_text());
    first = false;
  }
  return Value::of(std::move(out));
}

Value json_filter(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.allow("tojson", 1, {"indent", "ensure_ascii", "separators", "sort_keys"});
  for (const char* name : {"ensure_ascii", "separators", "sort_keys"}) {
    const Value* given = arguments.get(99, name);
    if (given && truthy(*given))
      throw Error{Error::unsupported, fmt::format("filter 'tojson' with {} is outside the subset", name)};
  }
  // transformers' tojson takes ensure_ascii first; only keywords are unambiguous.
  if (!arguments.positional.empty())
    throw Error{Error::unsupported, "filter 'tojson' with a positional argument is outside the subset"};
  const Value* indent = arguments.get(99, "indent");
  int64_t width = -1;
  if (indent && indent->kind != Value::none) width = std::max<int64_t>(whole_of(*indent, "tojson"), 0);
  if (width > 100) throw Error{Error::limit, "filter 'tojson' has an indent above 100"};
  const std::string json = to_json(value, static_cast<int>(width));
  budget.charge(json.size() / 16);
  budget.check_text(json.size());
  return Value::of(json, kData);
}

Value sum_items(const Value& value, const Arguments& arguments, Budget& budget) {
  arguments.allow("sum", 1, {"attribute"});
  const Value* attribute = arguments.get(0, "attribute");
  double real = 0;
  int64_t whole = 0;
  bool is_real = false;
  for (const Value& item : iterate(value, budget)) {
    const Value number = attribute ? attribute_path(item, *attribute) : item;
    if (!number.is_number())
      fail(fmt::format("unsupported operand type(s) for +: 'int' and '{}'", type_name(number)));
    if (number.is_whole() && __builtin_add_overflow(whole, number.i, &whole))
      throw Error{Error::limit, "an integer needs more than 63 bits"};
    if (number.kind == Value::real) {
      real += number.d;
      is_real = true;
    }
  }
  return is_real ? Value::of(real + static_cast<double>(whole)) : Value::of(whole);
}

Value make_method(const Value& self, std::string_view name) {
  Callable callable;
  callable.name = name;
  callable.self = self;
  callable.method = true;
  return Value::make_callable(std::move(callable));
}

}  // namespace

bool is_filter(std::string_view name) {
  return has(kFilters, name);
}
bool is_test(std::string_view name) {
  return has(kTests, name);
}
bool is_method(std::string_view name) {
  return has(kMethods, name);
}

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments, Budget& budget) {
  budget.charge(1 + (value.kind == Value::text ? value.as_text().bytes.size() / 16 : 0));
  if (name == "default" || name == "d") {
    arguments.allow(name, 2, {"default_value", "boolean"});
    const Value* otherwise = arguments.get(0, "default_value");
    const bool falsy = flag_argument(arguments, 1, "boolean") && !truthy(value);
    return value.kind == Value::undefined || falsy ? (otherwise ? *otherwise : Value::of("")) : value;
  }
  if (name == "trim") {
    arguments.allow(name, 1, {"chars"});
    return Value::of(strip(to_text(value), arguments.get(0, "chars"), true, true));
  }
  if (name == "tojson") return json_filter(value, arguments, budget);
  if (name == "join") {
    arguments.allow(name, 2, {"d", "attribute"});
    const Value *separator = arguments.get(0, "d"), *attribute = arguments.get(1, "attribute");
    std::vector<Value> items = iterate(value, budget);
    if (attribute) {
      for (Value& item : items) item = attribute_path(item, *attribute);
    }
    return join(items, separator ? to_text(*separator) : Text(), false, budget);
  }
  if (name == "int") return to_int(value, arguments);
  if (name == "float") return to_float(value, arguments);
  if (name == "round") return round_number(value, arguments);
  if (name == "replace") {
    arguments.allow(name, 3, {"old", "new", "count"});
    const Value *from = arguments.get(0, "old"), *to = arguments.get(1, "new"),
                *count = arguments.get(2, "count");
    if (!from || !to) fail("replace needs two texts");
    return Value::of(replace(to_text(value), to_text(*from), to_text(*to),
                             count && count->kind != Value::none ? whole_of(*count, "replace") : -1, budget));
  }
  if (name == "map") return map_items(value, arguments, budget);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    return filter_items(name, value, arguments, budget);
  }
  if (name == "sort") return sort_items(value, arguments, budget);
  if (name == "dictsort") return sort_dict(value, arguments, budget);
  if (name == "unique") return unique_items(value, arguments, budget);
  if (name == "indent") return indent(to_text(value), arguments, budget);
  if (name == "sum") return sum_items(value, arguments, budget);

  arguments.allow(name, 0);
  if (name == "length" || name == "count") return Value::of(length_of(value));
  if (name == "list") return Value::make_list(iterate(value, budget));
  if (name == "string") return Value::of(to_text(value));
  if (name == "upper" || name == "lower" || name == "title" || name == "capitalize") {
    return Value::of(change_case(to_text(value), name == "title" ? "title filter" : name));
  }
  if (name == "items") return items_of(value);
  if (name == "abs") {
    if (!value.is_number()) fail(fmt::format("bad operand type for abs(): '{}'", type_name(value)));
    if (value.kind == Value::real) return Value::of(std::fabs(value.d));
    if (value.i == INT64_MIN) throw Error{Error::limit, "an integer needs more than 63 bits"};
    return Value::of(value.i < 0 ? -value.i : value.i);
  }
  if (name == "safe")
    throw Error{Error::unsupported, "filter 'safe' inside an expression is outside the subset"};
  if (name == "reverse" && value.kind == Value::text) {
    const std::vector<size_t> at = character_offsets(value.as_text().bytes);
    Text out;
    for (size_t i = at.size() - 1; i > 0; --i) out.append(value.as_text().slice(at[i - 1], at[i]));
    return Value::of(std::move(out));
  }
  std::vector<Value> items = iterate(value, budget);
  if (name == "reverse") {
    std::reverse(items.begin(), items.end());
    return Value::make_list(std::move(items));
  }
  // first, last
  if (items.empty()) return Value::make_undefined("the " + name + " item of an empty sequence");
  return name == "first" ? items.front() : items.back();
}

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments) {
  auto other = [&]() -> const Value& {
    if (arguments.positional.size() != 1) fail(fmt::format("test '{}' needs one argument", name));
    return arguments.positional[0];
  };
  if (name == "eq" || name == "equalto" || name == "==") return equal(value, other());
  if (name == "ne" || name == "!=") return !equal(value, other());
  if (name == "lt" || name == "lessthan" || name == "<") return compare(value, other()) < 0;
  if (name == "le") return compare(value, other()) <= 0;
  if (name == "gt" || name == "greaterthan" || name == ">") return compare(value, other()) > 0;
  if (name == "ge") return compare(value, other()) >= 0;
  if (name == "in") return contains(other(), value);
  if (name == "sameas") {
    const Value& right = other();
    return value.kind == right.kind && (value.object ? value.object == right.object : equal(value, right));
  }
  if (name == "divisibleby") {
    const int64_t divisor = whole_of(other(), name), number = whole_of(value, name);
    if (divisor == 0) fail("integer modulo by zero");
    return divisor == -1 || number % divisor == 0;
  }
  arguments.allow(name, 0);
  const Value::Kind kind = value.kind;
  if (name == "defined") return kind != Value::undefined;
  if (name == "undefined") return kind == Value::undefined;
  if (name == "none") return kind == Value::none;
  if (name == "string") return kind == Value::text;
  if (name == "mapping") return kind == Value::dict;
  if (name == "sequence" || name == "iterable") {
    return kind == Value::text || kind == Value::list || kind == Value::dict || kind == Value::undefined;
  }
  if (name == "number") return value.is_number();
  if (name == "integer") return kind == Value::integer;
  if (name == "float") return kind == Value::real;
  if (name == "boolean") return kind == Value::boolean;
  if (name == "true" || name == "false") return kind == Value::boolean && (value.i != 0) == (name == "true");
  if (name == "callable") return kind == Value::callable;
  if (name == "odd") return whole_of(value, name) % 2 != 0;
  if (name == "even") return whole_of(value, name) % 2 == 0;
  // upper, lower: some cased character, and none of the other case
  const Text text = to_text(value);
  const Text upper = change_case(text, "upper"), lower = change_case(text, "lower");
  return upper.bytes != lower.bytes && text.bytes == (name == "upper" ? upper : lower).bytes;
}

Value get_attribute(const Value& target, std::string_view name) {
  switch (target.kind) {
    case Value::undefined:
      fail(fmt::format("'{}' is undefined",
                       target.object ? *static_cast<std::string*>(target.object.get()) : ""));
    case Value::dict: {
      if (has(kDictMethods, name)) return make_method(target, name);
      const Value* found = target.as_dict().find(name);
      if (found) return *found;
      break;
    }
    case Value::name_space:
      for (const auto& [known, value] : target.as_namespace().items) {
        if (known == name) return value;
      }
      break;
    case Value::text:
      if (has(kTextMethods, name) || name == "removesuffix") return make_method(target, name);
      break;
    case Value::list:
      if (has(kListMethods, name)) return make_method(target, name);
      break;
    default:
      break;
  }
  return Value::make_undefined(std::string(name));
}

Value get_item(const Value& target, const Value& key) {
  switch (target.kind) {
    case Value::undefined:
      fail(fmt::format("'{}' is undefined",
                       target.object ? *static_cast<std::string*>(target.object.get()) : ""));
    case Value::dict:
      if (const Value* found = target.as_dict().find(key)) return *found;
      break;
    case Value::text:
    case Value::list: {
      if (!key.is_whole()) break;
      const bool text = target.kind == Value::text;
      const std::vector<size_t> at = text ? character_offsets(target.as_text().bytes) : std::vector<size_t>();
      const int64_t length =
          text ? static_cast<int64_t>(at.size()) - 1 : static_cast<int64_t>(target.as_list().items.size());
      const int64_t index = key.i < 0 ? key.i + length : key.i;
      if (index < 0 || index >= length) return Value::make_undefined("item " + std::to_string(key.i));
      if (!text) return target.as_list().items[index];
      return Value::of(target.as_text().slice(at[index], at[index + 1]));
    }
    default:
      break;
  }
  if (key.kind == Value::text) return get_attribute(target, key.as_text().bytes);
  return Value::make_undefined("an item");
}

std::vector<Value> iterate(const Value& value, Budget& budget) {
  std::vector<Value> items;
  switch (value.kind) {
    case Value::undefined:
      return items;
    case Value::list:
      budget.charge(value.as_list().items.size());
      return value.as_list().items;
    case Value::dict:
      budget.charge(value.as_dict().items.size());
      for (const auto& [key, item] : value.as_dict().items) items.push_back(key);
      return items;
    case Value::text: {
      const Text& text = value.as_text();
      const std::vector<size_t> at = character_offsets(text.bytes);
      budget.charge(at.size());
      for (size_t i = 0; i + 1 < at.size(); ++i) items.push_back(Value::of(text.slice(at[i], at[i + 1])));
      return items;
    }
    default:
      fail(fmt::format("'{}' object is not iterable", type_name(value)));
  }
}

bool contains(const Value& container, const Value& item) {
  switch (container.kind) {
    case Value::undefined:
      return false;
    case Value::text: {
      if (item.kind != Value::text)
        fail(fmt::format("'in <string>' requires string as left operand, not {}", type_name(item)));
      return container.as_text().bytes.find(item.as_text().bytes) != std::string::npos;
    }
    case Value::list: {
      const auto& items = container.as_list().items;
      return std::any_of(items.begin(), items.end(), [&](const Value& other) { return equal(other, item); });
    }
    case Value::dict:
      return container.as_dict().find(item) != nullptr;
    default:
      fail(fmt::format("argument of type '{}' is not iterable", type_name(container)));
  }
}

int64_t length_of(const Value& value) {
  switch (value.kind) {
    case Value::undefined:
      return 0;
    case Value::text:
      return static_cast<int64_t>(character_offsets(value.as_text().bytes).size()) - 1;
    case Value::list:
      return static_cast<int64_t>(value.as_list().items.size());
    case Value::dict:
      return static_cast<int64_t>(value.as_dict().items.size());
    default:
      fail(fmt::format("object of type '{}' has no len()", type_name(value)));
  }
}

Value call_method(const std::string& name, const Value& self, const Arguments& arguments, Budget& budget) {
  budget.charge(1 + (self.kind == Value::text ? self.as_text().bytes.size() / 16 : 0));
  const auto& given = arguments.positional;
  if (self.kind == Value::dict) {
    if (name == "get") {
      arguments.allow(name, 2);
      if (given.empty()) fail("get expected at least 1 argument, got 0");
      const Value* found = self.as_dict().find(given[0]);
      return found ? *found : given.size() > 1 ? given[1] : Value::make_none();
    }
    arguments.allow(name, 0);
    budget.charge(self.as_dict().items.size());
    if (name == "items") return items_of(self);
    std::vector<Value> out;
    for (const auto& [key, value] : self.as_dict().items) out.push_back(name == "keys" ? key : value);
    return Value::make_list(std::move(out));
  }
  if (self.kind == Value::list) {
    arguments.allow(name, 1);
    if (given.size() != 1) fail(fmt::format("{}() takes exactly one argument", name));
    const auto& items = self.as_list().items;
    budget.charge(items.size());
    if (name == "count") {
      return Value::of(static_cast<int64_t>(
          std::count_if(items.begin(), items.end(), [&](auto& v) { return equal(v, given[0]); })));
    }
    for (size_t i = 0; i < items.size(); ++i) {
      if (equal(items[i], given[0])) return Value::of(static_cast<int64_t>(i));
    }
    fail("the value is not in the list");
  }

  const Text& text = self.as_text();
  auto need = [&](size_t index) -> const Text& {
    if (index >= given.size()) fail(fmt::format("{}() needs {} argument(s)", name, index + 1));
    return text_of(given[index], name);
  };
  if (name == "startswith" || name == "endswith") {
    arguments.allow(name, 1);
    auto matches = [&](const Value& affix) {
      const std::string& part = text_of(affix, name).bytes;
      return name == "startswith" ? text.bytes.starts_with(part) : text.bytes.ends_with(part);
    };
    if (!given.empty() && given[0].kind == Value::list && given[0].as_list().tuple) {
      const auto& parts = given[0].as_list().items;
      return Value::of(std::any_of(parts.begin(), parts.end(), matches));
    }
    need(0);
    return Value::of(matches(given[0]));
  }
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    arguments.allow(name, 1);
    return Value::of(strip(text, given.empty() ? nullptr : &given[0], name != "rstrip", name != "lstrip"));
  }
  if (name == "split" || name == "rsplit") {
    arguments.allow(name, 2, {"sep", "maxsplit"});
    const Value* limit = arguments.get(1, "maxsplit");
    return split(text, arguments.get(0, "sep"), limit ? whole_of(*limit, name) : -1, name == "rsplit",
                 budget);
  }
  if (name == "replace") {
    arguments.allow(name, 3, {"count"});
    const Value* count = arguments.get(2, "count");
    need(0);
    return Value::of(replace(text, need(0), need(1), count ? whole_of(*count, name) : -1, budget));
  }
  if (name == "join") {
    arguments.allow(name, 1);
    if (given.empty()) fail("join() takes exactly one argument (0 given)");
    return join(iterate(given[0], budget), text, true, budget);
  }
  if (name == "removeprefix" || name == "removesuffix") {
    arguments.allow(name, 1);
    const std::string& affix = need(0).bytes;
    const size_t size = text.bytes.size();
    if (name == "removeprefix")
      return text.bytes.starts_with(affix) ? Value::of(text.slice(affix.size(), size)) : self;
    return text.bytes.ends_with(affix) ? Value::of(text.slice(0, size - affix.size())) : self;
  }
  if (name == "count") {
    arguments.allow(name, 1);
    const std::string& part = need(0).bytes;
    if (part.empty()) return Value::of(length_of(self) + 1);
    int64_t count = 0;
    for (size_t i = text.bytes.find(part); i != std::string::npos; i = text.bytes.find(part, i + part.size()))
      ++count;
    return Value::of(count);
  }
  if (name == "find") {
    arguments.allow(name, 1);
    const size_t found = text.bytes.find(need(0).bytes);
    if (found == std::string::npos) return Value::of(int64_t{-1});
    return Value::of(
        static_cast<int64_t>(character_offsets(std::string_view(text.bytes).substr(0, found)).size()) - 1);
  }
  arguments.allow(name, 0);
  if (name == "isdigit") {
    for (uint32_t c : code_points(text.bytes)) {
      if (c > 0x7F)
        throw Error{Error::unsupported, "isdigit() of a character that is not ASCII is outside the subset"};
      if (c < '0' || c > '9') return Value::of(false);
    }
    return Value::of(!text.bytes.empty());
  }
  if (name == "splitlines") return split_lines(text, budget);
  return Value::of(change_case(text, name));
}

}  // namespace vivace::model::jinja
