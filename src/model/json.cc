#include "src/model/json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "src/core/error.h"

namespace vivace::model {

namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr size_t kLongestKey = 80, kLongestPath = 200, kLongestReason = 240;  // in messages

struct Refused : std::exception {
  Refused(JsonFault fault, std::string why) : fault(std::move(fault)), why(std::move(why)) {}
  JsonFault fault;
  std::string why;  ///< goes after the path
};

// Watches a parse: the parser itself keeps the last of two equal keys, any depth and any number of elements, and does not say where a
// number stands that is too large.
class Guard {
 public:
  explicit Guard(int64_t max_elements) : max_elements_(max_elements) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxDepth)
          throw Refused(fault(JsonFault::Kind::depth, 1),  // a path of all levels helps nobody
                        fmt::format("is nested deeper than {} levels", kMaxDepth));
        count_in_list(false);
        open_.push_back({.list = event == json::parse_event_t::array_start});
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        open_.pop_back();
        break;
      case json::parse_event_t::key: {
        Open& object = open_.back();
        const auto [key, is_new] = object.keys.insert(parsed.get_ref<const std::string&>());
        if (!is_new) {
          JsonFault twice = fault(JsonFault::Kind::key, open_.size() - 1);
          if (open_.size() == 1) twice.field = shortened(*key);
          throw Refused(std::move(twice), fmt::format("has the key '{}' twice", shortened(*key)));
        }
        object.key = &*key;
        count(object, false);
        break;
      }
      case json::parse_event_t::value:
        count_in_list(parsed.is_number());
        break;
    }
    return true;
  }

  /// Of the element that comes next, `levels` containers deep; of the container itself with one level fewer.
  JsonFault fault(JsonFault::Kind kind, size_t levels) const {
    const std::string* field = levels > 0 ? open_.front().key : nullptr;
    return {
        .kind = kind, .path = path(levels), .field = field != nullptr ? shortened(*field) : std::string()};
  }
  size_t levels() const { return open_.size(); }

 private:
  struct Open {
    bool list = false;
    int64_t elements = 0;
    std::set<std::string> keys = {};
    const std::string* key = nullptr;  ///< the last
  };

  static std::string shortened(const std::string& key) {
    return key.size() > kLongestKey ? key.substr(0, kLongestKey) + "..." : key;
  }
  void count_in_list(bool number) {
    if (!open_.empty() && open_.back().list) count(open_.back(), number);
  }
  void count(Open& container, bool number) {
    if (++container.elements <= max_elements_) return;
    JsonFault too_many = fault(JsonFault::Kind::elements, open_.size() - 1);
    too_many.list = container.list;
    too_many.of_number = number;
    throw Refused(std::move(too_many),
                  fmt::format("has more than {} elements, which is the limit", max_elements_));
  }
  std::string path(size_t levels) const {
    std::string path;
    for (size_t i = 0; i < levels; ++i) {
      if (!open_[i].list && open_[i].key == nullptr) break;  // before its first key
      if (open_[i].list)  // a container is counted when it begins, a value when it was read
        path += fmt::format("[{}]", open_[i].elements - (i + 1 < open_.size() ? 1 : 0));
      else
        path += (path.empty() ? "" : ".") + shortened(*open_[i].key);
    }
    return path.size() <= kLongestPath ? path : "..." + path.substr(path.size() - kLongestPath);
  }

  const int64_t max_elements_;
  std::vector<Open> open_;
};

constexpr size_t kLongestExcerpt = 60;

/// What stands between the quotation marks of a message of the parser, shortened.
std::string quoted(std::string_view message) {
  const size_t begin = message.find('\'') + 1, end = message.rfind('\'');
  std::string text(message.substr(begin, end > begin ? end - begin : 0));
  return text.size() > kLongestExcerpt ? text.substr(0, kLongestExcerpt) + "..." : text;
}

}  // namespace

