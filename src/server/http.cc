#include "src/server/http.h"

#include <fmt/format.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/field.hpp>
#include <boost/beast/http/parser.hpp>
#include <optional>
#include <thread>
#include <unordered_set>

#include "src/core/error.h"
#include "src/core/guard.h"

namespace vivace::server {

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr size_t kReadBytes = 4096, kBodyReadBytes = size_t{64} << 10;
/// Of requests that a client sends before its answer; more ends the connection.
constexpr size_t kPipelinedBytes = size_t{64} << 10;
constexpr Milliseconds kSweep{50};      ///< how often deadlines are looked at
constexpr Milliseconds kLinger{2'000};  ///< for the client to read an answer that ends the connection

/// A body that grows with what arrives: Beast's own reserves what the header promises.
struct GrowingBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool kIsRequest, class Fields>
    reader(http::header<kIsRequest, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<std::uint64_t>&, error_code& ec) { ec = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, error_code& ec) {
      ec = {};
      size_t bytes = 0;
      for (auto it = asio::buffer_sequence_begin(buffers); it != asio::buffer_sequence_end(buffers); ++it) {
        const asio::const_buffer part = *it;
        body_.append(static_cast<const char*>(part.data()), part.size());
        bytes += part.size();
      }
      return bytes;
    }
    void finish(error_code& ec) { ec = {}; }

   private:
    value_type& body_;
  };
};

std::string_view reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Status";
  }
}

/// Status line and headers, without the empty line and without what says how long the body is.
std::string head_of(const HttpResponse& response, bool close) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", response.status,
                                 reason_of(response.status), response.content_type);
  for (const auto& [name, value] : response.headers) head += fmt::format("{}: {}\r\n", name, value);
  if (close) head += "Connection: close\r\n";
  return head;
}

/// "/health" of "/health?x=1", and of "http://host/health?x=1": the form that a proxy is asked in, which every server takes.
std::string path_of(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!beast::iequals({target.data(), std::min(target.size(), scheme.size())},
                        {scheme.data(), scheme.size()}))
      continue;
    const size_t end = target.find_first_of("/?", scheme.size());
    target = end == target.npos ? std::string_view() : target.substr(end);
    if (!target.starts_with('/')) return "/";
  }
  return std::string(target.substr(0, target.find('?')));
}

std::string peer_of(const tcp::socket& socket) {
  error_code ignored;
  const tcp::endpoint peer = socket.remote_endpoint(ignored);
  return fmt::format("{}:{}", peer.address().to_string(ignored), peer.port());
}

class Connection;
class ServerImpl;

/// One thread, its connections, and the timer that looks at their deadlines. Everything of a connection happens here.
struct IoThread {
  explicit IoThread(ServerImpl& server) : server(server) {}
  ServerImpl& server;
  asio::io_context context{1};
  asio::steady_timer timer{context};
  std::unordered_set<std::shared_ptr<Connection>> connections;
  bool stopping = false;
  std::thread thread;
};

class ServerImpl final : public HttpServer {
 public:
  ServerImpl(const HttpOptions& options, Handler handler, Refuse refuse)
      : options_(options), handler_(std::move(handler)), refuse_(std::move(refuse)) {}
  ~ServerImpl() override;

  Status start();
  int port() const override { return port_; }
  HttpStats stats() const override {
    return {
        .open = open_, .accepted = accepted_, .refused = refused_, .slow = slow_, .timed_out = timed_out_};
  }
  void drain() override;

 private:
  friend class Connection;

  void accept();
  void adopt(IoThread& io, tcp::socket socket);
  void sweep(IoThread& io);
  void run(IoThread& io);
  void refuse_connection(tcp::socket socket);

  const HttpOptions options_;
  const Handler handler_;
  const Refuse refuse_;
  std::vector<std::unique_ptr<IoThread>> threads_;
  std::optional<tcp::acceptor> acceptor_;
  std::optional<asio::steady_timer> accept_again_;
  size_t next_thread_ = 0;
  int port_ = 0;
  std::atomic<bool> draining_{false};
  std::atomic<int64_t> open_{0}, accepted_{0}, refused_{0}, slow_{0}, timed_out_{0};
  const std::shared_ptr<std::atomic<int64_t>> body_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
};

