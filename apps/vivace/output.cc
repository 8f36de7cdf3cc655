#include "apps/vivace/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "src/core/error.h"
#include "src/core/rename.h"
#include "src/model/tokenizer.h"

namespace vivace::cli {

void write_out(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void print_json(const nlohmann::ordered_json& json) {
  write_out(json_text(json));
}

std::string in_flags(std::string_view message) {
  if (message.starts_with("--dataset: ")) return std::string(message);  // the fields of a file
  // Options that are no word of every day; what checks the others is at the command line.
  static const std::pair<std::string_view, std::string> kFlags[] = {
      {"kv_dtype", "--kv-dtype"},           {"router_mode", "--router-mode"},
      {"max_model_len", "--max-model-len"}, {"max_batch", "--max-batch"},
      {"token_budget", "--token-budget"},   {"page_tokens", "--page-tokens"},
      {"kv_memory_bytes", "--kv-memory"},   {"logit_bias", "--logit-bias"},
      {"max_tokens", "--max-tokens"},       {"repetition_penalty", "--repetition-penalty"},
  };
  std::string text = renamed(message, kFlags);
  constexpr std::string_view kRequest = "request: ";
  for (const std::string_view option : {"stop[", "temperature is ", "top_p is ", "min_p is "}) {
    if (text.starts_with(std::string(kRequest).append(option))) text.insert(kRequest.size(), "--");
  }
  for (const std::string_view option : {"threads", "device", "window", "host", "port"}) {
    for (const std::string& before : {std::string(), std::string("engine: "), std::string("server: ")}) {
      const std::string start = fmt::format("{}{} is ", before, option);
      if (text.starts_with(start)) text.insert(before.size(), "--");
    }
  }
  return text;
}

namespace {

/// "--window is 1, ...", "request: --prompt-ids[1] is 9, ..."; not "--compare: FILE: ...", which is about a file.
bool is_about_a_value(std::string_view message) {
  const size_t place = message.find(": ");
  if (place < message.find(' ')) message.remove_prefix(place + 2);
  if (!message.starts_with("--")) return false;
  message.remove_prefix(std::min(message.find(' '), message.size()));
  return message.starts_with(" is ") || message.starts_with(" has ") || message.starts_with(" names ");
}

}  // namespace

int fail(const Status& status) {
  const std::string message = in_flags(status.message());
  std::fprintf(stderr, "vivace: %s\n", visible(message).c_str());
  return status.code() == Code::invalid_argument && is_about_a_value(message) ? kMistake : kFailure;
}

void note(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
}

bool interactive() {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  return terminal;
}

Status write_file(const std::string& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return io_error("{}: cannot be written: {}", path, std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) == 0 && written) return {};
  const Status failed = io_error("{}: was not written completely: {}", path, std::strerror(errno));
  std::error_code ignored;  // a device or a pipe stays, and so does a link
  if (std::filesystem::is_regular_file(std::filesystem::symlink_status(path, ignored))) {
    std::filesystem::remove(path, ignored);
  }
  return failed;
}

Status check_writable(const std::string& path) {
  // A file that is there is opened; only one that this call made is removed.
  std::error_code failure;
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(path, failure));
  std::FILE* file = std::fopen(path.c_str(), there ? "ab" : "wbx");
  if (file == nullptr) return io_error("{}: cannot be written: {}", path, std::strerror(errno));
  std::fclose(file);
  if (!there) std::filesystem::remove(path, failure);
  return {};
}

void say_when_interrupted() {
  std::signal(SIGINT, [](int signal) {  // async-signal-safe calls alone
    constexpr std::string_view kText = "\nvivace: interrupted; what was to be written at the end is not\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  });
}

std::string visible(std::string_view bytes) {
  model::Utf8Stream stream;
  const std::string valid = stream.push(bytes) + stream.finish();
  std::string out;
  for (const char c : valid) {
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out;
}

void ProgressLine::update(double share, const std::string& text) {
  if (interactive()) {
    const size_t padding = width_ > text.size() ? width_ - text.size() : 0;
    std::fprintf(stderr, "\r%s%s", text.c_str(), std::string(padding, ' ').c_str());
    std::fflush(stderr);
    width_ = text.size();
    return;
  }
  const int tenth = static_cast<int>(share * 10);
  if (tenth == tenth_) return;
  tenth_ = tenth;
  note(text);
}

void ProgressLine::finish() {
  if (interactive() && width_ > 0) std::fprintf(stderr, "\n");
  width_ = 0;
}

}  // namespace vivace::cli
