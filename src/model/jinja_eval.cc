#include "src/model/jinja_eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

namespace vivace::model::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // as jinja2's sandbox
constexpr int kMaxDepth = 150;  // evaluations inside evaluations, through macros too; bounds the stack

[[noreturn]] void too_large() {
  throw Error{Error::limit, "an integer needs more than 63 bits"};
}

int64_t add_exactly(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_add_overflow(a, b, &result)) too_large();
  return result;
}
int64_t subtract_exactly(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_sub_overflow(a, b, &result)) too_large();
  return result;
}
int64_t multiply_exactly(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) too_large();
  return result;
}

}  // namespace

void Budget::charge(size_t amount) {
  steps -= static_cast<int64_t>(std::min<size_t>(amount, size_t{1} << 40));
  if (steps < 0) throw Error{Error::limit, "rendering takes more than 10000000 steps"};
}

void Budget::check_text(size_t bytes) const {
  if (bytes > text_bytes)
    throw Error{Error::limit, fmt::format("a text has {} bytes, limit is {}", bytes, text_bytes)};
}

// Names of one scope; the outer ones are reached through `parent`.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> names;

  Value* find_here(std::string_view name) {
    for (auto& [known, value] : names) {
      if (known == name) return &value;
    }
    return nullptr;
  }
};

namespace {

class Renderer {
 public:
  explicit Renderer(std::vector<std::pair<std::string, Value>> variables) {
    global_.names = std::move(variables);
  }

  Text run(const Block& block) {
    Text out;
    exec(block, global_, out);
    return out;
  }

 private:
  enum class Flow { normal, break_loop, continue_loop };

  struct Level {
    explicit Level(int& depth) : depth(depth) {
      if (++depth > kMaxDepth) {
        --depth;
        throw Error{Error::limit, fmt::format("evaluation nests more than {} deep", kMaxDepth)};
      }
    }
    ~Level() { --depth; }
    int& depth;
  };

  // --- statements

  Flow exec(const Block& block, Scope& scope, Text& out) {
    Level level(depth_);
    for (const auto& stmt : block) {
      budget_.charge(1);
      try {
        const Flow flow = exec(*stmt, scope, out);
        if (flow != Flow::normal) return flow;
      } catch (Error& error) {
        // The innermost statement knows the line best.
        if (!error.message.starts_with("line "))
          error.message = fmt::format("line {}: {}", stmt->line, error.message);
        throw;
      }
    }
    return Flow::normal;
  }

  void write(Text& out, const Text& text) {
    budget_.charge(text.bytes.size() / 16);
    budget_.check_text(out.bytes.size() + text.bytes.size());
    out.append(text);
  }

  Flow exec(const Stmt& stmt, Scope& scope, Text& out) {
    switch (stmt.kind) {
      case Stmt::data:
        budget_.charge(stmt.text.size() / 16);
        budget_.check_text(out.bytes.size() + stmt.text.size());
        out.append(stmt.text, kTemplate);
        return Flow::normal;
      case Stmt::output:
        write(out, to_text(eval(*stmt.expr, scope)));
        return Flow::normal;
      case Stmt::if_else:
        for (const auto& [condition, body] : stmt.branches) {
          if (!condition || truthy(eval(*condition, scope))) return exec(body, scope, out);
        }
        return Flow::normal;
      case Stmt::for_loop:
        return exec_for(stmt, scope, out);
      case Stmt::set:
        exec_set(stmt, scope);
        return Flow::normal;
      case Stmt::set_block: {
        Text text;
        Scope inner{&scope, {}};
        exec(stmt.body, inner, text);
        define(scope, stmt.targets[0], Value::of(std::move(text)));
        return Flow::normal;
      }
      case Stmt::macro: {
        Callable callable;
        callable.name = stmt.targets[0];
        callable.macro = stmt.macro_body.get();
        define(scope, stmt.targets[0], Value::make_callable(std::move(callable)));
        return Flow::normal;
      }
      case Stmt::break_loop:
        return Flow::break_loop;
      case Stmt::continue_loop:
        return Flow::continue_loop;
    }
    return Flow::normal;
  }

  // Names, attributes and keys are few, and are searched one by one; about eight take as long as one step.
  void charge_search(size_t entries) { budget_.charge(entries / 8); }

