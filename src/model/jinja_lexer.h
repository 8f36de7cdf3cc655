#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "src/model/jinja_value.h"

namespace vivace::model::jinja {

struct Token {
  enum Kind {
    data,
    block_begin,
    block_end,
    variable_begin,
    variable_end,
    name,
    text,
    integer,
    real,
    op,
    end
  };
  Kind kind;
  std::string value;  // a name, an operator, the characters of data or of a string literal
  int line;
  Value number;  // integer, real
};

/// Splits a template into tokens with trim_blocks and lstrip_blocks on and the last line end dropped. Line ends become
/// "\n". Comments and whitespace inside tags are gone, raw blocks are data. Throws Error.
std::vector<Token> tokenize(std::string_view source);

}  // namespace vivace::model::jinja