Result<json> parse_json_object(std::string_view place, std::string_view text, int64_t max_elements,
                               JsonFault* fault) {
  constexpr int kNumberOverflow = 406;  // of the parser
  Guard guard(max_elements);
  const auto refused = [&](const Refused& refusal) {
    if (fault != nullptr) *fault = refusal.fault;
    const Code code =
        refusal.fault.kind == JsonFault::Kind::elements ? Code::resource_exhausted : Code::invalid_argument;
    return error(code, "{}: {}{}{}", place, refusal.fault.path, refusal.fault.path.empty() ? "" : " ",
                 refusal.why);
  };
  if (text.find_first_not_of(" \t\r\n") == text.npos)
    return refused({{.kind = JsonFault::Kind::empty}, "is empty, needs a JSON object"});
  if (const size_t nul = text.find('\0'); nul != text.npos)  // where the parser would take the text to end
    return refused(
        {{.kind = JsonFault::Kind::syntax}, fmt::format("has a NUL at byte {}, which is no JSON", nul)});
  try {
    // The parser copies its callback, which is why the guard is referred to.
    json value = json::parse(text, [&guard](int depth, json::parse_event_t event, json& parsed) {
      return guard(depth, event, parsed);
    });
    if (!value.is_object())
      return invalid_argument("{}: is {}, needs a JSON object", place, value.type_name());
    return value;
  } catch (const json::exception& e) {
    if (e.id == kNumberOverflow)
      return refused({guard.fault(JsonFault::Kind::number, guard.levels()),
                      fmt::format("is {}, needs a number that float64 holds: at most 1.8e308 in magnitude",
                                  quoted(e.what()))});
    // The library's text quotes the input; a long or binary quotation helps nobody.
    const std::string_view what(e.what());
    const std::string_view context = what.substr(0, what.find(" - "));
    const bool value = context.find("while parsing value") != context.npos;  // not between values
    constexpr std::string_view kBegin = "parse error at ";  // behind the library's name for it
    const size_t begin = what.find(kBegin);
    const std::string_view why = begin == what.npos ? what : what.substr(begin + kBegin.size());
    return refused({guard.fault(JsonFault::Kind::syntax, value ? guard.levels() : 0),
                    fmt::format("is not valid JSON: {}", why.substr(0, kLongestReason))});
  } catch (const Refused& refusal) {
    return refused(refusal);
  }
}

std::string excerpt(const json& value) {
  if (value.is_structured())
    return fmt::format("{} with {} elements", value.is_array() ? "a list" : "an object", value.size());
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kLongestExcerpt) text = text.substr(0, kLongestExcerpt) + "...";
  return text;
}

const json* JsonFields::find(const char* field) const {
  const auto it = object_->find(field);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::has(const char* field) const {
  return find(field) != nullptr;
}

void JsonFields::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

int64_t JsonFields::integer(const char* field, int64_t min, int64_t max, std::optional<int64_t> fallback) {
  const json* value = find(field);
  if (value == nullptr) {
    if (!fallback)
      fail(invalid_argument("{}: {} is missing, needs a whole number in [{}, {}]", place_, field, min, max));
    return fallback.value_or(min);
  }
  // Unsigned values above 2^63 would turn negative in get<int64_t>().
  const bool fits =
      value->is_number_integer() &&
      !(value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (!fits || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    fail(invalid_argument("{}: {} is {}, needs a whole number in [{}, {}]", place_, field, excerpt(*value),
                          min, max));
    return min;
  }
  return value->get<int64_t>();
}

int64_t JsonFields::integer(std::initializer_list<const char*> names, int64_t min, int64_t max,
                            std::optional<int64_t> fallback) {
  const char* chosen = nullptr;
  int64_t result = 0;
  for (const char* name : names) {
    if (!has(name)) continue;
    const int64_t value = integer(name, min, max);
    if (chosen == nullptr) {
      chosen = name;
      result = value;
    } else if (value != result) {
      fail(invalid_argument("{}: {} is {}, but {} is {}; they mean the same", place_, chosen, result, name,
                            value));
    }
  }
  return chosen != nullptr ? result : integer(*names.begin(), min, max, fallback);
}

double JsonFields::number(const char* field, std::optional<double> fallback) {
  const json* value = find(field);
  if (value == nullptr) {
    if (!fallback) fail(invalid_argument("{}: {} is missing, needs a number", place_, field));
    return fallback.value_or(0);
  }
  if (!value->is_number()) {
    fail(invalid_argument("{}: {} is {}, needs a number", place_, field, excerpt(*value)));
    return fallback.value_or(0);
  }
  return value->get<double>();
}

bool JsonFields::boolean(const char* field, bool fallback) {
  const json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    fail(invalid_argument("{}: {} is {}, needs true or false", place_, field, excerpt(*value)));
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonFields::text(const char* field, std::string_view fallback) {
  const json* value = find(field);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) {
    fail(invalid_argument("{}: {} is {}, needs a string", place_, field, excerpt(*value)));
    return std::string(fallback);
  }
  return value->get<std::string>();
}

}  // namespace vivace::model
