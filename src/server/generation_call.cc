#include "src/server/generation_call.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/core/guard.h"

namespace vivace::server {

namespace {

/// Milliseconds for the log: a microsecond is fine enough.
double log_ms(double seconds) {
  return std::round(seconds * 1e6) / 1e3;
}

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

/// Roughly what a queued event takes.
int64_t bytes_of(const TokenEvent& token) {
  return static_cast<int64_t>(sizeof(TokenEvent) + token.text.size() + token.top.size() * sizeof(TopLogprob));
}

std::string_view prefix_of(ApiKind kind) {
  switch (kind) {
    case ApiKind::completions:
      return "cmpl-";
    case ApiKind::chat:
      return "chatcmpl-";
    default:
      return "";
  }
}

}  // namespace

GenerationCall::GenerationCall(CallContext& context, ApiKind kind, HttpRequest request,
                               std::string request_id, Wake wake)
    : context_(context),
      engine_(context.engine),
      kind_(kind),
      request_(std::move(request)),
      request_id_(std::move(request_id)),
      wake_(std::move(wake)) {
  ++context_.metrics.in_flight;
}

GenerationCall::~GenerationCall() = default;

bool GenerationCall::start() {
  return context_.pool.post([self = shared_from_this()] { self->prepare(); });
}

void GenerationCall::prepare() {
  std::optional<ApiError> error;
  try {
    error = submit_all();
    if (!error) {
      const std::lock_guard lock(mutex_);
      accepted_ = true;
      wake_locked();
    }
  } catch (...) {
    try {
      error = error_of(status_of_exception("server"), kind_);
    } catch (...) {  // not even memory for the message
      error = ApiError{.status = 500};
    }
  }
  if (error) fail(*std::move(error));
}

std::optional<ApiError> GenerationCall::submit_all() {
  {
    const std::lock_guard lock(mutex_);
    if (detached_ || error_) return std::nullopt;
  }
  const int64_t max_model_len = engine_.max_model_len();
  const EngineOptions& options = engine_.options();
  auto parsed = parse_request(
      kind_, request_.body,
      {.model = context_.model.name,
       .vocab = engine_.vocab(),
       .max_model_len = max_model_len,
       .max_choices = std::min(kMaxChoices, options.max_batch + std::min(kMaxChoices, options.max_waiting))});
  request_.body = {};
  request_.body_share.reset();
  if (auto* error = std::get_if<ApiError>(&parsed)) return std::move(*error);
  const auto& request = std::get<ApiRequest>(parsed);
  auto tokenized = tokenize(request, context_.model, max_model_len);
  if (auto* error = std::get_if<ApiError>(&tokenized)) return std::move(*error);
  const auto& prompts = std::get<std::vector<PromptTokens>>(tokenized);
  make_writer(request, prompts);

  const int64_t count = request.choices();
  {
    const std::lock_guard lock(mutex_);
    if (detached_ || error_) return std::nullopt;
    stream_ = request.stream;
    include_usage_ = request.include_usage;
    n_ = request.n;
    keep_tokens_ = request.logprobs || kind_ == ApiKind::generate;
    choices_.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)  // for the log of a request that does not come to its end
      choices_[static_cast<size_t>(i)].usage.prompt_tokens =
          std::ssize(prompts[static_cast<size_t>(i / request.n)].ids);
    times_.resize(static_cast<size_t>(count));
    open_choices_ = count;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Result<RequestId> id =
        engine_.submit(engine_request(request, prompts, i, max_model_len),
                       [self = shared_from_this(), i](const TokenEvent& token) { self->on_token(i, token); });
    if (!id.ok()) return error_of(id.status(), kind_);
    std::unique_lock lock(mutex_);
    if (!detached_ && !error_) {
      ids_.push_back(*id);
      continue;
    }
    lock.unlock();
    engine_.cancel(*id);
    return std::nullopt;
  }
  for (const PromptTokens& prompt : prompts) context_.metrics.prompt_tokens += std::ssize(prompt.ids);
  return std::nullopt;
}

