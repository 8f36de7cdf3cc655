#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace vivace::bench {

/// An HTTP server on this machine that does exactly what a test says, wrong things too: a script writes raw bytes. One
/// thread per connection; /v1/models is answered unless the script wants it.
class ScriptedServer {
 public:
  struct Call {
    std::string head, body;  ///< the request line with the headers; the body
  };

  /// One connection, in the hands of a script.
  class Peer {
   public:
    explicit Peer(int socket) : socket_(socket) {}
    void send(std::string_view bytes) {
      while (!bytes.empty()) {
        const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent <= 0) return;
        bytes.remove_prefix(static_cast<size_t>(sent));
      }
    }
    void answer(int status, std::string_view body, std::string_view type = "application/json") {
      send("HTTP/1.1 " + std::to_string(status) + " X\r\nContent-Type: " + std::string(type) +
           "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + std::string(body));
    }
    void begin_stream() {
      send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
    }
    void part(std::string_view bytes) { send(as_chunk(bytes)); }
    void event(std::string_view data) { part("data: " + std::string(data) + "\n\n"); }
    void end_stream() { send("0\r\n\r\n"); }
    void close() { open_ = false; }
    bool open() const { return open_; }

    static std::string as_chunk(std::string_view bytes) {
      char size[24];
      std::snprintf(size, sizeof(size), "%zx\r\n", bytes.size());
      return size + std::string(bytes) + "\r\n";
    }

   private:
    int socket_;
    bool open_ = true;
  };
  using Script = std::function<void(Peer&, const Call&)>;

  explicit ScriptedServer(Script script) : script_(std::move(script)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    ::listen(listener_, 1024);
    socklen_t size = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~ScriptedServer() {
    stop_listening();
    hang_up();
    for (std::thread& thread : threads_) thread.join();
  }

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  int64_t connections() const { return connections_; }
  void stop_listening() {
    if (!acceptor_.joinable()) return;
    ::shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    ::close(listener_);
  }
  /// Ends every connection, as a server does with idle ones.
  void hang_up() {
    const std::lock_guard lock(mutex_);
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }

 private:
  void accept_all() {
    for (;;) {
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      const int on = 1;
      ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      ++connections_;
      const std::lock_guard lock(mutex_);
      sockets_.insert(socket);
      threads_.emplace_back([this, socket] { serve(socket); });
    }
  }

  void serve(int socket) {
    std::string bytes;
    Peer peer(socket);
    Call call;
    while (peer.open() && read_call(socket, bytes, call)) {
      if (call.head.starts_with("GET /v1/models ")) {
        peer.answer(200, R"({"object":"list","data":[{"id":"tiny","object":"model","max_model_len":512}]})");
      } else {
        script_(peer, call);
      }
    }
    const std::lock_guard lock(mutex_);
    sockets_.erase(socket);
    ::close(socket);
  }

  static bool read_call(int socket, std::string& bytes, Call& call) {
    size_t head = 0, length = 0;
    for (;;) {
      if (const size_t end = bytes.find("\r\n\r\n"); end != std::string::npos && head == 0) {
        head = end + 4;
        const size_t at = bytes.find("Content-Length: ");
        if (at < end) length = std::stoul(bytes.substr(at + 16));
      }
      if (head > 0 && bytes.size() >= head + length) break;
      char part[4096];
      const ssize_t got = ::recv(socket, part, sizeof(part), 0);
      if (got <= 0) return false;
      bytes.append(part, static_cast<size_t>(got));
    }
    call = {bytes.substr(0, head), bytes.substr(head, length)};
    bytes.erase(0, head + length);
    return true;
  }

  Script script_;
  int listener_ = -1, port_ = 0;
  std::atomic<int64_t> connections_ = 0;
  std::thread acceptor_;
  std::mutex mutex_;
  std::set<int> sockets_;
  std::vector<std::thread> threads_;
};

}  // namespace vivace::bench