/// Bytes of a body that count against the total until this is destroyed.
class BodyShare {
 public:
  explicit BodyShare(std::shared_ptr<std::atomic<int64_t>> total) : total_(std::move(total)) {}
  ~BodyShare() { *total_ -= bytes_; }
  BodyShare(const BodyShare&) = delete;
  BodyShare& operator=(const BodyShare&) = delete;
  /// The total afterwards.
  int64_t grow_to(int64_t bytes) {
    const int64_t more = bytes - bytes_;
    bytes_ = bytes;
    return *total_ += more;
  }

 private:
  std::shared_ptr<std::atomic<int64_t>> total_;
  int64_t bytes_ = 0;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(IoThread& io, tcp::socket socket) : io_(io), server_(io.server), socket_(std::move(socket)) {}

  void start();
  /// Called by the sweep.
  void look_at_deadline(Clock::time_point now);
  /// Closes if it is between two requests.
  void drain();
  void close(Call::End why, bool reset = false);

 private:
  const HttpOptions& options() const { return server_.options_; }
  /// Reads unless a read is under way; closes when too much is there that nobody wants yet.
  void read();
  void on_read(const error_code& ec, size_t bytes);
  void on_end(const error_code& ec);
  void parse();
  /// The status that refuses a request for its headers, or 0.
  int header_misfit(std::string& message) const;
  void on_header();
  bool count_body();
  void dispatch();
  void refuse(int status, const std::string& message);
  int status_of(const error_code& ec, std::string& message) const;

  /// Asks the call for its next step, unless a write is under way.
  void pump();
  void take(CallStep step);
  void write(std::string bytes, Clock::time_point since);
  void write_some();
  void on_write(const error_code& ec, size_t bytes);
  void on_written();
  void end_answer();
  void linger();

  /// An exception (memory is exhausted) costs the connection, not the thread.
  template <class Body>
  void safely(Body&& body) {
    try {
      body();
    } catch (const std::exception&) {
      close(Call::End::stopped);
    }
  }

  void expect_by(Clock::time_point deadline) { deadline_ = deadline; }

  IoThread& io_;
  ServerImpl& server_;
  tcp::socket socket_;
  std::vector<char> input_;    ///< of the read under way
  beast::flat_buffer buffer_;  ///< what was read and not parsed
  std::optional<http::request_parser<GrowingBody>> parser_;
  std::shared_ptr<BodyShare> share_;
  std::shared_ptr<Call> call_;
  std::string peer_;
  std::string out_;
  size_t written_ = 0;
  Clock::time_point received_;
  std::optional<Clock::time_point> deadline_;  ///< of what is read, or of what is written
  bool reading_ = false, writing_ = false, closed_ = false, lingering_ = false;
  bool header_done_ = false, continue_sent_ = false;
  bool keep_alive_ = true, chunked_ = true, head_only_ = false;
  bool streaming_ = false, answer_ends_ = false;  ///< the write under way is the last of the answer
};

void Connection::start() {
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  socket_.set_option(asio::socket_base::send_buffer_size(static_cast<int>(options().socket_buffer)), ignored);
  socket_.set_option(asio::socket_base::keep_alive(true), ignored);
  // What is sent and never acknowledged: the kernel gives up as soon as we would.
  const unsigned limit_ms = static_cast<unsigned>(options().write_timeout.count());
  setsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
  socket_.non_blocking(true, ignored);
  peer_ = peer_of(socket_);
  expect_by(Clock::now() + options().header_timeout);
  read();
}

void Connection::read() {
  if (reading_ || closed_) return;
  const bool busy = call_ != nullptr || writing_;
  if (busy && buffer_.size() >= kPipelinedBytes) {
    // Who reads no more does not notice either that the client goes, and would answer for nobody.
    if (call_) close(Call::End::client_gone);
    return;
  }
  reading_ = true;
  // Not into buffer_: it may be parsed while the read is under way.
  const size_t bytes = header_done_ && !busy ? kBodyReadBytes : kReadBytes;
  if (input_.size() != bytes) {
    input_.resize(bytes);
    input_.shrink_to_fit();
  }
  socket_.async_read_some(asio::buffer(input_), [self = shared_from_this()](const error_code& ec, size_t n) {
    self->safely([&] { self->on_read(ec, n); });
  });
}