  void define(Scope& scope, std::string_view name, Value value) {
    charge_search(scope.names.size());
    if (Value* here = scope.find_here(name)) {
      *here = std::move(value);
    } else {
      scope.names.emplace_back(name, std::move(value));
    }
  }

  void assign(const std::vector<std::string>& targets, const Value& value, Scope& scope) {
    if (targets.size() == 1) return define(scope, targets[0], value);
    const std::vector<Value> items = iterate(value, budget_);
    if (items.size() != targets.size()) {
      fail(fmt::format("cannot unpack {} values into {} names", items.size(), targets.size()));
    }
    for (size_t i = 0; i < targets.size(); ++i) define(scope, targets[i], items[i]);
  }

  void exec_set(const Stmt& stmt, Scope& scope) {
    const Value value = eval(*stmt.expr, scope);
    if (stmt.attribute.empty()) return assign(stmt.targets, value, scope);
    const Value target = lookup(stmt.targets[0], scope);
    if (target.kind != Value::name_space || !target.as_namespace().assignable)
      fail("cannot assign attribute on non-namespace object");
    if (!value.shareable()) {
      throw Error{Error::unsupported, "a namespace inside a namespace is outside the subset"};
    }
    charge_search(target.as_namespace().items.size());
    for (auto& [name, item] : target.as_namespace().items) {
      if (name == stmt.attribute) {
        item = value;
        return;
      }
    }
    target.as_namespace().items.emplace_back(stmt.attribute, value);
  }

