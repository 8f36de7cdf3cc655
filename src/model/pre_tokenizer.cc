#include "src/model/pre_tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "src/core/error.h"
#include "src/model/utf8.h"

namespace vivace::model {
namespace {

struct Free {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Free>;

// Backtracking of the published patterns is linear in a run of one class, so the limit must grow with the
// text; the constant lets small texts be matched by clumsy patterns too and still ends an exponential one in
// about a second.
constexpr uint32_t kMatchLimitBase = 1'000'000;
constexpr uint32_t kMatchLimitPerByte = 8;

Status refused(std::string_view pattern, std::string_view construct, std::string_view reason) {
  return unsupported("pre_tokenizer: pattern '{}' has {}, which {}", pattern.substr(0, 200), construct,
                     reason);
}

// Oniguruma's pattern as one for PCRE2 with the same meaning.
Result<std::string> translate(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  size_t class_start = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i], next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '\\') {
      if (next == 's' || next == 'S') {
        out += next == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      } else if (next == 'h' || next == 'H') {
        return refused(pattern, "\\h", "is a hexadecimal digit for Oniguruma and a space for PCRE2");
      } else if (next == 'C') {
        return refused(pattern, "\\C", "would match half a character");
      } else if (next == 'K') {
        return refused(pattern, "\\K", "would let matches overlap");
      } else {
        out += c;
        if (next != '\0') out += next;
        // The braces of \p{..} and \x{..} are not a repetition.
        if (i + 2 < pattern.size() && pattern[i + 2] == '{') {
          const size_t end = std::min(pattern.find('}', i), pattern.size() - 1);
          out += pattern.substr(i + 2, end - i - 1);
          i = end - 1;
        }
      }
      ++i;
      continue;
    }
    if (in_class) {
      const bool first = i == class_start + 1 || (i == class_start + 2 && pattern[class_start + 1] == '^');
      if (c == '[' && next != ':') return refused(pattern, "a set inside a set", "PCRE2 reads literally");
      if (c == '&' && next == '&') return refused(pattern, "&& in a set", "PCRE2 reads literally");
      if (c == '[' && next == ':') {
        const size_t end = pattern.find(":]", i + 2);
        if (end == std::string_view::npos)
          return refused(pattern, "an unfinished [:class:]", "cannot be read");
        out += pattern.substr(i, end + 2 - i);
        i = end + 1;
        continue;
      }
      if (c == ']' && !first) in_class = false;
    } else if (c == '[') {
      in_class = true;
      class_start = i;
    } else if (c == '}' && next == '+') {
      return refused(pattern, "{n,m}+", "repeats for Oniguruma and is possessive for PCRE2");
    } else if (c == '(' && next == '?') {
      for (size_t j = i + 2;
           j < pattern.size() && (std::isalpha(static_cast<unsigned char>(pattern[j])) || pattern[j] == '-');
           ++j) {
        if (pattern[j] == 'm') return refused(pattern, "(?m)", "lets . match line ends for Oniguruma only");
        if (pattern[j] == 's') return refused(pattern, "(?s)", "is not an Oniguruma option");
      }
    } else if (c == '(' && next == '*') {
      return refused(pattern, "(*", "starts a PCRE2 verb");
    }
    out += c;
  }
  return out;
}

}  // namespace

struct PreTokenizer::Step {
  Owned<pcre2_code> code;
  bool jit = false;
  std::string pattern;  // as the file has it, for messages
};

struct PreTokenizer::Scratch::Impl {
  Owned<pcre2_match_context> context;
  Owned<pcre2_jit_stack> jit_stack;
  std::vector<Owned<pcre2_match_data>> match_data;  // by step
};

PreTokenizer::PreTokenizer() = default;
PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;

std::string PreTokenizer::literal(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && !std::isalnum(static_cast<unsigned char>(c)) && c != '\0')
      out += '\\';
    if (c == '\0') {
      out += "\\x00";
    } else {
      out += c;
    }
  }
  return out;
}