void Connection::on_read(const error_code& ec, size_t bytes) {
  reading_ = false;
  if (closed_) return;
  if (ec) return on_end(ec);
  if (lingering_) return read();
  buffer_.commit(asio::buffer_copy(buffer_.prepare(bytes), asio::buffer(input_, bytes)));
  if (call_ || writing_) return read();
  parse();
}

/// The other side is gone, or the kernel gave up on one that acknowledges nothing (TCP_USER_TIMEOUT).
void Connection::on_end(const error_code& ec) {
  if (ec != asio::error::timed_out) {
    // The kernel tells the reason once: a write that has it may have completed and not been handled yet.
    asio::post(io_.context, [self = shared_from_this()] { self->close(Call::End::client_gone); });
    return;
  }
  ++server_.slow_;
  close(Call::End::too_slow);
}

void Connection::parse() {
  if (!parser_) {
    if (buffer_.size() == 0) return read();
    parser_.emplace();
    parser_->header_limit(static_cast<std::uint32_t>(options().max_header));
    parser_->body_limit(static_cast<std::uint64_t>(options().max_body));
    parser_->eager(true);
    header_done_ = continue_sent_ = false;
    share_ = std::make_shared<BodyShare>(server_.body_bytes_);
    received_ = Clock::now();
    expect_by(received_ + options().header_timeout);
  }
  while (true) {
    error_code ec;
    const size_t used = buffer_.size() > 0 ? parser_->put(buffer_.data(), ec) : 0;
    buffer_.consume(used);
    const bool more = ec == http::error::need_more || (used == 0 && !ec);
    if (ec && !more) {
      std::string message;
      const int status = status_of(ec, message);
      return refuse(status, message);
    }
    if (parser_->is_header_done() && !header_done_) {
      std::string message;
      if (const int status = header_misfit(message)) return refuse(status, message);
      on_header();
    }
    if (closed_) return;
    if (!count_body()) return refuse(503, "too many request bodies are being read; try again later");
    if (parser_->is_done()) return dispatch();
    if (!more) continue;
    // Chunk extensions and trailers have no limit of their own.
    if (buffer_.size() > static_cast<size_t>(options().max_header) + kBodyReadBytes)
      return refuse(431, "the headers of a chunk of the body are too long");
    return read();
  }
}

int Connection::header_misfit(std::string& message) const {
  const auto& request = parser_->get();
  const auto hosts = request.count(http::field::host);
  if (hosts > 1 || (hosts == 0 && request.version() >= 11)) {
    message = fmt::format("this is not an HTTP request: it has {} Host headers, needs 1", hosts);
    return 400;
  }
  if (const auto coded = request.find(http::field::content_encoding);
      coded != request.end() && !beast::iequals(coded->value(), "identity")) {
    const auto value = coded->value();
    message = fmt::format("Content-Encoding is {}, needs none: the body as it is",
                          std::string_view(value.data(), std::min<size_t>(value.size(), 80)));
    return 415;
  }
  const auto [first, end] = request.equal_range(http::field::transfer_encoding);
  if (first == end) return 0;
  const auto value = first->value();
  if (std::next(first) == end && beast::iequals(value, "chunked")) return 0;
  message = std::next(first) != end
                ? std::string("Transfer-Encoding is given more than once, needs one: chunked")
                : fmt::format("Transfer-Encoding is {}, needs chunked",
                              std::string_view(value.data(), std::min<size_t>(value.size(), 80)));
  return 501;
}

