// Input: the bytes that a client sends to a server before it leaves; what is before a byte 0xFF is sent, and given time,
// before what is after it. What comes back are whole answers in HTTP, of which the last may be cut, and once the client is
// gone the server has neither a connection nor a request nor a page of it.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

#include "src/engine/engine.h"
#include "src/server/server.h"
#include "tests/fuzz/served_model.h"

namespace {

using namespace vivace;          // NOLINT: a fuzz target
using namespace vivace::server;  // NOLINT

constexpr int64_t kVocab = 4096;

/// Draws a token that depends on the last one of each request.
class Runner final : public engine::Runner {
 public:
  Status enqueue(const engine::StepInput& input) override {
    drawn_.clear();
    for (const engine::SampleSlot& slot : input.samples) {
      const int32_t last = input.token_ids[static_cast<size_t>(slot.row)];
      drawn_.push_back({.id = static_cast<int32_t>((last * int64_t{2654435761} + slot.position) % kVocab)});
    }
    return {};
  }
  Status finish(std::vector<engine::Sampled>& sampled) override {
    sampled = drawn_;
    return {};
  }
  bool overlaps() const override { return false; }
  int64_t vocab() const override { return kVocab; }
  int64_t max_model_len() const override { return 64; }
  int64_t pages() const override { return 256; }
  int64_t page_tokens() const override { return 4; }
  std::span<const int32_t> eos_ids() const override { return eos_; }
  Dispatch& dispatch() override { return dispatch_; }

 private:
  const std::vector<int32_t> eos_ = {2};
  std::vector<engine::Sampled> drawn_;
  Dispatch dispatch_;
};

struct Rig {
  ServedModel model = fuzz::served_model();
  std::unique_ptr<Engine> engine = fuzz::value_or_abort(
      engine::make_engine(std::make_unique<Runner>(), model.tokenizer, {},
                          {.on_plan = {}, .on_audit = [](const Status& status) { check(status.ok()); }}));
  std::unique_ptr<Server> server = fuzz::value_or_abort(Server::start(options(), model, *engine));

  static void check(bool holds) {
    if (!holds) __builtin_trap();
  }
  static ServerOptions options() {
    ServerOptions options;
    options.http.port = 0;
    options.http.io_threads = 1;
    options.http.max_header = 4096;
    options.http.max_body = 1 << 16;
    options.workers = 1;
    options.log = LogLevel::off;
    return options;
  }
  /// Nothing is left of any client.
  bool idle() const {
    const EngineStats s = engine->stats();
    return server->http_stats().open == 0 && s.running == 0 && s.waiting == 0 &&
           s.pages_free + s.pages_cached == s.pages_total;
  }
};

int connect_to(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const linger now{.l_onoff = 1, .l_linger = 0};  // so that a million connections leave no port behind
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
  return fd;
}

constexpr int kQuietMs = 2, kLongestMs = 10'000;

/// Sends all and reads what comes until nothing has come for a while; false once the connection is over.
bool exchange(int fd, std::string_view bytes, std::string& answer) {
  while (true) {
    pollfd wait{.fd = fd, .events = static_cast<short>(POLLIN | (bytes.empty() ? 0 : POLLOUT)), .revents = 0};
    if (poll(&wait, 1, bytes.empty() ? kQuietMs : kLongestMs) == 0) {
      Rig::check(bytes.empty());  // the server neither reads nor ends the connection
      return true;
    }
    if (wait.revents & POLLIN) {
      char buffer[4096];
      const ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) return false;
      answer.append(buffer, static_cast<size_t>(n));
    } else if (wait.revents & (POLLERR | POLLHUP)) {
      return false;
    } else if (wait.revents & POLLOUT) {
      const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
}

/// Sends part after part, then ends its side and reads the rest.
std::string talk(int port, std::string_view bytes) {
  constexpr int kMostParts = 8;
  const int fd = connect_to(port);
  std::string answer;
  bool open = true;
  for (int part = 1; open && (part == 1 || !bytes.empty()); ++part) {
    const size_t end = part < kMostParts ? std::min(bytes.find('\xff'), bytes.size()) : bytes.size();
    open = exchange(fd, bytes.substr(0, end), answer);
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
  if (open) shutdown(fd, SHUT_WR);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLongestMs);
  while (open && exchange(fd, {}, answer)) Rig::check(std::chrono::steady_clock::now() < end);
  close(fd);
  return answer;
}

/// Takes what is up to and with `end`, or all; false for all.
bool take_to(std::string_view& text, std::string_view end, std::string_view& taken) {
  const size_t at = text.find(end);
  taken = text.substr(0, at);
  text.remove_prefix(at == text.npos ? text.size() : at + end.size());
  return at != text.npos;
}

/// Takes the body of an answer with this head.
void take_body(std::string_view head, std::string_view& text) {
  static constexpr std::string_view kLength = "\r\nContent-Length: ";
  if (head.find("\r\nTransfer-Encoding: chunked") != head.npos) {
    std::string_view size;
    size_t bytes = 1;
    while (bytes > 0 && take_to(text, "\r\n", size)) {
      const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), bytes, 16);
      Rig::check(error == std::errc() && end == size.data() + size.size());
      if (text.size() < bytes + 2) return text.remove_prefix(text.size());  // cut
      Rig::check(text.substr(bytes, 2) == "\r\n");
      text.remove_prefix(bytes + 2);
    }
  } else if (const size_t at = head.find(kLength); at != head.npos) {
    size_t bytes = 0;
    std::from_chars(head.data() + at + kLength.size(), head.data() + head.size(), bytes);
    if (text.starts_with("HTTP/1.1 ")) return;  // that was an answer to HEAD
    text.remove_prefix(std::min(bytes, text.size()));
  } else {
    text.remove_prefix(text.size());  // a stream for a client of HTTP/1.0
  }
}

void check_answers(std::string_view text) {
  static constexpr std::string_view kVersion = "HTTP/1.1 ";
  while (!text.empty()) {
    std::string_view head;
    Rig::check(take_to(text, "\r\n\r\n", head) && head.starts_with(kVersion));
    int status = 0;
    std::from_chars(head.data() + kVersion.size(), head.data() + head.size(), status);
    Rig::check(status >= 100 && status < 600);
    if (status != 100) take_body(head, text);
  }
}

/// Until nothing is left of any client.
void wait_until_idle(const Rig& rig) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLongestMs);
  while (!rig.idle()) {
    Rig::check(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Rig& rig = *new Rig;
  check_answers(talk(rig.server->port(), std::string_view(reinterpret_cast<const char*>(data), size)));
  wait_until_idle(rig);
  const std::string metrics = talk(rig.server->port(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  Rig::check(metrics.find("\nvivace_requests_in_flight 0\n") != std::string::npos);
  wait_until_idle(rig);
  return 0;
}
