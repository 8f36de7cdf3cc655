#include "src/model/jinja_lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "src/model/utf8.h"

namespace vivace::model::jinja {
namespace {

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    source_.reserve(source.size());
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        source_ += '\n';
        if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      } else {
        source_ += source[i];
      }
    }
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = find_tag();
      if (tag == std::string::npos) {
        add_data(source_.substr(at_));
        break;
      }
      const char kind = source_[tag + 1];
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      std::string before = source_.substr(at_, tag - at_);
      strip_before(before, sign, kind);
      const size_t inside = tag + 2 + (sign == '-' || sign == '+');
      add_data(before);
      count_lines(tag);
      if (kind == '#') {
        skip_comment(inside);
      } else if (kind == '%' && starts_raw(inside)) {
        read_raw(inside);
      } else {
        add(kind == '%' ? Token::block_begin : Token::variable_begin, "");
        at_ = inside;
        read_tag(kind);
      }
    }
    add(Token::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void syntax(const std::string& message) {
    throw Error{Error::syntax, fmt::format("line {}: {}", line_, message)};
  }

  void add(Token::Kind kind, std::string value, Value number = {}) {
    tokens_.push_back({kind, std::move(value), line_, std::move(number)});
  }

  void add_data(std::string text) {
    if (!text.empty()) add(Token::data, std::move(text));
  }

  void count_lines(size_t end) {
    line_ += static_cast<int>(std::count(source_.begin() + at_, source_.begin() + end, '\n'));
    at_ = end;
  }

  size_t find_tag() const {
    for (size_t i = source_.find('{', at_); i != std::string::npos; i = source_.find('{', i + 1)) {
      if (i + 1 < source_.size() && (source_[i + 1] == '%' || source_[i + 1] == '{' || source_[i + 1] == '#'))
        return i;
    }
    return std::string::npos;
  }

  static bool all_space(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
      const Utf8Step step = utf8_step(text, i);
      if (!is_space(step.value)) return false;
      i += step.length;
    }
    return true;
  }

  // Whitespace in front of a tag: "-" takes all of it; a block or comment takes its own line's indentation.
  void strip_before(std::string& before, char sign, char kind) const {
    if (sign == '-') {
      size_t end = before.size();
      while (end > 0) {
        size_t start = end - 1;
        while (start > 0 && (static_cast<unsigned char>(before[start]) & 0xC0) == 0x80) --start;
        if (!is_space(utf8_step(before, start).value)) break;
        end = start;
      }
      before.resize(end);
    } else if (sign != '+' && kind != '{') {
      const size_t line_start = before.rfind('\n') + 1;  // 0 when there is none
      if ((line_start > 0 || line_starting_) && all_space(std::string_view(before).substr(line_start))) {
        before.resize(line_start);
      }
    }
  }

  // The end of a tag, its sign at `sign_at`: "-" takes all whitespace that follows, else a block or comment takes one
  // line end, unless it ends in "+".
  void end_tag(char sign, size_t after, bool trims_newline) {
    if (sign == '-') {
      while (after < source_.size()) {
        const Utf8Step step = utf8_step(source_, after);
        if (!is_space(step.value)) break;
        after += step.length;
      }
    } else if (sign != '+' && trims_newline && after < source_.size() && source_[after] == '\n') {
      ++after;
    }
    count_lines(after);
    line_starting_ = after > 0 && source_[after - 1] == '\n';
  }

  void skip_comment(size_t inside) {
    const size_t close = source_.find("#}", inside);
    if (close == std::string::npos) syntax("a comment has no end (#})");
    const char sign = close > inside ? source_[close - 1] : '\0';
    end_tag(sign, close + 2, true);
  }

  size_t skip_space(size_t i) const {
    while (i < source_.size() && std::isspace(static_cast<unsigned char>(source_[i]))) ++i;
    return i;
  }

  // The position after `{% word` if a tag with just that word starts here, else npos.
  size_t after_word(size_t inside, std::string_view word) const {
    const size_t i = skip_space(inside);
    if (source_.compare(i, word.size(), word) != 0) return std::string::npos;
    const size_t end = skip_space(i + word.size());
    const bool signed_end = end < source_.size() && (source_[end] == '-' || source_[end] == '+');
    return source_.compare(end + signed_end, 2, "%}") == 0 ? end : std::string::npos;
  }

  bool starts_raw(size_t inside) const { return after_word(inside, "raw") != std::string::npos; }

  void read_raw(size_t inside) {
    const size_t end = after_word(inside, "raw");
    const bool minus = source_[end] == '-', sign = minus || source_[end] == '+';
    end_tag(minus ? '-' : '\0', end + sign + 2, false);
    for (size_t i = source_.find("{%", at_); i != std::string::npos; i = source_.find("{%", i + 2)) {
      const char before_sign = i + 2 < source_.size() ? source_[i + 2] : '\0';
      const size_t word = i + 2 + (before_sign == '-' || before_sign == '+');
      const size_t close = after_word(word, "endraw");
      if (close == std::string::npos) continue;
      std::string text = source_.substr(at_, i - at_);
      strip_before(text, before_sign, '%');
      add_data(std::move(text));
      const char close_sign = source_[close];
      end_tag(close_sign, close + (close_sign == '-' || close_sign == '+') + 2, true);
      return;
    }
    syntax("a raw block has no end ({% endraw %})");
  }

  void read_tag(char kind) {
    const std::string close = kind == '%' ? "%}" : "}}";
    std::string open;  // brackets that wait for their end
    while (true) {
      const size_t next = skip_space(at_);
      count_lines(next);
      if (at_ >= source_.size()) syntax(fmt::format("a tag has no end ({})", close));
      const char c = source_[at_];
      const std::string_view rest = std::string_view(source_).substr(at_);
      if (open.empty()) {
        const bool sign = (c == '-' || (c == '+' && kind == '%')) && rest.substr(1, 2) == close;
        if (sign || rest.substr(0, 2) == close) {
          add(kind == '%' ? Token::block_end : Token::variable_end, "");
          end_tag(sign ? c : '\0', at_ + sign + 2, kind == '%');
          return;
        }
      }
      if (c == '"' || c == '\'') {
        read_string(c);
      } else if (std::isdigit(static_cast<unsigned char>(c))) {
        read_number();
      } else if (std::isalpha(static_cast<unsigned char>(c)) || c == '_') {
        size_t end = at_;
        while (end < source_.size() &&
               (std::isalnum(static_cast<unsigned char>(source_[end])) || source_[end] == '_')) {
          ++end;
        }
        add(Token::name, source_.substr(at_, end - at_));
        at_ = end;
      } else {
        read_operator(rest, open);
      }
    }
  }

  void read_operator(std::string_view rest, std::string& open) {
    static constexpr std::array<std::string_view, 26> kOperators = {
        "==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~", "<",
        ">",  "=",  "(",  ")",  "[",  "]",  "{", "}", ".", ",", ":", "|", ";"};
    for (std::string_view op : kOperators) {
      if (!rest.starts_with(op)) continue;
      if (op == "(" || op == "[" || op == "{") open += op == "(" ? ')' : op == "[" ? ']' : '}';
      if (op == ")" || op == "]" || op == "}") {
        if (open.empty() || open.back() != op[0]) syntax(fmt::format("unexpected '{}'", op));
        open.pop_back();
      }
      add(Token::op, std::string(op));
      at_ += op.size();
      return;
    }
    syntax(fmt::format("unexpected character '{}'", rest.substr(0, utf8_step(rest, 0).length)));
  }

  void read_number() {
    size_t end = at_;
    auto digits = [&] {
      while (end < source_.size() && std::isdigit(static_cast<unsigned char>(source_[end]))) ++end;
    };
    digits();
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' &&
        std::isdigit(static_cast<unsigned char>(source_[end + 1]))) {
      real = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-');
      if (end + 1 + sign < source_.size() &&
          std::isdigit(static_cast<unsigned char>(source_[end + 1 + sign]))) {
        real = true;
        end += 1 + sign;
        digits();
      }
    }
    const std::string text = source_.substr(at_, end - at_);
    const char* last = text.data() + text.size();
    if (end < source_.size() &&
        (std::isalnum(static_cast<unsigned char>(source_[end])) || source_[end] == '_')) {
      throw Error{Error::unsupported,
                  fmt::format("line {}: number '{}{}' is outside the subset", line_, text, source_[end])};
    }
    if (real) {
      double value = 0;
      if (std::from_chars(text.data(), last, value).ec != std::errc())
        syntax(fmt::format("number {} is out of range", text));
      add(Token::real, text, Value::of(value));
    } else {
      int64_t value = 0;
      if (text.size() > 1 && text[0] == '0' && text.find_first_not_of('0') != text.npos) {
        syntax(fmt::format("number {} starts with 0", text));
      }
      if (std::from_chars(text.data(), last, value).ec != std::errc()) {
        throw Error{Error::unsupported,
                    fmt::format("line {}: integer {} has more than 63 bits", line_, text)};
      }
      add(Token::integer, text, Value::of(value));
    }
    at_ = end;
  }

  // The escapes of Python string literals; one that it does not know stays as it is, backslash included.
  void read_string(char quote) {
    const int start_line = line_;
    std::string out;
    size_t i = at_ + 1;
    for (; i < source_.size() && source_[i] != quote; ++i) {
      if (source_[i] != '\\') {
        out += source_[i];
        continue;
      }
      if (++i == source_.size()) break;
      const char c = source_[i];
      auto hex = [&](size_t count) {
        uint32_t value = 0;
        const char* first = source_.data() + i + 1;
        const char* last = first + count;
        if (i + count >= source_.size()) syntax("a string has an unfinished escape");
        const auto read = std::from_chars(first, last, value, 16);
        if (read.ptr != last || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
          syntax(fmt::format("a string has an invalid \\{} escape", c));
        }
        append_utf8(out, value);
        i += count;
      };
      switch (c) {
        case 'n':
          out += '\n';
          break;
        case 't':
          out += '\t';
          break;
        case 'r':
          out += '\r';
          break;
        case 'a':
          out += '\a';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'v':
          out += '\v';
          break;
        case '\\':
        case '\'':
        case '"':
          out += c;
          break;
        case '\n':
          break;
        case 'x':
          hex(2);
          break;
        case 'u':
          hex(4);
          break;
        case 'U':
          hex(8);
          break;
        case 'N':
          throw Error{Error::unsupported,
                      fmt::format("line {}: \\N in a string is outside the subset", line_)};
        default:
          if (c >= '0' && c <= '7') {
            uint32_t value = 0;
            size_t count = 0;
            for (; count < 3 && i + count < source_.size() && source_[i + count] >= '0' &&
                   source_[i + count] <= '7';
                 ++count) {
              value = value * 8 + static_cast<uint32_t>(source_[i + count] - '0');
            }
            append_utf8(out, value);
            i += count - 1;
          } else {
            out += '\\';
            out += c;
          }
      }
    }
    if (i >= source_.size()) {
      line_ = start_line;
      syntax("a string has no end");
    }
    add(Token::text, std::move(out));
    count_lines(i + 1);
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace vivace::model::jinja
