#include "src/model/jinja_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "src/model/jinja_lexer.h"

namespace vivace::model::jinja {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  Block run() {
    Block block = parse_block({});
    if (unsafe_ > 0)
      throw Error{Error::unsupported, "filter 'safe' inside an expression is outside the subset"};
    return block;
  }

 private:
  // --- tokens

  const Token& now() const { return tokens_[at_]; }
  bool at(Token::Kind kind, std::string_view value) const {
    return now().kind == kind && now().value == value;
  }
  bool at_op(std::string_view op) const { return at(Token::op, op); }
  bool at_name(std::string_view name) const { return at(Token::name, name); }
  bool next_is_name(std::string_view name) const {
    return at_ + 1 < tokens_.size() && tokens_[at_ + 1].kind == Token::name && tokens_[at_ + 1].value == name;
  }
  const Token& take() { return tokens_[now().kind == Token::end ? at_ : at_++]; }
  bool take_op(std::string_view op) {
    if (!at_op(op)) return false;
    ++at_;
    return true;
  }
  bool take_name(std::string_view name) {
    if (!at_name(name)) return false;
    ++at_;
    return true;
  }
  void expect_op(std::string_view op) {
    if (!take_op(op)) syntax(fmt::format("expected '{}', got {}", op, shown()));
  }
  std::string expect_name(std::string_view what) {
    if (now().kind != Token::name) syntax(fmt::format("expected {}, got {}", what, shown()));
    return take().value;
  }
  void expect_block_end() {
    if (now().kind != Token::block_end) syntax(fmt::format("expected '%}}', got {}", shown()));
    ++at_;
  }
  std::string shown() const {
    switch (now().kind) {
      case Token::end:
        return "the end of the template";
      case Token::block_end:
        return "'%}'";
      case Token::variable_end:
        return "'}}'";
      default:
        return "'" + now().value + "'";
    }
  }
  [[noreturn]] void syntax(const std::string& message) const {
    throw Error{Error::syntax, fmt::format("line {}: {}", now().line, message)};
  }
  [[noreturn]] void unsupported(std::string_view construct) const {
    throw Error{Error::unsupported, fmt::format("line {}: {} is outside the subset", now().line, construct)};
  }

  // Bounds the recursion of this parser.
  struct Level {
    explicit Level(Parser& parser) : parser(parser) {
      if (++parser.level_ > kMaxSyntaxDepth) {
        throw Error{Error::limit,
                    fmt::format("line {}: nests more than {} deep", parser.now().line, kMaxSyntaxDepth)};
      }
    }
    ~Level() { --parser.level_; }
    Parser& parser;
  };

  // --- expressions, from the loosest operator to the tightest

  ExprPtr make(Expr::Kind kind, std::string text = {}) const {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = now().line;
    expr->text = std::move(text);
    return expr;
  }
  // Chains such as a + b + c are built without recursion, but evaluated and destroyed with it.
  void add(Expr& parent, ExprPtr child) const {
    if (child) {
      parent.depth = std::max(parent.depth, child->depth + 1);
      if (parent.depth > kMaxSyntaxDepth) {
        throw Error{Error::limit,
                    fmt::format("line {}: nests more than {} deep", parent.line, kMaxSyntaxDepth)};
      }
    }
    parent.args.push_back(std::move(child));
  }
  ExprPtr binary(std::string op, ExprPtr left, ExprPtr right) const {
    ExprPtr expr = make(Expr::binary, std::move(op));
    add(*expr, std::move(left));
    add(*expr, std::move(right));
    return expr;
  }

  ExprPtr parse_expression() {
    Level level(*this);
    ExprPtr expr = parse_or();
    while (take_name("if")) {
      ExprPtr conditional = make(Expr::conditional);
      add(*conditional, std::move(expr));
      add(*conditional, parse_or());
      add(*conditional, take_name("else") ? parse_expression() : nullptr);
      expr = std::move(conditional);
    }
    return expr;
  }

