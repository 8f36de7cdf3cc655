#include "src/model/jinja_value.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/core/json_string.h"
#include "src/model/utf8.h"

namespace vivace::model::jinja {
namespace {

Value scalar(Value::Kind kind, int64_t i, double d = 0) {
  Value value;
  value.kind = kind;
  value.i = i;
  value.d = d;
  return value;
}

Value held(Value::Kind kind, std::shared_ptr<void> pointer) {
  Value value;
  value.kind = kind;
  value.object = std::move(pointer);
  return value;
}

void add_depth(int& depth, bool& shareable, const Value& item) {
  depth = std::max(depth, item.depth() + 1);
  shareable = shareable && item.shareable();
  if (depth > kMaxContainerDepth) {
    throw Error{Error::limit, fmt::format("lists and mappings nest more than {} deep", kMaxContainerDepth)};
  }
}

// The shortest digits that read back as the same double, laid out as Python does: positional for exponents -4..15.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, end - buffer);
  std::string out;
  if (text[0] == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits(text.substr(0, e));
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  int exponent = 0;
  const char* first = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(first, text.data() + text.size(), exponent);
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits.substr(0, 1);
    if (count > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(-exponent - 1, '0') + digits;
  if (exponent + 1 >= count) return out + digits + std::string(exponent + 1 - count, '0') + ".0";
  return out + digits.substr(0, exponent + 1) + "." + digits.substr(exponent + 1);
}

bool printable(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return c == ' ';
    default:
      return true;
  }
}

std::string text_repr(std::string_view text) {
  const bool use_double = text.find('\'') != text.npos && text.find('"') == text.npos;
  const char quote = use_double ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    const uint32_t c = step.value;
    if (c == static_cast<uint32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (printable(c)) {
      out += text.substr(i, step.length);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", c);
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", c);
    } else {
      out += fmt::format("\\U{:08x}", c);
    }
    i += step.length;
  }
  return out + quote;
}

std::string json_float(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return float_repr(value);
}

// Recursion is bounded by kMaxContainerDepth.
void write_json(const Value& value, int indent, int level, std::string& out) {
  auto line = [&](int at) {
    if (indent >= 0) out += "\n" + std::string(static_cast<size_t>(indent) * at, ' ');
  };
  const char* between = indent >= 0 ? "," : ", ";
  switch (value.kind) {
    case Value::none:
      out += "null";
      break;
    case Value::boolean:
      out += value.i ? "true" : "false";
      break;
    case Value::integer:
      out += std::to_string(value.i);
      break;
    case Value::real:
      out += json_float(value.d);
      break;
    case Value::text:
      append_json_string(out, value.as_text().bytes);
      break;
    case Value::list: {
      out += '[';
      bool first = true;
      for (const Value& item : value.as_list().items) {
        if (!first) out += between;
        line(level + 1);
        write_json(item, indent, level + 1, out);
        first = false;
      }
      if (!first) line(level);
      out += ']';
      break;
    }
    case Value::dict: {
      out += '{';
      bool first = true;
      for (const auto& [key, item] : value.as_dict().items) {
        if (!first) out += between;
        line(level + 1);
        // JSON has only string keys; Python spells the others as it would their values.
        if (key.kind == Value::text) {
          append_json_string(out, key.as_text().bytes);
        } else {
          std::string spelled;
          write_json(key, -1, 0, spelled);
          append_json_string(out, spelled);
        }
        out += ": ";
        write_json(item, indent, level + 1, out);
        first = false;
      }
      if (!first) line(level);
      out += '}';
      break;
    }
    default:
      fail(fmt::format("Object of type {} is not JSON serializable", type_name(value)));
  }
}

Value from_json_at(const nlohmann::ordered_json& json, char mark, int depth) {
  using Type = nlohmann::ordered_json::value_t;
  if (depth > kMaxContainerDepth) {
    throw Error{Error::limit, fmt::format("a variable nests more than {} deep", kMaxContainerDepth)};
  }
  switch (json.type()) {
    case Type::boolean:
      return Value::of(json.get<bool>());
    case Type::number_integer:
      return Value::of(json.get<int64_t>());
    case Type::number_unsigned: {
      const uint64_t value = json.get<uint64_t>();
      if (value > INT64_MAX)
        throw Error{Error::limit, fmt::format("the integer {} has more than 63 bits", value)};
      return Value::of(static_cast<int64_t>(value));
    }
    case Type::number_float:
      return Value::of(json.get<double>());
    case Type::string: {
      const auto& text = json.get_ref<const std::string&>();
      return Value::of(is_valid_utf8(text) ? text : replace_invalid_utf8(text), mark);
    }
    case Type::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json_at(item, mark, depth + 1));
      return Value::make_list(std::move(items));
    }
    case Type::object: {
      std::vector<std::pair<Value, Value>> items;
      items.reserve(json.size());
      for (const auto& [key, item] : json.items()) {
        items.emplace_back(Value::of(is_valid_utf8(key) ? key : replace_invalid_utf8(key), mark),
                           from_json_at(item, mark, depth + 1));
      }
      return Value::make_dict(std::move(items));
    }
    default:
      return Value::make_none();
  }
}

}  // namespace

