#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/server/api.h"
#include "src/server/http.h"
#include "src/server/log.h"
#include "src/server/metrics.h"
#include "src/server/model.h"
#include "src/server/stream.h"
#include "src/server/worker_pool.h"

namespace vivace::server {

/// What calls share; outlives every call that is not detached.
struct CallContext {
  Engine& engine;
  const ServedModel& model;
  WorkerPool& pool;
  Metrics& metrics;
  Log& log;
  int64_t stream_buffer_bytes;  ///< what may wait for a reader of a stream
};

/// A request for text, from its body to its last byte. Three threads meet here: a worker parses, tokenises and submits,
/// the engine's thread delivers tokens, the connection's takes what is there to be written.
class GenerationCall final : public Call, public std::enable_shared_from_this<GenerationCall> {
 public:
  GenerationCall(CallContext& context, ApiKind kind, HttpRequest request, std::string request_id, Wake wake);
  ~GenerationCall() override;

  /// Hands the rest to the worker pool. False: the pool is full.
  bool start();
  /// Ends the request with an error that the client gets: as the answer, or as the last event of a stream.
  void fail(ApiError error);

  CallStep next() override;
  void detach(End end) override;

 private:
  struct Queued {
    int64_t index;
    TokenEvent token;
  };
  struct Times {
    Clock::time_point first, last;
    int64_t tokens = 0;
  };

  void prepare();
  std::optional<ApiError> submit_all();
  void make_writer(const ApiRequest& request, const std::vector<PromptTokens>& prompts);
  void on_token(int64_t index, const TokenEvent& token);
  void take_token(int64_t index, const TokenEvent& token);
  void measure(int64_t index, const TokenEvent& token);
  void keep(int64_t index, const TokenEvent& token);
  void finish_body();
  void wake_locked();
  CallStep reply_locked();
  void log_end(End end);

  CallContext& context_;
  /// Which outlives the context: what the engine's thread cancels, it may cancel when the call is detached and all else gone.
  Engine& engine_;
  const ApiKind kind_;
  HttpRequest request_;
  const std::string request_id_;

  // Set by the worker before anything is submitted.
  std::optional<AnswerWriter> writer_;
  bool stream_ = false, include_usage_ = false, keep_tokens_ = false;

  std::mutex mutex_;
  Wake wake_;
  std::vector<RequestId> ids_;
  std::vector<Choice> choices_;  ///< of a stream: only their usage
  std::vector<Times> times_;
  int64_t n_ = 1;  ///< choices of a prompt
  int64_t open_choices_ = 0;
  std::deque<Queued> queue_;
  int64_t queued_bytes_ = 0;
  std::optional<ApiError> error_;
  std::string body_;
  bool accepted_ = false, body_ready_ = false, begun_ = false, usage_sent_ = false, overflow_ = false;
  bool waiting_ = false;  ///< the connection asked and shall be woken
  bool detached_ = false;
  bool told_ = false;  ///< the last step was taken
};

}  // namespace vivace::server