void Connection::on_header() {
  header_done_ = true;
  const auto& message = parser_->get();
  expect_by(Clock::now() + options().body_timeout);
  chunked_ = message.version() >= 11;
  keep_alive_ = message.keep_alive();
  head_only_ = message.method() == http::verb::head;
  if (parser_->is_done() || continue_sent_ || !chunked_) return;
  if (!beast::iequals(message[http::field::expect], "100-continue")) return;
  continue_sent_ = true;
  static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  error_code ignored;  // 25 bytes into an empty buffer; a client that does not get them sends its body later
  socket_.write_some(asio::buffer(kContinue.data(), kContinue.size()), ignored);
}

bool Connection::count_body() {
  return share_->grow_to(std::ssize(parser_->get().body())) <= options().max_body_total;
}

int Connection::status_of(const error_code& ec, std::string& message) const {
  if (ec == http::error::body_limit) {
    const auto length = parser_->get()[http::field::content_length];
    message = length.empty()
                  ? fmt::format("the body has more than {} bytes, which is the limit", options().max_body)
                  : fmt::format("the body has {} bytes, the limit is {}",
                                std::string_view(length.data(), length.size()), options().max_body);
    return 413;
  }
  if (ec == http::error::header_limit) {
    message = fmt::format("request line and headers have more than {} bytes, which is the limit",
                          options().max_header);
    return 431;
  }
  message = fmt::format("this is not an HTTP request: {}", ec.message());
  return 400;
}

/// Answers what is no request; the connection ends with it, since nobody knows where the next request begins.
void Connection::refuse(int status, const std::string& message) {
  RefusedRequest refused{.status = status, .message = message, .peer = peer_, .method = {}, .path = {}};
  if (parser_) {
    const auto& read = parser_->get();
    refused.method = std::string(read.method_string());
    refused.path = path_of({read.target().data(), read.target().size()});
  }
  parser_.reset();
  share_.reset();
  keep_alive_ = false;
  head_only_ = false;
  CallStep step{.kind = CallStep::reply};
  step.response = server_.refuse_(refused);
  take(std::move(step));
}

void Connection::dispatch() {
  auto message = parser_->release();
  parser_.reset();
  header_done_ = false;
  HttpRequest request;
  request.method = std::string(message.method_string());
  const auto target = message.target();
  request.path = path_of({target.data(), target.size()});
  request.authorization = std::string(message[http::field::authorization]);
  request.request_id = std::string(message["x-request-id"]);
  request.body = std::move(message.body());
  request.peer = peer_;
  request.received = received_;
  request.body_share = std::exchange(share_, nullptr);
  if (head_only_) request.method = "GET";
  if (buffer_.size() == 0) buffer_.shrink_to_fit();
  deadline_.reset();
  streaming_ = false;
  Wake wake = [weak = weak_from_this(), &context = io_.context] {
    if (std::shared_ptr<Connection> self = weak.lock())
      asio::post(context, [self = std::move(self)] { self->safely([&] { self->pump(); }); });
  };
  call_ = server_.handler_(std::move(request), std::move(wake));
  read();  // so that it is noticed when the client goes
  pump();
}

void Connection::pump() {
  if (closed_ || writing_ || !call_) return;
  take(call_->next());
}

void Connection::take(CallStep step) {
  switch (step.kind) {
    case CallStep::wait:
      return;
    case CallStep::cut:
      ++server_.slow_;
      return close(Call::End::too_slow, true);
    case CallStep::reply: {
      if (step.close || server_.draining_) keep_alive_ = false;
      std::string bytes = head_of(step.response, !keep_alive_);
      bytes += fmt::format("Content-Length: {}\r\n\r\n", step.response.body.size());
      if (!head_only_) bytes += step.response.body;
      answer_ends_ = true;
      return write(std::move(bytes), Clock::now());
    }
    case CallStep::begin: {
      if (step.close || server_.draining_ || !chunked_) keep_alive_ = false;
      streaming_ = true;
      std::string bytes = head_of(step.response, !keep_alive_);
      bytes += chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
      return write(std::move(bytes), Clock::now());
    }
    case CallStep::event: {
      if (step.close) keep_alive_ = false;
      std::string bytes = std::move(step.payload);
      if (chunked_) {
        bytes.insert(0, fmt::format("{:x}\r\n", bytes.size()));
        bytes += step.last ? "\r\n0\r\n\r\n" : "\r\n";
      }
      answer_ends_ = step.last;
      return write(std::move(bytes), step.since);
    }
  }
}