void fail(std::string message) {
  throw Error{Error::runtime, std::move(message)};
}

Value Value::of(bool value) {
  return scalar(boolean, value);
}
Value Value::of(int64_t value) {
  return scalar(integer, value);
}
Value Value::of(double value) {
  return scalar(real, 0, value);
}
Value Value::of(Text value) {
  return held(text, std::make_shared<Text>(std::move(value)));
}
Value Value::of(std::string_view value, char mark) {
  return of(Text{std::string(value), std::string(value.size(), mark)});
}
Value Value::make_none() {
  return scalar(none, 0);
}
Value Value::make_undefined(std::string name) {
  return held(undefined, std::make_shared<std::string>(std::move(name)));
}

Value Value::make_list(std::vector<Value> items, bool tuple) {
  auto made = std::make_shared<List>();
  for (const Value& item : items) add_depth(made->depth, made->shareable, item);
  made->items = std::move(items);
  made->tuple = tuple;
  return held(list, std::move(made));
}

Value Value::make_dict(std::vector<std::pair<Value, Value>> items) {
  auto made = std::make_shared<Dict>();
  for (const auto& [key, item] : items) add_depth(made->depth, made->shareable, item);
  made->items = std::move(items);
  return held(dict, std::move(made));
}

Value Value::make_callable(Callable made) {
  return held(callable, std::make_shared<Callable>(std::move(made)));
}

bool Value::shareable() const {
  switch (kind) {
    case name_space:
      return false;
    case list:
      return as_list().shareable;
    case dict:
      return as_dict().shareable;
    case callable:
      return as_callable().self.shareable();
    default:
      return true;
  }
}

int Value::depth() const {
  switch (kind) {
    case list:
      return as_list().depth;
    case dict:
      return as_dict().depth;
    case callable:
      return as_callable().self.depth() + 1;
    default:
      return 0;
  }
}

const Value* Dict::find(const Value& key) const {
  for (const auto& [name, value] : items) {
    if (equal(name, key)) return &value;
  }
  return nullptr;
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items) {
    if (name.kind == Value::text && name.as_text().bytes == key) return &value;
  }
  return nullptr;
}

bool truthy(const Value& value) {
  switch (value.kind) {
    case Value::undefined:
    case Value::none:
      return false;
    case Value::boolean:
    case Value::integer:
      return value.i != 0;
    case Value::real:
      return value.d != 0;
    case Value::text:
      return !value.as_text().bytes.empty();
    case Value::list:
      return !value.as_list().items.empty();
    case Value::dict:
      return !value.as_dict().items.empty();
    default:
      return true;
  }
}

