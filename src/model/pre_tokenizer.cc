#include "src/model/pre_tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <ctime>
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

// PCRE2 counts backtracking from one start of a match at a time, and does not count at all what a possessive
// repeat walks over, so its limit alone leaves a text quadratic or worse. What bounds the work is time: `Budget`
// allows a part that grows with the text, and it is asked before each call of pcre2_match(), none of which can be
// interrupted: calls are made small, and one with a larger limit is made only when it is predicted to fit.
constexpr double kSeconds = 0.5;
constexpr double kSecondsPerByte = 2e-6;  // published patterns take about 1/50 of it

// The first try of a match gets little, so that a hostile pattern is noticed early; each next one more, up to what
// published patterns need on a long run of one class.
constexpr uint32_t kFirstMatchLimit = 128;
constexpr uint64_t kMatchLimitGrowth = 8;
constexpr uint64_t kMatchLimitBase = 1'000'000;
constexpr uint64_t kMatchLimitPerByte = 8;

// An attempt to match at one place may walk over all the text behind it as often as the first limit counts. So many
// bytes of such text lie between two looks at the clock: a fraction of a second at worst, and a thousand words of a
// short text.
constexpr size_t kBytesPerLook = 2 << 20;

// A search tries some starts of a match between two looks at the clock: as many as take about a millisecond, and no more
// than walk over so many bytes if each walks to the end of the text once, however quick the starts before them were.
constexpr size_t kFirstStarts = 256, kMostStarts = 1 << 22;
constexpr size_t kBytesPerSearch = 128 << 20;
constexpr double kShortSearch = 1e-3, kLongSearch = 8e-3;  // seconds

constexpr uint32_t kHeapKib = 64 << 10;  // of one match by the interpreter

// Words found between two calls of the sink, whose time is not counted on the wall.
constexpr size_t kWordsPerFlush = 512;

/// The time that matching one text may take.
class Budget {
 public:
  void grant(size_t bytes) {
    const double seconds = kSecondsPerByte * static_cast<double>(bytes);
    allowed_ += seconds;
    wall_limit_ += seconds;
  }
  void start() { since_ = Clock::now(); }
  void stop() { spent_ += elapsed(); }
  /// Whether `more` seconds are left. The clock on the wall is cheap to read but goes on while other programs run;
  /// that of the thread has the last word.
  bool allows(double more) {
    const double wall = spent_ + elapsed();
    if (wall + more <= wall_limit_) return true;
    const double left = allowed_ - (thread_seconds() - thread_start_);
    wall_limit_ = wall + left;  // the thread cannot use what is left in less time on the wall
    return more <= left;
  }
  /// Seconds since start().
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }
  static double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point since_ = Clock::now();
  double thread_start_ = thread_seconds();
  double spent_ = 0, allowed_ = kSeconds, wall_limit_ = kSeconds;
};

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
      } else if (next == 'G') {
        return refused(pattern, "\\G", "depends on where a search begins");
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
  Owned<pcre2_code> anchored;  // matches where the search begins or not at all
  Owned<pcre2_code> windowed;
  bool jit = false;     // both have machine code
  std::string pattern;  // as the file has it, for messages
};

struct PreTokenizer::Scratch::Impl {
  Owned<pcre2_match_context> anchored, windowed;
  Owned<pcre2_jit_stack> jit_stack;
  std::vector<Owned<pcre2_match_data>> match_data;  // by step

  Budget budget;
  size_t walked = 0;             // by find_here() since the last look at the clock
  size_t starts = kFirstStarts;  // that a search tries at once
  std::vector<std::string_view> words;
  const Sink* sink = nullptr;

  void flush() {
    budget.stop();
    for (const std::string_view word : words) (*sink)(word);
    words.clear();
    budget.start();
  }