  Flow exec_for(const Stmt& stmt, Scope& scope, Text& out) {
    std::vector<Value> items = iterate(eval(*stmt.expr, scope), budget_);
    if (stmt.filter) {
      std::vector<Value> kept;
      for (Value& item : items) {
        Scope inner{&scope, {}};
        assign(stmt.targets, item, inner);
        if (truthy(eval(*stmt.filter, inner))) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty()) {
      Scope inner{&scope, {}};
      return exec(stmt.otherwise, inner, out);
    }
    const int64_t count = static_cast<int64_t>(items.size());
    for (int64_t i = 0; i < count; ++i) {
      budget_.charge(10);  // making `loop` costs about as much as ten evaluations
      Scope inner{&scope, {}};
      std::vector<std::pair<Value, Value>> loop = {
          {Value::of("index"), Value::of(i + 1)},
          {Value::of("index0"), Value::of(i)},
          {Value::of("revindex"), Value::of(count - i)},
          {Value::of("revindex0"), Value::of(count - i - 1)},
          {Value::of("first"), Value::of(i == 0)},
          {Value::of("last"), Value::of(i == count - 1)},
          {Value::of("length"), Value::of(count)},
          {Value::of("previtem"), i > 0 ? items[i - 1] : Value::make_undefined("loop.previtem")},
          {Value::of("nextitem"), i + 1 < count ? items[i + 1] : Value::make_undefined("loop.nextitem")},
      };
      define(inner, "loop", make_namespace(std::move(loop), false));
      assign(stmt.targets, items[i], inner);
      if (exec(stmt.body, inner, out) == Flow::break_loop) break;
    }
    return Flow::normal;
  }

  // `loop` is one without assignment: its items may be as deep as containers get.
  static Value make_namespace(std::vector<std::pair<Value, Value>> items, bool assignable) {
    auto made = std::make_shared<Namespace>();
    made->assignable = assignable;
    for (auto& [name, value] : items) made->items.emplace_back(name.as_text().bytes, std::move(value));
    Value value;
    value.kind = Value::name_space;
    value.object = std::move(made);
    return value;
  }

  // --- expressions

  Value lookup(const std::string& name, Scope& scope) {
    for (Scope* at = &scope; at != nullptr; at = at->parent) {
      charge_search(at->names.size());
      if (const Value* found = at->find_here(name)) return *found;
    }
    for (const char* known : {"namespace", "range", "raise_exception", "strftime_now", "dict"}) {
      if (name == known) {
        Callable callable;
        callable.name = name;
        return Value::make_callable(std::move(callable));
      }
    }
    return Value::make_undefined(name);
  }

  Arguments arguments_of(const Expr& expr, Scope& scope) {
    Arguments arguments;
    for (size_t i = 1; i < expr.args.size(); ++i) arguments.positional.push_back(eval(*expr.args[i], scope));
    for (const auto& [name, value] : expr.named) arguments.named.emplace_back(name, eval(*value, scope));
    return arguments;
  }

  std::vector<Value> eval_all(const Expr& expr, Scope& scope) {
    std::vector<Value> values;
    for (const auto& arg : expr.args) values.push_back(eval(*arg, scope));
    return values;
  }

  Value eval(const Expr& expr, Scope& scope) {
    Level level(depth_);
    budget_.charge(1);
    switch (expr.kind) {
      case Expr::constant:
        return expr.value;
      case Expr::name:
        return lookup(expr.text, scope);
      case Expr::attribute:
        return get_attribute(eval_searched(*expr.args[0], scope), expr.text);
      case Expr::subscript: {
        const Value target = eval_searched(*expr.args[0], scope);
        return get_item(target, eval(*expr.args[1], scope));
      }
      case Expr::slice:
        return eval_slice(expr, scope);
      case Expr::list:
        return Value::make_list(eval_all(expr, scope));
      case Expr::tuple:
        return Value::make_list(eval_all(expr, scope), true);
      case Expr::dict:
        return eval_dict(expr, scope);
      case Expr::unary:
        return eval_unary(expr, scope);
      case Expr::binary:
        return eval_binary(expr, scope);
      case Expr::compare:
        return Value::of(eval_compare(expr, scope));
      case Expr::concat:
        return eval_concat(expr, scope);
      case Expr::conditional:
        if (truthy(eval(*expr.args[1], scope))) return eval(*expr.args[0], scope);
        if (expr.args[2]) return eval(*expr.args[2], scope);
        return Value::make_undefined("the inline if-expression without else");
      case Expr::filter:
        return eval_filter(expr, scope);
      case Expr::test:
        return eval_test(expr, scope);
      case Expr::call:
        return eval_call(expr, scope);
    }
    return {};
  }

  // A value in which an attribute or a key is going to be searched.
  Value eval_searched(const Expr& expr, Scope& scope) {
    Value target = eval(expr, scope);
    if (target.kind == Value::name_space) charge_search(target.as_namespace().items.size());
    if (target.kind == Value::dict) charge_search(target.as_dict().items.size());
    return target;
  }

  Value eval_filter(const Expr& expr, Scope& scope) {
    const Value value = eval(*expr.args[0], scope);
    return apply_filter(expr.text, value, arguments_of(expr, scope), budget_);
  }

  Value eval_test(const Expr& expr, Scope& scope) {
    const Value value = eval(*expr.args[0], scope);
    return Value::of(apply_test(expr.text, value, arguments_of(expr, scope)));
  }

  Value eval_dict(const Expr& expr, Scope& scope) {
    std::vector<std::pair<Value, Value>> items;
    for (size_t i = 0; i + 1 < expr.args.size(); i += 2) {
      Value key = eval(*expr.args[i], scope), value = eval(*expr.args[i + 1], scope);
      if (key.kind == Value::list || key.kind == Value::dict)
        fail(fmt::format("unhashable type: '{}'", type_name(key)));
      charge_search(items.size());
      auto same =
          std::find_if(items.begin(), items.end(), [&](const auto& item) { return equal(item.first, key); });
      if (same != items.end()) {
        same->second = std::move(value);
      } else {
        items.emplace_back(std::move(key), std::move(value));
      }
    }
    return Value::make_dict(std::move(items));
  }

  Value eval_unary(const Expr& expr, Scope& scope) {
    const Value value = eval(*expr.args[0], scope);
    if (expr.text == "not") return Value::of(!truthy(value));
    if (!value.is_number())
      fail(fmt::format("bad operand type for unary {}: '{}'", expr.text, type_name(value)));
    if (expr.text == "+") return value.kind == Value::boolean ? Value::of(value.i) : value;
    if (value.kind == Value::real) return Value::of(-value.d);
    return Value::of(subtract_exactly(0, value.i));
  }

  Value eval_concat(const Expr& expr, Scope& scope) {
    Text out;
    for (const auto& arg : expr.args) write(out, to_text(eval(*arg, scope)));
    return Value::of(std::move(out));
  }

  bool eval_compare(const Expr& expr, Scope& scope) {
    Value left = eval(*expr.args[0], scope);
    for (size_t i = 0; i < expr.operators.size(); ++i) {
      Value right = eval(*expr.args[i + 1], scope);
      const std::string& op = expr.operators[i];
      bool holds;
      if (op == "==" || op == "!=") {
        holds = equal(left, right) == (op == "==");
      } else if (op == "in" || op == "not in") {
        if (right.kind == Value::text || right.kind == Value::list) budget_.charge(length_cost(right));
        if (right.kind == Value::dict) charge_search(right.as_dict().items.size());
        holds = contains(right, left) == (op == "in");
      } else if (left.is_number() && right.is_number() &&
                 (std::isnan(left.number()) || std::isnan(right.number()))) {
        holds = false;
      } else {
        const int order = compare(left, right);
        holds = op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
      }
      if (!holds) return false;
      left = std::move(right);
    }
    return true;
  }

  static size_t length_cost(const Value& value) {
    return value.kind == Value::text ? value.as_text().bytes.size() / 16 : value.as_list().items.size();
  }

  Value eval_binary(const Expr& expr, Scope& scope) {
    const std::string& op = expr.text;
    Value left = eval(*expr.args[0], scope);
    if (op == "and") return truthy(left) ? eval(*expr.args[1], scope) : left;
    if (op == "or") return truthy(left) ? left : eval(*expr.args[1], scope);
    const Value right = eval(*expr.args[1], scope);
    return arithmetic(op, left, right);
  }

  Value repeat(const Value& unit, int64_t times) {
    times = std::max<int64_t>(times, 0);
    if (unit.kind == Value::text) {
      const Text& text = unit.as_text();
      if (text.bytes.empty()) times = 0;
      if (times > 0)
        budget_.check_text(static_cast<size_t>(times) > budget_.text_bytes / text.bytes.size()
                               ? budget_.text_bytes + 1
                               : text.bytes.size() * times);
      Text out;
      budget_.charge(text.bytes.size() * times / 16 + times);
      for (int64_t i = 0; i < times; ++i) out.append(text);
      return Value::of(std::move(out));
    }
    const List& list = unit.as_list();
    if (!list.items.empty()) {
      budget_.charge(static_cast<size_t>(std::min<double>(double(times) * double(list.items.size()), 1e12)));
    } else {
      times = 0;
    }
    std::vector<Value> items;
    for (int64_t i = 0; i < times; ++i) items.insert(items.end(), list.items.begin(), list.items.end());
    return Value::make_list(std::move(items), list.tuple);
  }

  Value arithmetic(const std::string& op, const Value& left, const Value& right) {
    for (const Value* side : {&left, &right}) {
      if (side->kind == Value::undefined) {
        fail(fmt::format("{} is undefined", side->object
                                                ? "'" + *static_cast<std::string*>(side->object.get()) + "'"
                                                : std::string("a value")));
      }
    }
    if (left.is_number() && right.is_number()) return number_arithmetic(op, left, right);
    if (op == "+" && left.kind == Value::text && right.kind == Value::text) {
      Text out;
      write(out, left.as_text());
      write(out, right.as_text());
      return Value::of(std::move(out));
    }
    if (op == "+" && left.kind == Value::list && right.kind == Value::list &&
        left.as_list().tuple == right.as_list().tuple) {
      budget_.charge(left.as_list().items.size() + right.as_list().items.size());
      std::vector<Value> items = left.as_list().items;
      items.insert(items.end(), right.as_list().items.begin(), right.as_list().items.end());
      return Value::make_list(std::move(items), left.as_list().tuple);
    }
    if (op == "*" && right.is_whole() && (left.kind == Value::text || left.kind == Value::list)) {
      return repeat(left, right.i);
    }
    if (op == "*" && left.is_whole() && (right.kind == Value::text || right.kind == Value::list)) {
      return repeat(right, left.i);
    }
    if (op == "%" && left.kind == Value::text)
      throw Error{Error::unsupported, "'%' on a text is outside the subset"};
    fail(fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", op, type_name(left),
                     type_name(right)));
  }

