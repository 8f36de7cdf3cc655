#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/model/jinja_value.h"

namespace vivace::model::jinja {

struct Expr {
  enum Kind {
    constant,   // value
    name,       // text
    attribute,  // args[0].text
    subscript,  // args[0][args[1]]
    slice,      // args[0][args[1]:args[2]:args[3]], null where left out
    list,
    tuple,        // args
    dict,         // args: key, value, key, value, ...
    unary,        // text args[0]
    binary,       // args[0] text args[1]; text is an operator, "and" or "or"
    compare,      // args[0] operators[0] args[1] operators[1] args[2] ...
    concat,       // args, joined by ~
    conditional,  // args[0] if args[1] else args[2] (or null)
    filter,       // args[0] | text(args[1..])
    test,         // args[0] is text(args[1..])
    call,         // args[0](args[1..])
  };
  Kind kind;
  int line;
  int depth = 1;
  Value value;
  std::string text;
  std::vector<std::unique_ptr<Expr>> args;
  std::vector<std::string> operators;
  std::vector<std::pair<std::string, std::unique_ptr<Expr>>>
      named;  // keyword arguments of filter, test and call
};
using ExprPtr = std::unique_ptr<Expr>;

struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

struct Macro {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // of the last parameters
  Block body;
};

struct Stmt {
  enum Kind { data, output, if_else, for_loop, set, set_block, macro, break_loop, continue_loop };
  Kind kind;
  int line;
  std::string text;                                 // data
  ExprPtr expr;                                     // output; the iterable of for_loop; the value of set
  ExprPtr filter;                                   // for_loop: its condition
  std::vector<std::string> targets;                 // for_loop, set
  std::string attribute;                            // set: targets[0].attribute = expr
  std::vector<std::pair<ExprPtr, Block>> branches;  // if_else; the condition of else is null
  Block body, otherwise;                            // for_loop, set_block
  std::unique_ptr<Macro> macro_body;
};

/// Throws Error: what is not Jinja, and what is outside the subset, with its name and line.
Block parse(std::string_view source);

/// Whether the evaluator has a filter, a test, a method of that name.
bool is_filter(std::string_view name);
bool is_test(std::string_view name);
bool is_method(std::string_view name);

/// Deepest nesting of expressions and statements; the evaluator recurses as deep.
inline constexpr int kMaxSyntaxDepth = 80;

}  // namespace vivace::model::jinja