  // a, b, c without parentheses is a tuple.
  ExprPtr parse_tuple(bool with_conditional = true) {
    auto part = [&] { return with_conditional ? parse_expression() : parse_or(); };
    ExprPtr first = part();
    if (!at_op(",")) return first;
    ExprPtr tuple = make(Expr::tuple);
    add(*tuple, std::move(first));
    while (take_op(",")) {
      if (now().kind == Token::block_end || now().kind == Token::variable_end || at_op(")") || at_op("="))
        break;
      add(*tuple, part());
    }
    return tuple;
  }

  ExprPtr parse_or() {
    ExprPtr left = parse_and();
    while (take_name("or")) left = binary("or", std::move(left), parse_and());
    return left;
  }
  ExprPtr parse_and() {
    ExprPtr left = parse_not();
    while (take_name("and")) left = binary("and", std::move(left), parse_not());
    return left;
  }
  ExprPtr parse_not() {
    if (!at_name("not")) return parse_compare();
    Level level(*this);
    ++at_;
    ExprPtr expr = make(Expr::unary, "not");
    add(*expr, parse_not());
    return expr;
  }
  ExprPtr parse_compare() {
    ExprPtr left = parse_sum();
    ExprPtr compare;
    while (true) {
      std::string op;
      for (const char* candidate : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (op.empty() && take_op(candidate)) op = candidate;
      }
      if (op.empty() && take_name("in")) op = "in";
      if (op.empty() && at_name("not") && next_is_name("in")) {
        at_ += 2;
        op = "not in";
      }
      if (op.empty()) break;
      if (!compare) {
        compare = make(Expr::compare);
        add(*compare, std::move(left));
      }
      compare->operators.push_back(op);
      add(*compare, parse_sum());
    }
    return compare ? std::move(compare) : std::move(left);
  }
  ExprPtr parse_sum() {
    ExprPtr left = parse_concat();
    while (at_op("+") || at_op("-")) {
      const std::string op = take().value;
      left = binary(op, std::move(left), parse_concat());
    }
    return left;
  }
  ExprPtr parse_concat() {
    ExprPtr left = parse_product();
    if (!at_op("~")) return left;
    ExprPtr concat = make(Expr::concat);
    add(*concat, std::move(left));
    while (take_op("~")) add(*concat, parse_product());
    return concat;
  }
  ExprPtr parse_product() {
    ExprPtr left = parse_power();
    while (at_op("*") || at_op("/") || at_op("//") || at_op("%")) {
      const std::string op = take().value;
      left = binary(op, std::move(left), parse_power());
    }
    return left;
  }
  ExprPtr parse_power() {
    ExprPtr left = parse_unary(true);
    while (take_op("**")) left = binary("**", std::move(left), parse_unary(true));
    return left;
  }
  ExprPtr parse_unary(bool with_filters) {
    ExprPtr expr;
    if (at_op("-") || at_op("+")) {
      Level level(*this);
      expr = make(Expr::unary, take().value);
      add(*expr, parse_unary(false));
    } else {
      expr = parse_primary();
    }
    expr = parse_postfix(std::move(expr));
    return with_filters ? parse_filters(std::move(expr)) : std::move(expr);
  }

  ExprPtr constant(Value value) const {
    ExprPtr expr = make(Expr::constant);
    expr->value = std::move(value);
    return expr;
  }