  struct Match {
    bool found = false;
    size_t begin = 0, end = 0;
  };
  /// A match at `search`, where nearly all matches of published patterns are. False: find_further() knows.
  bool find_here(size_t step_index, const Step& step, std::string_view text, size_t search, Match& match);
  /// The first match at or behind `search`.
  Result<Match> find_further(size_t step_index, const Step& step, std::string_view text, size_t search);
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
  Step step;
  step.jit = true;
  step.pattern = pattern;
  for (const auto& [compiled, option] :
       {std::pair(&step.anchored, PCRE2_ANCHORED), std::pair(&step.windowed, PCRE2_USE_OFFSET_LIMIT)}) {
    int code = 0;
    PCRE2_SIZE offset = 0;
    compiled->reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | option, &code, &offset,
                                  context.get()));
    if (!*compiled) {
      PCRE2_UCHAR message[256];
      pcre2_get_error_message(code, message, sizeof(message));
      return invalid_argument("pre_tokenizer: pattern '{}': {}", pattern.substr(0, 200),
                              reinterpret_cast<const char*>(message));
    }
    step.jit = pcre2_jit_compile(compiled->get(), PCRE2_JIT_COMPLETE) == 0 && step.jit;
  }
  steps_.push_back(std::move(step));
  return {};
}

PreTokenizer::Scratch::Scratch(const PreTokenizer& owner) : impl_(std::make_unique<Impl>()) {
  impl_->anchored.reset(pcre2_match_context_create(nullptr));
  impl_->windowed.reset(pcre2_match_context_create(nullptr));
  if (impl_->anchored) pcre2_set_match_limit(impl_->anchored.get(), kFirstMatchLimit);
  for (const auto* context : {&impl_->anchored, &impl_->windowed}) {
    if (*context) pcre2_set_heap_limit(context->get(), kHeapKib);
  }
  for (const Step& step : owner.steps_) {
    // Only the whole match is of interest, not its groups.
    impl_->match_data.emplace_back(pcre2_match_data_create(1, nullptr));
    if (step.jit && !impl_->jit_stack) {
      // JIT code would otherwise take its stack from the thread's, which may be small.
      impl_->jit_stack.reset(pcre2_jit_stack_create(32 << 10, 1 << 20, nullptr));
      for (const auto* context : {&impl_->anchored, &impl_->windowed}) {
        if (impl_->jit_stack && *context)
          pcre2_jit_stack_assign(context->get(), nullptr, impl_->jit_stack.get());
      }
    }
  }
}

PreTokenizer::Scratch::~Scratch() = default;

bool PreTokenizer::Scratch::Impl::find_here(size_t step_index, const Step& step, std::string_view text,
                                            size_t search, Match& match) {
  walked += text.size() - search + 1;
  if (walked >= kBytesPerLook) {
    walked = 0;
    if (!budget.allows(0)) return false;
  }
  const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  pcre2_match_data* data = match_data[step_index].get();
  const int found =
      step.jit ? pcre2_jit_match(step.anchored.get(), subject, text.size(), search, 0, data, anchored.get())
               : pcre2_match(step.anchored.get(), subject, text.size(), search, PCRE2_NO_UTF_CHECK, data,
                             anchored.get());
  if (found < 0) return false;
  match = {true, search, pcre2_get_ovector_pointer(data)[1]};
  return true;
}