  static Value number_arithmetic(const std::string& op, const Value& left, const Value& right) {
    const bool whole = left.is_whole() && right.is_whole();
    if ((op == "/" || op == "//" || op == "%") && right.number() == 0) fail("division by zero");
    if (whole && op != "/") {
      if (op == "+") return Value::of(add_exactly(left.i, right.i));
      if (op == "-") return Value::of(subtract_exactly(left.i, right.i));
      if (op == "*") return Value::of(multiply_exactly(left.i, right.i));
      if (op == "//" || op == "%") {
        if (left.i == INT64_MIN && right.i == -1) too_large();
        int64_t quotient = left.i / right.i, rest = left.i % right.i;
        if (rest != 0 && (rest < 0) != (right.i < 0)) {
          --quotient;
          rest += right.i;
        }
        return Value::of(op == "//" ? quotient : rest);
      }
      if (right.i >= 0) {  // **
        int64_t base = left.i, exponent = right.i, power = 1;
        if (exponent > 64 && base != 0 && base != 1 && base != -1) too_large();
        if (base == -1) return Value::of(int64_t{exponent % 2 ? -1 : 1});
        if (base == 0 || base == 1) return Value::of(exponent == 0 ? int64_t{1} : base);
        while (exponent-- > 0) power = multiply_exactly(power, base);
        return Value::of(power);
      }
    }
    const double a = left.number(), b = right.number();
    if (op == "+") return Value::of(a + b);
    if (op == "-") return Value::of(a - b);
    if (op == "*") return Value::of(a * b);
    if (op == "/") return Value::of(a / b);
    if (op == "**") {
      if (a == 0 && b < 0) fail("0.0 cannot be raised to a negative power");
      if (a < 0 && b != std::floor(b))
        throw Error{Error::unsupported, "a complex number is outside the subset"};
      return Value::of(std::pow(a, b));
    }
    double rest = std::fmod(a, b);
    if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
    if (op == "%") return Value::of(rest);
    return Value::of(std::floor((a - rest) / b + 0.5));
  }