void GenerationCall::make_writer(const ApiRequest& request, const std::vector<PromptTokens>& prompts) {
  AnswerWriter::Options options;
  options.kind = kind_;
  options.id = std::string(prefix_of(kind_)) + request_id_;
  options.model = context_.model.name;
  options.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  options.choices = request.choices();
  options.n = request.n;
  options.logprobs = request.logprobs;
  options.usage = request.include_usage;
  options.list = request.list;
  options.bytes_of = context_.model.bytes_of;
  if (request.echo)
    for (const PromptTokens& prompt : prompts) options.echo.push_back(prompt.text);
  writer_.emplace(std::move(options));
}

void GenerationCall::fail(ApiError error) {
  std::vector<RequestId> ids;
  {
    const std::lock_guard lock(mutex_);
    if (detached_ || error_) return;
    error_ = std::move(error);
    ids.swap(ids_);
    wake_locked();
  }
  for (const RequestId id : ids) engine_.cancel(id);  // without the lock, which sinks take
}

/// On the engine's thread, which would cancel the request if this threw, and say nothing if that was the last token.
void GenerationCall::on_token(int64_t index, const TokenEvent& token) {
  try {
    take_token(index, token);
  } catch (const std::exception&) {
    fail({.status = 500, .message = "memory is exhausted", .param = {}, .code = "engine_error"});
  }
}

void GenerationCall::take_token(int64_t index, const TokenEvent& token) {
  std::unique_lock lock(mutex_);
  if (detached_ || error_ || overflow_) return;
  if (token.finish == FinishReason::error || token.finish == FinishReason::cancelled) {
    lock.unlock();
    // Nobody here asked for a cancellation: then one of the three above would hold.
    const bool known = token.finish == FinishReason::error && !token.error.ok();
    return fail(error_of(known ? token.error : Status(Code::internal, "engine: the request failed"), kind_));
  }
  measure(index, token);
  Choice& choice = choices_[static_cast<size_t>(index)];
  choice.usage = token.usage;
  if (token.finish != FinishReason::none) {
    choice.finish = token.finish;
    --open_choices_;
  }
  if (!stream_) {
    keep(index, token);
    if (open_choices_ == 0) context_.pool.follow([self = shared_from_this()] { self->finish_body(); });
    return;
  }
  queued_bytes_ += bytes_of(token);
  if (queued_bytes_ > context_.stream_buffer_bytes) {  // the reader is too slow: its connection cuts it
    overflow_ = true;
    queue_.clear();
    std::vector<RequestId> ids = std::exchange(ids_, {});
    wake_locked();
    lock.unlock();
    for (const RequestId id : ids) engine_.cancel(id);
    return;
  }
  queue_.push_back({index, token});
  wake_locked();
}

void GenerationCall::measure(int64_t index, const TokenEvent& token) {
  Times& times = times_[static_cast<size_t>(index)];
  if (token.id >= 0) {
    if (times.tokens++ == 0) {
      times.first = token.time;
      context_.metrics.ttft.add(seconds_between(request_.received, token.time));
    } else {
      context_.metrics.itl.add(seconds_between(times.last, token.time));
    }
    times.last = token.time;
  }
  if (token.finish != FinishReason::none && times.tokens > 1)
    context_.metrics.tpot.add(seconds_between(times.first, times.last) /
                              static_cast<double>(times.tokens - 1));
}

void GenerationCall::keep(int64_t index, const TokenEvent& token) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  choice.text += token.text;
  if (!keep_tokens_ || token.id < 0) return;
  const auto characters = std::ranges::count_if(
      token.text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  choice.tokens.push_back(
      {.id = token.id, .logprob = token.logprob, .top = token.top, .characters = characters});
}

/// On a worker: an answer can be long.
void GenerationCall::finish_body() {
  // Nobody changes choices_ any more.
  std::string body;
  try {
    body = writer_->answer(choices_, seconds_between(request_.received, Clock::now()));
  } catch (...) {
    return fail({.status = 500, .message = "memory is exhausted", .param = {}, .code = "engine_error"});
  }
  const std::lock_guard lock(mutex_);
  body_ = std::move(body);
  body_ready_ = true;
  wake_locked();
}

void GenerationCall::wake_locked() {
  if (!waiting_ || !wake_) return;
  wake_();
  waiting_ = false;  // only now: a wake that fails shall be tried again
}

CallStep GenerationCall::reply_locked() {
  CallStep step{.kind = CallStep::reply};
  if (error_) {
    step.response = error_response(*error_);
  } else {
    step.response.body = std::move(body_);
  }
  step.response.headers.emplace_back("x-request-id", request_id_);
  told_ = true;
  return step;
}