Result<PreTokenizer::Scratch::Impl::Match> PreTokenizer::Scratch::Impl::find_further(size_t step_index,
                                                                                     const Step& step,
                                                                                     std::string_view text,
                                                                                     size_t search) {
  pcre2_match_data* data = match_data[step_index].get();
  const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const uint64_t most = std::min<uint64_t>(kMatchLimitPerByte * text.size() + kMatchLimitBase, UINT32_MAX);
  uint64_t limit = kFirstMatchLimit;
  double last_try = 0;  // CPU seconds
  const auto gave_up = [&](std::string_view why) {
    return invalid_argument("tokenizer: pattern '{}' gave up on a piece of {} bytes: {}",
                            step.pattern.substr(0, 200), text.size(), why);
  };
  while (true) {
    // A try with a larger limit takes longer by about as much; it is given to one start alone.
    if (!budget.allows(static_cast<double>(kMatchLimitGrowth) * last_try))
      return gave_up("it takes too long");
    const bool first_limit = limit == kFirstMatchLimit;
    const size_t some = std::min(starts, kBytesPerSearch / (text.size() - search + 1) + 1);
    const size_t last_start = std::min(search + (first_limit ? some : 1) - 1, text.size());
    pcre2_set_offset_limit(windowed.get(), last_start);
    pcre2_set_match_limit(windowed.get(), static_cast<uint32_t>(limit));
    const double begin = first_limit ? budget.elapsed() : Budget::thread_seconds();
    int found = pcre2_match(step.windowed.get(), subject, text.size(), search, PCRE2_NO_UTF_CHECK, data,
                            windowed.get());
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      // The interpreter keeps its backtracking points on the heap.
      found = pcre2_match(step.windowed.get(), subject, text.size(), search,
                          PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, windowed.get());
    }
    const double took = (first_limit ? budget.elapsed() : Budget::thread_seconds()) - begin;
    if (found == PCRE2_ERROR_MATCHLIMIT) {
      if (first_limit && last_start > search) {  // which start it was is not said: fewer
        starts = std::max<size_t>(1, some / 4);
        continue;
      }
      if (limit == most) return gave_up("it backtracks without end");
      last_try = first_limit ? 0 : took;
      limit = std::min(limit * kMatchLimitGrowth, most);
      continue;
    }
    if (first_limit && took < kShortSearch) starts = std::min(2 * some, kMostStarts);
    if (first_limit && took > kLongSearch) starts = std::max<size_t>(1, some / 4);
    if (found == PCRE2_ERROR_NOMATCH) {
      if (last_start == text.size()) return Match{};
      search = last_start + 1;
      while (search < text.size() && (static_cast<unsigned char>(text[search]) & 0xC0) == 0x80) ++search;
      // What one start needed its neighbour may need too: the limit stays, and what it takes is known.
      if (!first_limit) last_try = took / static_cast<double>(kMatchLimitGrowth);
      continue;
    }
    if (found < 0) return gave_up(fmt::format("PCRE2 error {}", found));
    const PCRE2_SIZE* match = pcre2_get_ovector_pointer(data);
    return Match{true, match[0], match[1]};
  }
}

Status PreTokenizer::split(std::string_view text, Scratch& scratch, const Sink& sink) const {
  Scratch::Impl& impl = *scratch.impl_;
  if (!impl.anchored || !impl.windowed ||
      std::any_of(impl.match_data.begin(), impl.match_data.end(), [](auto& d) { return !d; })) {
    return Status(Code::out_of_memory, "tokenizer: no memory to match a pattern");
  }
  impl.sink = &sink;
  impl.words.clear();
  impl.budget.grant(text.size());
  impl.budget.start();
  const Status status = split_from(0, text, impl);
  impl.flush();
  impl.budget.stop();
  return status;
}

// Recursion is as deep as there are steps.
Status PreTokenizer::split_from(size_t step_index, std::string_view text, Scratch::Impl& scratch) const {
  if (text.empty()) return {};
  if (step_index == steps_.size()) {
    scratch.words.push_back(text);
    if (scratch.words.size() == kWordsPerFlush) scratch.flush();
    return {};
  }
  const Step& step = steps_[step_index];
  Scratch::Impl::Match match;
  size_t piece_start = 0;  // everything before it went to the next step
  for (size_t search = 0; search <= text.size();) {
    if (!scratch.find_here(step_index, step, text, search, match)) {
      VIVACE_TRY_ASSIGN(match, scratch.find_further(step_index, step, text, search));
    }
    if (!match.found) break;
    const size_t begin = match.begin, end = match.end;
    if (end <= begin) {  // an empty match splits here and the search goes on after the next character
      if (begin > piece_start) {
        VIVACE_TRY(split_from(step_index + 1, text.substr(piece_start, begin - piece_start), scratch));
        piece_start = begin;
      }
      if (begin >= text.size()) break;
      search = begin + utf8_step(text, begin).length;
      continue;
    }
    if (begin > piece_start) {
      VIVACE_TRY(split_from(step_index + 1, text.substr(piece_start, begin - piece_start), scratch));
    }
    VIVACE_TRY(split_from(step_index + 1, text.substr(begin, end - begin), scratch));
    piece_start = search = end;
  }
  return split_from(step_index + 1, text.substr(piece_start), scratch);
}

}  // namespace vivace::model