void Connection::write(std::string bytes, Clock::time_point since) {
  out_ = std::move(bytes);
  written_ = 0;
  writing_ = true;
  deadline_ = since + options().write_timeout;
  write_some();
}

void Connection::write_some() {
  socket_.async_write_some(asio::buffer(out_.data() + written_, out_.size() - written_),
                           [self = shared_from_this()](const error_code& ec, size_t bytes) {
                             self->safely([&] { self->on_write(ec, bytes); });
                           });
}

void Connection::on_write(const error_code& ec, size_t bytes) {
  if (closed_) return;
  if (ec) return on_end(ec);
  written_ += bytes;
  if (written_ == out_.size()) return on_written();
  // A long answer may take long as long as it moves; an event of a stream may not.
  if (!streaming_) deadline_ = Clock::now() + options().write_timeout;
  write_some();
}

void Connection::on_written() {
  writing_ = false;
  deadline_.reset();
  if (out_.capacity() > kBodyReadBytes) out_ = {};
  if (std::exchange(answer_ends_, false)) return end_answer();
  pump();
}

void Connection::end_answer() {
  if (call_) std::exchange(call_, nullptr)->detach(Call::End::answered);
  streaming_ = false;
  if (!keep_alive_ || server_.draining_) return linger();
  expect_by(Clock::now() + options().idle_timeout);
  parse();
}

/// Lets the client read the answer: closing with unread input would have the kernel throw the answer away.
void Connection::linger() {
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  lingering_ = true;
  buffer_.consume(buffer_.size());
  expect_by(Clock::now() + kLinger);
  read();
}

void Connection::look_at_deadline(Clock::time_point now) {
  if (closed_ || !deadline_ || now < *deadline_) return;
  if (writing_) {
    ++server_.slow_;
    return close(Call::End::too_slow, true);
  }
  if (lingering_) return close(Call::End::stopped);
  ++server_.timed_out_;
  if (!parser_) return close(Call::End::stopped);
  refuse(408, header_done_
                  ? fmt::format("the body did not arrive within {} ms", options().body_timeout.count())
                  : fmt::format("the headers did not arrive within {} ms", options().header_timeout.count()));
}

void Connection::drain() {
  if (!closed_ && !call_ && !writing_ && !lingering_ && !parser_) close(Call::End::stopped);
}

void Connection::close(Call::End why, bool reset) {
  if (closed_) return;
  closed_ = true;
  if (call_) std::exchange(call_, nullptr)->detach(why);
  share_.reset();
  error_code ignored;
  // A reader that is cut would otherwise keep what the kernel holds for it.
  if (reset) socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  socket_.close(ignored);
  --server_.open_;
  io_.connections.erase(shared_from_this());
}

// The server.

Status ServerImpl::start() {
  error_code ec;
  const asio::ip::address address =
      asio::ip::make_address(options_.host == "localhost" ? "127.0.0.1" : options_.host, ec);
  if (ec)
    return invalid_argument("server: host is '{}', needs an IP address such as 127.0.0.1, 0.0.0.0 or ::",
                            options_.host);
  for (int i = 0; i < options_.io_threads; ++i) threads_.push_back(std::make_unique<IoThread>(*this));
  IoThread& first = *threads_.front();
  acceptor_.emplace(first.context);
  accept_again_.emplace(first.context);
  const tcp::endpoint endpoint(address, static_cast<unsigned short>(options_.port));
  const auto refused = [&](const char* what) {
    const bool taken = ec == asio::error::address_in_use;
    return io_error("server: cannot {} {} port {}: {}{}", what, options_.host, options_.port, ec.message(),
                    taken ? "; port 0 takes one that is free" : "");
  };
  if (acceptor_->open(endpoint.protocol(), ec)) return refused("open a socket for");
  acceptor_->set_option(tcp::acceptor::reuse_address(true), ec);
  if (acceptor_->bind(endpoint, ec)) return refused("bind");
  if (acceptor_->listen(4096, ec)) return refused("listen on");
  acceptor_->non_blocking(true, ec);
  port_ = acceptor_->local_endpoint(ec).port();
  accept();
  for (const auto& io : threads_) {
    sweep(*io);
    io->thread = std::thread([this, &io = *io] { run(io); });
  }
  return {};
}