Status PreTokenizer::add_step(std::string_view pattern) {
  if (steps_.size() == kMaxSteps) {
    return unsupported("pre_tokenizer: has more than {} steps", kMaxSteps);
  }
  if (pattern.empty() || pattern.size() > kMaxPatternBytes) {
    return invalid_argument("pre_tokenizer: a pattern has {} bytes, needs 1 to {}", pattern.size(),
                            kMaxPatternBytes);
  }
  VIVACE_TRY_ASSIGN(const std::string translated, translate(pattern));
  Owned<pcre2_compile_context> context(pcre2_compile_context_create(nullptr));
  if (!context) return Status(Code::out_of_memory, "pre_tokenizer: no memory for a pattern");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int code = 0;
  PCRE2_SIZE offset = 0;
  Owned<pcre2_code> compiled(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                           PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset,
                                           context.get()));
  if (!compiled) {
    PCRE2_UCHAR message[256];
    pcre2_get_error_message(code, message, sizeof(message));
    return invalid_argument("pre_tokenizer: pattern '{}': {}", pattern.substr(0, 200),
                            reinterpret_cast<const char*>(message));
  }
  Step step;
  step.jit = pcre2_jit_compile(compiled.get(), PCRE2_JIT_COMPLETE) == 0;
  step.code = std::move(compiled);
  step.pattern = pattern;
  steps_.push_back(std::move(step));
  return {};
}

PreTokenizer::Scratch::Scratch(const PreTokenizer& owner) : impl_(std::make_unique<Impl>()) {
  impl_->context.reset(pcre2_match_context_create(nullptr));
  for (const Step& step : owner.steps_) {
    // Only the whole match is of interest, not its groups.
    impl_->match_data.emplace_back(pcre2_match_data_create(1, nullptr));
    if (step.jit && !impl_->jit_stack) {
      // JIT code would otherwise take its stack from the thread's, which may be small.
      impl_->jit_stack.reset(pcre2_jit_stack_create(32 << 10, 1 << 20, nullptr));
      if (impl_->jit_stack && impl_->context) {
        pcre2_jit_stack_assign(impl_->context.get(), nullptr, impl_->jit_stack.get());
      }
    }
  }
}

PreTokenizer::Scratch::~Scratch() = default;

Status PreTokenizer::split(std::string_view text, Scratch& scratch, const Sink& sink) const {
  if (!scratch.impl_->context || std::any_of(scratch.impl_->match_data.begin(),
                                             scratch.impl_->match_data.end(), [](auto& d) { return !d; })) {
    return Status(Code::out_of_memory, "tokenizer: no memory to match a pattern");
  }
  return split_from(0, text, scratch, sink);
}

// Recursion is as deep as there are steps.
Status PreTokenizer::split_from(size_t step_index, std::string_view text, Scratch& scratch,
                                const Sink& sink) const {
  if (text.empty()) return {};
  if (step_index == steps_.size()) {
    sink(text);
    return {};
  }
  const Step& step = steps_[step_index];
  pcre2_match_context* context = scratch.impl_->context.get();
  pcre2_match_data* data = scratch.impl_->match_data[step_index].get();
  const uint64_t limit = uint64_t{kMatchLimitPerByte} * text.size() + kMatchLimitBase;
  const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text.data());

  size_t piece_start = 0;  // everything before it went to the next step
  for (size_t search = 0; search <= text.size();) {
    pcre2_set_match_limit(context, static_cast<uint32_t>(std::min<uint64_t>(limit, UINT32_MAX)));
    int found = pcre2_match(step.code.get(), subject, text.size(), search, PCRE2_NO_UTF_CHECK, data, context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      // The interpreter keeps its backtracking points on the heap.
      found = pcre2_match(step.code.get(), subject, text.size(), search, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                          data, context);
    }
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return invalid_argument("tokenizer: pattern '{}' gave up on a piece of {} bytes (PCRE2 error {})",
                              step.pattern.substr(0, 200), text.size(), found);
    }
    const PCRE2_SIZE* match = pcre2_get_ovector_pointer(data);
    const size_t begin = match[0], end = match[1];
    if (end <= begin) {  // an empty match splits here and the search goes on after the next character
      if (begin > piece_start) {
        VIVACE_TRY(split_from(step_index + 1, text.substr(piece_start, begin - piece_start), scratch, sink));
        piece_start = begin;
      }
      if (begin >= text.size()) break;
      search = begin + utf8_step(text, begin).length;
      continue;
    }
    if (begin > piece_start) {
      VIVACE_TRY(split_from(step_index + 1, text.substr(piece_start, begin - piece_start), scratch, sink));
    }
    VIVACE_TRY(split_from(step_index + 1, text.substr(begin, end - begin), scratch, sink));
    piece_start = search = end;
  }
  return split_from(step_index + 1, text.substr(piece_start), scratch, sink);
}

}  // namespace vivace::model