CallStep GenerationCall::next() {
  std::unique_lock lock(mutex_);
  if (!begun_) {
    if (error_ || (body_ready_ && accepted_)) return reply_locked();
    if (!stream_ || !accepted_) {
      waiting_ = true;
      return {};
    }
    begun_ = true;
    CallStep step{.kind = CallStep::begin};
    step.response.content_type = "text/event-stream";
    step.response.headers = {{"Cache-Control", "no-cache"}, {"x-request-id", request_id_}};
    return step;
  }
  if (overflow_) return {.kind = CallStep::cut};
  CallStep step{.kind = CallStep::event, .since = Clock::now()};
  if (!queue_.empty()) {
    const Queued queued = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= bytes_of(queued.token);
    lock.unlock();
    step.since = queued.token.time;
    step.payload = writer_->event(queued.index, queued.token);
    return step;
  }
  if (error_) {
    step.payload = AnswerWriter::error_event(*error_);
    step.last = step.close = told_ = true;
    return step;
  }
  if (open_choices_ > 0) {
    waiting_ = true;
    return {};
  }
  if (include_usage_ && !std::exchange(usage_sent_, true)) {
    std::vector<Usage> usages;
    for (const Choice& choice : choices_) usages.push_back(choice.usage);
    step.payload = writer_->usage_event(usages);
    return step;
  }
  step.payload = AnswerWriter::done_event();
  step.last = told_ = true;
  return step;
}

void GenerationCall::detach(End end) {
  std::vector<RequestId> ids;
  bool unfinished = false;
  {
    const std::lock_guard lock(mutex_);
    detached_ = true;
    wake_ = nullptr;
    ids.swap(ids_);
    unfinished = open_choices_ > 0;
    queue_.clear();
  }
  if (unfinished)
    for (const RequestId id : ids) engine_.cancel(id);
  --context_.metrics.in_flight;
  log_end(end);
}

/// After detach() has closed the door: nothing changes any more.
void GenerationCall::log_end(End end) {
  static constexpr std::string_view kEnds[] = {"answered", "client_gone", "too_slow", "stopped"};
  const Clock::time_point now = Clock::now();
  const double seconds = seconds_between(request_.received, now);
  const bool answered = end == End::answered;
  const int status = error_ && (told_ || answered) && !begun_ ? error_->status
                     : answered || begun_                     ? 200
                                                              : 499;
  context_.metrics.count_answer(request_.path, status);
  context_.metrics.duration.add(seconds);
  const bool failed = error_ || !answered;
  const bool broken = answered && error_ && begun_;  // the client was told so, behind a status of 200
  if (context_.log.level() == LogLevel::off || (context_.log.level() == LogLevel::errors && !failed)) return;
  nlohmann::ordered_json line = {{"request_id", request_id_},
                                 {"peer", request_.peer},
                                 {"path", request_.path},
                                 {"status", status},
                                 {"end", broken ? "failed" : kEnds[static_cast<size_t>(end)]},
                                 {"stream", stream_},
                                 {"duration_ms", log_ms(seconds)}};
  if (!choices_.empty()) {
    int64_t prompt = 0, completion = 0, cached = 0;
    std::optional<Clock::time_point> first;
    for (size_t i = 0; i < choices_.size(); ++i) {
      completion += times_[i].tokens;
      if (times_[i].tokens > 0 && (!first || times_[i].first < *first)) first = times_[i].first;
      if (i % static_cast<size_t>(n_) != 0) continue;  // as in the usage that the client gets
      prompt += choices_[i].usage.prompt_tokens;
      cached += choices_[i].usage.cached_tokens;
    }
    const Times& longest = std::ranges::max(times_, {}, &Times::tokens);
    line.update({{"choices", choices_.size()},
                 {"prompt_tokens", prompt},
                 {"cached_tokens", cached},
                 {"completion_tokens", completion}});
    if (first) line["ttft_ms"] = log_ms(seconds_between(request_.received, *first));
    if (longest.tokens > 1)
      line["tpot_ms"] =
          log_ms(seconds_between(longest.first, longest.last) / static_cast<double>(longest.tokens - 1));
    if (choices_.size() == 1) line["finish"] = name_of(choices_[0].finish);
  }
  if (error_) line["error"] = error_->message;
  context_.log.write("request", line);
}

}  // namespace vivace::server
