#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// A blocking HTTP client that shows what came over the wire, and that can misbehave.

namespace vivace::server {

using Json = nlohmann::json;

struct Reply {
  int status = 0;                              ///< 0: the connection ended before a status line
  std::map<std::string, std::string> headers;  ///< names in lower case
  std::string body;
  std::vector<std::string> chunks;  ///< of a chunked body
  bool whole = false;               ///< the body came to its end

  std::string header(const std::string& name) const {
    const auto it = headers.find(name);
    return it == headers.end() ? "" : it->second;
  }
  Json json() const {
    Json value = Json::parse(body, nullptr, false);
    EXPECT_FALSE(value.is_discarded()) << status << " " << body;
    return value;
  }
  /// The JSON of each event; [DONE] is checked and left out.
  std::vector<Json> events() const {
    std::vector<Json> out;
    bool done = false;
    for (const std::string& chunk : chunks) {
      EXPECT_TRUE(chunk.starts_with("data: ") && chunk.ends_with("\n\n")) << chunk;
      EXPECT_EQ(std::ranges::count(chunk, '\n'), 2) << "one event a chunk: " << chunk;
      EXPECT_FALSE(done) << "an event after [DONE]: " << chunk;
      const std::string data = chunk.substr(6, chunk.size() - 8);
      done = data == "[DONE]";
      if (done) continue;
      out.push_back(Json::parse(data, nullptr, false));
      EXPECT_FALSE(out.back().is_discarded()) << data;
    }
    done_ = done;
    return out;
  }
  bool done() const { return done_; }

 private:
  mutable bool done_ = false;
};

class Client {
 public:
  explicit Client(int port, int receive_buffer = 0) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    if (receive_buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_), held_(std::move(other.held_)) {}
  Client(const Client&) = delete;

  bool connected() const { return connected_; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  /// Ends the connection with RST.
  void reset() {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close();
  }
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  static std::string post(const std::string& path, const std::string& body, const std::string& headers = {}) {
    return "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  static std::string get(const std::string& path, const std::string& headers = {}) {
    return "GET " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n";
  }
  /// Reads more; false at the end of the connection, or after 20 s.
  bool more() {
    char bytes[4096];
    const ssize_t n = recv(fd_, bytes, sizeof bytes, 0);
    if (n > 0) held_.append(bytes, static_cast<size_t>(n));
    return n > 0;
  }
  /// Whether the server closed the connection within the time.
  bool closed_within(int ms) {
    pollfd p{.fd = fd_, .events = POLLIN, .revents = 0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    while (true) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()).count();
      if (left <= 0 || poll(&p, 1, static_cast<int>(left)) <= 0) return false;
      if (!more()) return true;
    }
  }
  /// "" when the connection ended first.
  std::string line() {
    while (true) {
      const size_t end = held_.find("\r\n");
      if (end != std::string::npos) {
        std::string text = held_.substr(0, end);
        held_.erase(0, end + 2);
        return text;
      }
      if (!more()) return {};
    }
  }
  bool take(size_t bytes, std::string& out) {
    while (held_.size() < bytes)
      if (!more()) return false;
    out = held_.substr(0, bytes);
    held_.erase(0, bytes);
    return true;
  }
  /// Status line and headers.
  Reply head() {
    Reply reply;
    const std::string status = line();
    if (!status.starts_with("HTTP/1.1 ")) return reply;
    reply.status = std::stoi(status.substr(9, 3));
    for (std::string text = line(); !text.empty(); text = line()) {
      const size_t colon = text.find(": ");
      std::string name = text.substr(0, colon);
      std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
      reply.headers[name] = colon == std::string::npos ? "" : text.substr(colon + 2);
    }
    return reply;
  }
  /// One chunk of a chunked body; absent at its end and at the end of the connection.
  std::optional<std::string> chunk(bool* whole = nullptr) {
    const std::string size = line();
    if (size.empty()) return std::nullopt;
    const size_t bytes = std::stoul(size, nullptr, 16);
    std::string text, end;
    if (bytes > 0 && !take(bytes, text)) return std::nullopt;
    if (!take(2, end)) return std::nullopt;
    if (bytes > 0) return text;
    if (whole != nullptr) *whole = true;
    return std::nullopt;
  }
  Reply read(bool head_only = false) {
    Reply reply = head();
    if (reply.status == 100) reply = head();
    if (reply.status == 0) return reply;
    if (reply.header("transfer-encoding") == "chunked") {
      while (auto text = chunk(&reply.whole)) {
        reply.body += *text;
        reply.chunks.push_back(*std::move(text));
      }
    } else if (!reply.header("content-length").empty()) {
      const size_t bytes = head_only ? 0 : std::stoul(reply.header("content-length"));
      reply.whole = take(bytes, reply.body);
    } else {
      while (more()) {
      }
      reply.body = std::exchange(held_, {});
      reply.whole = true;
    }
    return reply;
  }
  Reply request(const std::string& bytes) {
    send(bytes);
    return read();
  }

 private:
  int fd_ = -1;
  bool connected_ = false;
  std::string held_;
};

}  // namespace vivace::server