  ExprPtr parse_primary() {
    Level level(*this);
    const Token& token = now();
    switch (token.kind) {
      case Token::name: {
        const std::string name = take().value;
        if (name == "true" || name == "True") return constant(Value::of(true));
        if (name == "false" || name == "False") return constant(Value::of(false));
        if (name == "none" || name == "None") return constant(Value::make_none());
        return make(Expr::name, name);
      }
      case Token::text: {
        std::string text = take().value;
        while (now().kind == Token::text) text += take().value;
        return constant(Value::of(text));
      }
      case Token::integer:
      case Token::real:
        return constant(take().number);
      case Token::op:
        break;
      default:
        syntax(fmt::format("unexpected {}", shown()));
    }
    if (take_op("(")) {
      if (take_op(")")) return make(Expr::tuple);
      ExprPtr inner = parse_tuple();
      expect_op(")");
      return inner;
    }
    if (take_op("[")) {
      ExprPtr list = make(Expr::list);
      while (!take_op("]")) {
        add(*list, parse_expression());
        if (!at_op("]")) expect_op(",");
      }
      return list;
    }
    if (take_op("{")) {
      ExprPtr dict = make(Expr::dict);
      while (!take_op("}")) {
        add(*dict, parse_expression());
        expect_op(":");
        add(*dict, parse_expression());
        if (!at_op("}")) expect_op(",");
      }
      return dict;
    }
    syntax(fmt::format("unexpected {}", shown()));
  }