  Value eval_slice(const Expr& expr, Scope& scope) {
    const Value target = eval(*expr.args[0], scope);
    Value bounds[3];
    for (int i = 0; i < 3; ++i) {
      bounds[i] = expr.args[i + 1] ? eval(*expr.args[i + 1], scope) : Value::make_none();
      if (bounds[i].kind != Value::none && !bounds[i].is_whole()) {
        fail("slice indices must be integers or None");
      }
    }
    if (target.kind == Value::undefined) return get_item(target, Value::of(int64_t{0}));
    if (target.kind != Value::text && target.kind != Value::list) {
      fail(fmt::format("'{}' object is not subscriptable by a slice", type_name(target)));
    }
    const std::vector<size_t> offsets =
        target.kind == Value::text ? character_offsets(target.as_text().bytes) : std::vector<size_t>();
    const int64_t length = target.kind == Value::text ? static_cast<int64_t>(offsets.size()) - 1
                                                      : static_cast<int64_t>(target.as_list().items.size());
    budget_.charge(length);
    const int64_t step = bounds[2].kind == Value::none ? 1 : bounds[2].i;
    if (step == 0) fail("slice step cannot be zero");
    const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? length : length - 1;
    auto bound = [&](const Value& value, int64_t otherwise) {
      if (value.kind == Value::none) return otherwise;
      return std::clamp(value.i < 0 ? value.i + length : value.i, low, high);
    };
    const int64_t start = bound(bounds[0], step > 0 ? low : high),
                  stop = bound(bounds[1], step > 0 ? high : low);
    std::vector<int64_t> picked;
    // A step beyond the length picks one element; clamped, it cannot overflow.
    const int64_t stride = std::clamp(step, -length - 1, length + 1);
    for (int64_t i = start; stride > 0 ? i < stop : i > stop; i += stride) picked.push_back(i);
    if (target.kind == Value::text) {
      Text out;
      for (int64_t i : picked) out.append(target.as_text().slice(offsets[i], offsets[i + 1]));
      return Value::of(std::move(out));
    }
    std::vector<Value> items;
    for (int64_t i : picked) items.push_back(target.as_list().items[i]);
    return Value::make_list(std::move(items), target.as_list().tuple);
  }

  // --- calls

  Value eval_call(const Expr& expr, Scope& scope) {
    const Value callee = eval(*expr.args[0], scope);
    const Arguments arguments = arguments_of(expr, scope);
    if (callee.kind == Value::undefined) {
      fail(fmt::format("'{}' is undefined",
                       callee.object ? *static_cast<std::string*>(callee.object.get()) : ""));
    }
    if (callee.kind != Value::callable) fail(fmt::format("'{}' object is not callable", type_name(callee)));
    const Callable& callable = callee.as_callable();
    if (callable.macro) return call_macro(*callable.macro, arguments);
    if (callable.method) return call_method(callable.name, callable.self, arguments, budget_);
    return call_function(callable.name, arguments);
  }