bool equal(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    return left.is_whole() && right.is_whole() ? left.i == right.i : left.number() == right.number();
  }
  if (left.kind != right.kind) return false;
  switch (left.kind) {
    case Value::undefined:
    case Value::none:
      return true;
    case Value::text:
      return left.as_text().bytes == right.as_text().bytes;
    case Value::list: {
      const List &a = left.as_list(), &b = right.as_list();
      return a.tuple == b.tuple &&
             std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), equal);
    }
    case Value::dict: {
      const Dict &a = left.as_dict(), &b = right.as_dict();
      if (a.items.size() != b.items.size()) return false;
      return std::all_of(a.items.begin(), a.items.end(), [&](const auto& item) {
        const Value* other = b.find(item.first);
        return other != nullptr && equal(item.second, *other);
      });
    }
    default:
      return left.object == right.object;
  }
}

int compare(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    if (left.is_whole() && right.is_whole()) return left.i < right.i ? -1 : left.i > right.i;
    return left.number() < right.number() ? -1 : left.number() > right.number();
  }
  if (left.kind == Value::text && right.kind == Value::text) {
    // UTF-8 sorts as its code points do.
    const int order = left.as_text().bytes.compare(right.as_text().bytes);
    return order < 0 ? -1 : order > 0;
  }
  if (left.kind == Value::list && right.kind == Value::list &&
      left.as_list().tuple == right.as_list().tuple) {
    const auto &a = left.as_list().items, &b = right.as_list().items;
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
      if (!equal(a[i], b[i])) return compare(a[i], b[i]);
    }
    return a.size() < b.size() ? -1 : a.size() > b.size();
  }
  fail(
      fmt::format("'<' not supported between instances of '{}' and '{}'", type_name(left), type_name(right)));
}

std::string type_name(const Value& value) {
  switch (value.kind) {
    case Value::undefined:
      return "Undefined";
    case Value::none:
      return "NoneType";
    case Value::boolean:
      return "bool";
    case Value::integer:
      return "int";
    case Value::real:
      return "float";
    case Value::text:
      return "str";
    case Value::list:
      return value.as_list().tuple ? "tuple" : "list";
    case Value::dict:
      return "dict";
    case Value::name_space:
      return "Namespace";
    case Value::callable:
      return "function";
  }
  return "object";
}

Text to_text(const Value& value) {
  switch (value.kind) {
    case Value::undefined:
      return {};
    case Value::text:
      return value.as_text();
    default: {
      // What a container prints came from data as a rule; a lone number or None cannot spell anything.
      const bool container = value.kind == Value::list || value.kind == Value::dict;
      Text text;
      text.append(repr(value), container ? kData : kTemplate);
      return text;
    }
  }
}

std::string repr(const Value& value) {
  switch (value.kind) {
    case Value::undefined:
      return "Undefined";
    case Value::none:
      return "None";
    case Value::boolean:
      return value.i ? "True" : "False";
    case Value::integer:
      return std::to_string(value.i);
    case Value::real:
      return float_repr(value.d);
    case Value::text:
      return text_repr(value.as_text().bytes);
    case Value::list: {
      const List& list = value.as_list();
      std::string out(1, list.tuple ? '(' : '[');
      for (size_t i = 0; i < list.items.size(); ++i) out += (i ? ", " : "") + repr(list.items[i]);
      if (list.tuple && list.items.size() == 1) out += ',';
      return out + (list.tuple ? ')' : ']');
    }
    case Value::dict: {
      std::string out = "{";
      for (const auto& [key, item] : value.as_dict().items) {
        out += (out.size() > 1 ? ", " : "") + repr(key) + ": " + repr(item);
      }
      return out + "}";
    }
    default:
      throw Error{Error::unsupported, fmt::format("printing a {} is outside the subset", type_name(value))};
  }
}

std::string to_json(const Value& value, int indent) {
  std::string out;
  write_json(value, indent, 0, out);
  return out;
}

Value from_json(const nlohmann::ordered_json& json, char mark) {
  return from_json_at(json, mark, 1);
}

std::vector<size_t> character_offsets(std::string_view text) {
  std::vector<size_t> offsets;
  offsets.reserve(text.size() + 1);
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) offsets.push_back(i);
  }
  offsets.push_back(text.size());
  return offsets;
}

bool is_space(uint32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace vivace::model::jinja
