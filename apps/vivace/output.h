#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "vivace/status.h"

// Where the program's words go. Standard output carries results only.

namespace vivace::cli {

constexpr int kFailure = 1;
constexpr int kMistake = 2;  ///< in the command line

/// Writes to standard output and flushes, so that a reader at the other end of a pipe sees it now.
void write_out(std::string_view text);
/// One document and a line end. Invalid UTF-8 inside strings becomes U+FFFD.
void print_json(const nlohmann::ordered_json& json);
std::string json_text(const nlohmann::ordered_json& json);
/// A message of the engine with its options as the flags that the user types: max_batch as --max-batch.
std::string in_flags(std::string_view message);
/// "vivace: <message>", in_flags() and visible(), on standard error; returns the exit code: kMistake where the value of a flag is wrong,
/// also where only the model told; kFailure where a file, a GPU, memory or the like is missing.
int fail(const Status& status);
/// A line on standard error.
void note(const std::string& text);
/// Standard error is a terminal: a progress line may be redrawn.
bool interactive();
/// Leaves no file that is written in part.
Status write_file(const std::string& path, std::string_view text);
/// Whether write_file could work. Leaves the file as it is, and leaves none where there was none.
Status check_writable(const std::string& path);
/// From here on an interrupt (Ctrl-C) is said on standard error before it ends the program.
void say_when_interrupted();
/// Control characters as escapes and invalid UTF-8 as U+FFFD, so that a token can be shown inside a line.
std::string visible(std::string_view bytes);

/// A progress line: redrawn on a terminal, else a line now and then.
class ProgressLine {
 public:
  /// `share` in [0, 1] decides how often lines are written when not on a terminal (each tenth).
  void update(double share, const std::string& text);
  /// Ends the line; later updates begin a new one.
  void finish();

 private:
  int tenth_ = -1;
  size_t width_ = 0;
};

}  // namespace vivace::cli