  Value call_function(const std::string& name, const Arguments& arguments) {
    if (name == "namespace" || name == "dict") {
      std::vector<std::pair<Value, Value>> items;
      arguments.allow(name, 1, {"*"});
      if (!arguments.positional.empty()) {
        if (arguments.positional[0].kind != Value::dict) fail(fmt::format("{}() needs a mapping", name));
        items = arguments.positional[0].as_dict().items;
      }
      for (const auto& [key, value] : arguments.named) {
        auto same = std::find_if(items.begin(), items.end(),
                                 [&, k = Value::of(key)](auto& i) { return equal(i.first, k); });
        if (same != items.end()) {
          same->second = value;
        } else {
          items.emplace_back(Value::of(key), value);
        }
      }
      if (name == "dict") return Value::make_dict(std::move(items));
      for (const auto& [key, value] : items) {
        if (key.kind != Value::text) fail("namespace() needs names");
        if (!value.shareable())
          throw Error{Error::unsupported, "a namespace inside a namespace is outside the subset"};
      }
      return make_namespace(std::move(items), true);
    }
    if (name == "raise_exception") {
      arguments.allow(name, 1);
      const Value* message = arguments.get(0, "message");
      throw Error{Error::runtime,
                  message ? to_text(*message).bytes : std::string("raise_exception() without a message")};
    }
    if (name == "strftime_now") {
      arguments.allow(name, 1);
      const Value* format = arguments.get(0, "format");
      if (!format || format->kind != Value::text) fail("strftime_now() needs a format");
      return strftime_now(format->as_text().bytes);
    }
    // range
    arguments.allow(name, 3);
    int64_t values[3] = {0, 0, 1};
    const size_t count = arguments.positional.size();
    if (count == 0) fail("range() needs 1 to 3 arguments");
    for (size_t i = 0; i < count; ++i) {
      if (!arguments.positional[i].is_whole()) fail("range() needs integers");
      values[count == 1 ? 1 : i] = arguments.positional[i].i;
    }
    if (values[2] == 0) fail("range() arg 3 must not be zero");
    std::vector<Value> items;
    for (__int128 i = values[0]; values[2] > 0 ? i < values[1] : i > values[1]; i += values[2]) {
      if (items.size() == kMaxRange)
        throw Error{Error::limit, fmt::format("range() has more than {} elements", kMaxRange)};
      budget_.charge(1);
      items.push_back(Value::of(static_cast<int64_t>(i)));
    }
    return Value::make_list(std::move(items));
  }

  static Value strftime_now(const std::string& format) {
    // strftime() says 0 both for "too long" and for nothing; a final character tells them apart.
    char buffer[512];
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    const size_t length = std::strftime(buffer, sizeof(buffer), (format + "|").c_str(), &local);
    if (length == 0) fail("strftime_now() gives more than 511 bytes");
    return Value::of(std::string_view(buffer, length - 1));
  }

  Value call_macro(const Macro& macro, const Arguments& arguments) {
    if (arguments.positional.size() > macro.parameters.size()) {
      fail(fmt::format("macro '{}' takes not more than {} argument(s)", macro.name, macro.parameters.size()));
    }
    // A macro sees the template's outermost names, not those of its caller.
    Scope scope{&global_, {}};
    const size_t required = macro.parameters.size() - macro.defaults.size();
    size_t used = 0;
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const std::string& name = macro.parameters[i];
      const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                      [&](auto& a) { return a.first == name; });
      if (i < arguments.positional.size()) {
        define(scope, name, arguments.positional[i]);
      } else if (named != arguments.named.end()) {
        define(scope, name, named->second);
        ++used;
      } else if (i >= required) {
        define(scope, name, eval(*macro.defaults[i - required], scope));
      } else {
        define(scope, name, Value::make_undefined(name));
      }
    }
    if (used != arguments.named.size())
      fail(fmt::format("macro '{}' got a keyword argument it does not take", macro.name));
    Text out;
    exec(macro.body, scope, out);
    return Value::of(std::move(out));
  }

  Scope global_;
  Budget budget_;
  int depth_ = 0;
};

}  // namespace

Text render(const Block& block, std::vector<std::pair<std::string, Value>> variables) {
  return Renderer(std::move(variables)).run(block);
}

}  // namespace vivace::model::jinja