void ServerImpl::run(IoThread& io) {
  while (true) {
    try {
      io.context.run();
      return;
    } catch (const std::exception&) {
      // Memory is exhausted, for a new connection or a look at deadlines.
    }
  }
}

void ServerImpl::accept() {
  IoThread& io = *threads_[next_thread_++ % threads_.size()];
  acceptor_->async_accept(io.context, [this, &io](const error_code& ec, tcp::socket socket) {
    if (ec == asio::error::operation_aborted || !acceptor_->is_open()) return;
    if (ec) {  // most likely no descriptor is left; one that ends gives one back
      accept_again_->expires_after(Milliseconds(20));
      accept_again_->async_wait([this](const error_code& stopped) {
        if (!stopped) accept();
      });
      return;
    }
    if (open_ >= options_.max_connections) {
      refuse_connection(std::move(socket));
    } else {
      ++open_;
      ++accepted_;
      asio::post(io.context,
                 [this, &io, socket = std::move(socket)]() mutable { adopt(io, std::move(socket)); });
    }
    accept();
  });
}

void ServerImpl::adopt(IoThread& io, tcp::socket socket) {
  if (io.stopping) {
    --open_;
    return;
  }
  const auto connection = std::make_shared<Connection>(io, std::move(socket));
  io.connections.insert(connection);
  connection->start();
}

void ServerImpl::refuse_connection(tcp::socket socket) {
  ++refused_;
  const HttpResponse response = refuse_(
      {.status = 503,
       .message = fmt::format("{} connections are open, which is the limit", options_.max_connections),
       .peer = peer_of(socket),
       .method = {},
       .path = {}});
  std::string bytes = head_of(response, true);
  bytes += fmt::format("Content-Length: {}\r\n\r\n{}", response.body.size(), response.body);
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(bytes), ignored);
  socket.shutdown(tcp::socket::shutdown_send, ignored);
}

void ServerImpl::sweep(IoThread& io) {
  io.timer.expires_after(kSweep);
  io.timer.async_wait([this, &io](const error_code& ec) {
    if (ec || io.stopping) return;
    const Clock::time_point now = Clock::now();
    sweep(io);
    const std::vector<std::shared_ptr<Connection>> all(io.connections.begin(), io.connections.end());
    for (const auto& connection : all) connection->look_at_deadline(now);
  });
}

void ServerImpl::drain() {
  draining_ = true;
  for (const auto& io : threads_) {
    asio::post(io->context, [&io = *io] {
      const std::vector<std::shared_ptr<Connection>> all(io.connections.begin(), io.connections.end());
      for (const auto& connection : all) connection->drain();
    });
  }
}

ServerImpl::~ServerImpl() {
  for (const auto& io : threads_) {
    asio::post(io->context, [this, &io = *io] {
      if (&io == threads_.front().get()) {
        error_code ignored;
        acceptor_->close(ignored);
        accept_again_->cancel(ignored);
      }
      io.stopping = true;
      io.timer.cancel();
      const std::vector<std::shared_ptr<Connection>> all(io.connections.begin(), io.connections.end());
      for (const auto& connection : all) connection->close(Call::End::stopped);
    });
  }
  for (const auto& io : threads_)
    if (io->thread.joinable()) io->thread.join();
}

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const HttpOptions& options, Handler handler,
                                                       Refuse refuse) {
  return guarded("server", [&]() -> Result<std::unique_ptr<HttpServer>> {
    auto server = std::make_unique<ServerImpl>(options, std::move(handler), std::move(refuse));
    VIVACE_TRY(server->start());
    return Result<std::unique_ptr<HttpServer>>(std::move(server));
  });
}

}  // namespace vivace::server