  ExprPtr parse_postfix(ExprPtr expr) {
    while (true) {
      if (take_op(".")) {
        if (now().kind == Token::integer) {
          ExprPtr subscript = make(Expr::subscript);
          add(*subscript, std::move(expr));
          add(*subscript, constant(take().number));
          expr = std::move(subscript);
          continue;
        }
        ExprPtr attribute = make(Expr::attribute, expect_name("an attribute"));
        add(*attribute, std::move(expr));
        expr = std::move(attribute);
      } else if (take_op("[")) {
        expr = parse_subscript(std::move(expr));
      } else if (at_op("(")) {
        expr = parse_call(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  ExprPtr parse_subscript(ExprPtr target) {
    auto bound = [&]() -> ExprPtr { return at_op(":") || at_op("]") ? nullptr : parse_expression(); };
    ExprPtr first = bound();
    if (!at_op(":")) {
      if (!first) syntax("expected a subscript, got ']'");
      if (at_op(",")) unsupported("a subscript with a comma");
      expect_op("]");
      ExprPtr subscript = make(Expr::subscript);
      add(*subscript, std::move(target));
      add(*subscript, std::move(first));
      return subscript;
    }
    ++at_;
    ExprPtr slice = make(Expr::slice);
    add(*slice, std::move(target));
    add(*slice, std::move(first));
    add(*slice, bound());
    add(*slice, take_op(":") ? bound() : nullptr);
    expect_op("]");
    return slice;
  }

  void parse_arguments(Expr& call) {
    expect_op("(");
    while (!take_op(")")) {
      if (at_op("*") || at_op("**")) unsupported(fmt::format("'{}' in front of an argument", now().value));
      if (now().kind == Token::name && at_ + 1 < tokens_.size() && tokens_[at_ + 1].kind == Token::op &&
          tokens_[at_ + 1].value == "=") {
        std::string name = take().value;
        ++at_;
        ExprPtr value = parse_expression();
        call.depth = std::max(call.depth, value->depth + 1);
        if (call.depth > kMaxSyntaxDepth) {
          throw Error{Error::limit,
                      fmt::format("line {}: nests more than {} deep", call.line, kMaxSyntaxDepth)};
        }
        call.named.emplace_back(std::move(name), std::move(value));
      } else {
        if (!call.named.empty()) syntax("a positional argument follows a keyword argument");
        add(call, parse_expression());
      }
      if (!at_op(")")) expect_op(",");
    }
  }

  ExprPtr parse_call(ExprPtr callee) {
    if (callee->kind == Expr::attribute && !is_method(callee->text)) {
      unsupported(fmt::format("method '{}'", callee->text));
    }
    ExprPtr call = make(Expr::call);
    add(*call, std::move(callee));
    parse_arguments(*call);
    return call;
  }

  ExprPtr parse_filters(ExprPtr expr) {
    while (true) {
      if (take_op("|")) {
        ExprPtr filter = make(Expr::filter, expect_name("a filter"));
        if (!is_filter(filter->text)) unsupported(fmt::format("filter '{}'", filter->text));
        if (filter->text == "safe") ++unsafe_;
        add(*filter, std::move(expr));
        if (at_op("(")) parse_arguments(*filter);
        expr = std::move(filter);
      } else if (take_name("is")) {
        expr = parse_test(std::move(expr));
      } else if (at_op("(")) {
        expr = parse_call(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  ExprPtr parse_test(ExprPtr expr) {
    const bool negated = take_name("not");
    ExprPtr test = make(Expr::test, expect_name("a test"));
    if (!is_test(test->text)) unsupported(fmt::format("test '{}'", test->text));
    add(*test, std::move(expr));
    const bool keyword = at_name("else") || at_name("or") || at_name("and") || at_name("if") ||
                         at_name("in") || at_name("not");
    if (at_op("(")) {
      parse_arguments(*test);
    } else if (at_name("is")) {
      syntax("tests cannot be chained with 'is'");
    } else if (!keyword &&
               (now().kind == Token::name || now().kind == Token::text || now().kind == Token::integer ||
                now().kind == Token::real || at_op("[") || at_op("{"))) {
      add(*test, parse_postfix(parse_primary()));
    }
    if (!negated) return test;
    ExprPtr expression = make(Expr::unary, "not");
    add(*expression, std::move(test));
    return expression;
  }

  // --- statements

  std::unique_ptr<Stmt> statement(Stmt::Kind kind) const {
    auto stmt = std::make_unique<Stmt>();
    stmt->kind = kind;
    stmt->line = now().line;
    return stmt;
  }

  // Up to one of the `ends` (its name is left to be read) or, without ends, the end of the template.
  Block parse_block(std::initializer_list<std::string_view> ends) {
    Level level(*this);
    Block block;
    while (true) {
      switch (now().kind) {
        case Token::end:
          if (ends.size() > 0) syntax(fmt::format("the template ends before '{}'", *(ends.end() - 1)));
          return block;
        case Token::data: {
          auto stmt = statement(Stmt::data);
          stmt->text = take().value;
          block.push_back(std::move(stmt));
          break;
        }
        case Token::variable_begin: {
          ++at_;
          auto stmt = statement(Stmt::output);
          stmt->expr = parse_tuple();
          // Without autoescape, "safe" changes nothing that is printed at once; inside an expression it would.
          while (stmt->expr->kind == Expr::filter && stmt->expr->text == "safe" &&
                 stmt->expr->args.size() == 1) {
            --unsafe_;
            stmt->expr = std::move(stmt->expr->args[0]);
          }
          if (now().kind != Token::variable_end) syntax(fmt::format("expected '}}}}', got {}", shown()));
          ++at_;
          block.push_back(std::move(stmt));
          break;
        }
        default: {
          ++at_;
          for (std::string_view end : ends) {
            if (at_name(end)) return block;
          }
          parse_statement(block);
        }
      }
    }
  }

  void parse_statement(Block& block) {
    const std::string name = now().kind == Token::name ? now().value : "";
    if (name == "if") return block.push_back(parse_if());
    if (name == "for") return block.push_back(parse_for());
    if (name == "set") return block.push_back(parse_set());
    if (name == "macro") return block.push_back(parse_macro());
    if (name == "generation") return parse_generation(block);
    if (name == "break" || name == "continue") {
      if (loops_ == 0) syntax(fmt::format("'{}' outside a loop", name));
      auto stmt = statement(name == "break" ? Stmt::break_loop : Stmt::continue_loop);
      ++at_;
      expect_block_end();
      return block.push_back(std::move(stmt));
    }
    if (name.starts_with("end") || name == "else" || name == "elif")
      syntax(fmt::format("unexpected '{}'", name));
    if (name.empty()) syntax(fmt::format("expected a statement, got {}", shown()));
    unsupported(fmt::format("statement '{}'", name));
  }

  // Marks what the model generates, for training; rendering ignores it.
  void parse_generation(Block& block) {
    ++at_;
    expect_block_end();
    for (auto& stmt : parse_block({"endgeneration"})) block.push_back(std::move(stmt));
    ++at_;
    expect_block_end();
  }

  std::unique_ptr<Stmt> parse_if() {
    auto stmt = statement(Stmt::if_else);
    bool more = true;
    while (more) {
      const bool last = at_name("else");
      ++at_;
      ExprPtr condition = last ? nullptr : parse_tuple(false);
      expect_block_end();
      Block body = last ? parse_block({"endif"}) : parse_block({"elif", "else", "endif"});
      stmt->branches.emplace_back(std::move(condition), std::move(body));
      more = !at_name("endif");
    }
    ++at_;
    expect_block_end();
    return stmt;
  }

  std::vector<std::string> parse_targets(std::string_view end) {
    std::vector<std::string> targets;
    const bool parenthesised = take_op("(");
    do {
      if (parenthesised && at_op(")")) break;
      targets.push_back(expect_name("a name to assign to"));
      for (const char* reserved : {"true", "false", "none", "True", "False", "None", "loop"}) {
        if (targets.back() == reserved) syntax(fmt::format("cannot assign to '{}'", reserved));
      }
    } while (take_op(","));
    if (parenthesised) expect_op(")");
    if (targets.size() == 1 && parenthesised)
      unsupported(fmt::format("a target in parentheses before '{}'", end));
    return targets;
  }

  std::unique_ptr<Stmt> parse_for() {
    auto stmt = statement(Stmt::for_loop);
    ++at_;
    stmt->targets = parse_targets("in");
    if (!take_name("in")) syntax(fmt::format("expected 'in', got {}", shown()));
    stmt->expr = parse_tuple(false);
    if (take_name("if")) stmt->filter = parse_expression();
    if (at_name("recursive")) unsupported("a recursive loop");
    expect_block_end();
    ++loops_;
    stmt->body = parse_block({"else", "endfor"});
    --loops_;
    if (take_name("else")) {
      expect_block_end();
      stmt->otherwise = parse_block({"endfor"});
    }
    ++at_;
    expect_block_end();
    return stmt;
  }

  std::unique_ptr<Stmt> parse_set() {
    auto stmt = statement(Stmt::set);
    ++at_;
    if (now().kind == Token::name && at_ + 1 < tokens_.size() && tokens_[at_ + 1].kind == Token::op &&
        tokens_[at_ + 1].value == ".") {
      stmt->targets.push_back(take().value);
      ++at_;
      stmt->attribute = expect_name("an attribute");
    } else {
      stmt->targets = parse_targets("=");
    }
    if (take_op("=")) {
      stmt->expr = parse_tuple();
      expect_block_end();
      return stmt;
    }
    if (at_op("|")) unsupported("a filter on a set block");
    if (stmt->targets.size() != 1) syntax("a set block has one target");
    stmt->kind = Stmt::set_block;
    expect_block_end();
    stmt->body = parse_block({"endset"});
    ++at_;
    expect_block_end();
    return stmt;
  }

  std::unique_ptr<Stmt> parse_macro() {
    auto stmt = statement(Stmt::macro);
    ++at_;
    auto macro = std::make_unique<Macro>();
    macro->name = expect_name("a macro's name");
    expect_op("(");
    while (!take_op(")")) {
      macro->parameters.push_back(expect_name("a parameter"));
      if (take_op("=")) {
        macro->defaults.push_back(parse_expression());
      } else if (!macro->defaults.empty()) {
        syntax("a parameter without a default follows one with a default");
      }
      if (!at_op(")")) expect_op(",");
    }
    expect_block_end();
    const int loops = std::exchange(loops_, 0);
    macro->body = parse_block({"endmacro"});
    loops_ = loops;
    ++at_;
    if (at_name(macro->name)) ++at_;
    expect_block_end();
    stmt->targets = {macro->name};
    stmt->macro_body = std::move(macro);
    return stmt;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int level_ = 0;
  int loops_ = 0;
  int unsafe_ = 0;  // "safe" filters that are not outermost in an output
};

}  // namespace

Block parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace vivace::model::jinja
