#include "src/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/check_options.h"
#include "src/engine/check_request.h"
#include "src/engine/kv_pages.h"

namespace vivace::engine {

namespace {

/// A request between submit() and its final event. The engine thread owns everything but `cancelled`.
struct Live {
  Live(RequestId id, uint64_t seed, Engine::Sink sink, Generation generation, int64_t max_tokens)
      : id(id),
        seed(seed),
        max_tokens(max_tokens),
        sink(std::move(sink)),
        generation(std::move(generation)) {}

  const RequestId id;
  const uint64_t seed;
  const int64_t max_tokens;
  Engine::Sink sink;
  Generation generation;
  PageChain chain;
  int64_t computed = 0;   ///< tokens with keys and values in the chain once what is in flight is over
  int64_t drawing = 0;    ///< tokens that steps in flight draw
  int64_t row = 0;        ///< of the one that the step enqueued last draws, among its samples
  int64_t delivered = 0;  ///< tokens that the sink has seen
  bool started = false;   ///< it has run before; a preempted request stays started
  PrefixHit hit;          ///< while it waits: valid from planning a step until admission in it
  std::atomic<bool> cancelled{false};
};

/// The arrays behind one StepInput, reused from step to step.
struct StepArrays {
  std::vector<int32_t> token_ids, positions, query_start, kv_lengths, page_table;
  std::vector<int64_t> slots;
  std::vector<SampleSlot> samples;

  void clear() {
    for (auto* ids : {&token_ids, &positions, &query_start, &kv_lengths, &page_table}) ids->clear();
    slots.clear();
    samples.clear();
  }
};

/// Seeds of requests that bring none: a function of the engine's seed and the order of submission.
uint64_t drawn_seed(uint64_t engine_seed, RequestId id) {
  uint64_t word = engine_seed * 0x9e3779b97f4a7c15ULL + id;
  for (int round = 0; round < 3; ++round) {
    word ^= word >> 31;
    word *= 0xd1342543de82ef95ULL;
  }
  return word ^ word >> 32;
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<Runner> runner, TokenBytes bytes, const EngineOptions& options,
             EngineHooks hooks);
  ~EngineImpl() override;

  Result<RequestId> submit(Request request, Sink sink) override;
  Result<RequestId> accept(Request request, Sink sink);
  void cancel(RequestId request) override;
  void drain() override;
  void clear_prefix_cache() override;
  EngineStats stats() const override;
  const EngineOptions& options() const override { return options_; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t vocab() const override { return runner_->vocab(); }
  const Dispatch& dispatch() const override { return runner_->dispatch(); }

 private:
  using LivePtr = std::shared_ptr<Live>;

  bool idle() const { return running_.empty() && waiting_.empty() && flight_.lives.empty(); }
  bool on_engine_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  /// A step from being enqueued to being collected.
  struct Flight {
    StepPlan plan;
    std::vector<LivePtr> lives;  ///< the request of each work item; none: no step
    Status status;               ///< not ok: it was not enqueued
  };

  // The engine thread. One step is plan, prepare, fill, enqueue, finish, collect; only enqueue and finish touch the
  // device, and only collect needs the result. With a runner that overlaps, the first four of a step come before the
  // last two of the step before.
  void loop();
  void step();
  Flight launch();
  void land(Flight flight);
  void fail(const Status& status);
  bool take_mail();
  StepPlan plan();
  std::vector<Sequence> plan_running();
  std::vector<Sequence> plan_waiting();
  Status prepare(const StepPlan& plan);
  void preempt(RequestId id);
  void admit(const LivePtr& live, int64_t start);
  StepInput fill(const StepPlan& plan);
  Status enqueue(const StepPlan& plan);
  Status finish(const StepPlan& plan);
  void collect(const StepPlan& plan, const Status& status);
  void audit();

  bool deliver(Live& live, TokenEvent& event);
  void retire(Live& live, FinishReason reason);
  void end(Live& live, FinishReason reason, const Status& error = {});
  void update_counts();
  void publish_counts();

  const EngineOptions options_;
  const TokenBytes bytes_;
  const EngineHooks hooks_;
  const std::unique_ptr<Runner> runner_;
  const Limits limits_;
  const int64_t max_model_len_;

  // The engine thread's own. Both queues are oldest first, and all that run are older than all that wait.
  KvPages kv_;
  std::vector<LivePtr> running_;
  std::deque<LivePtr> waiting_;
  std::vector<LivePtr> step_;  ///< whose work an exception would hit; none before a plan is made
  Flight flight_;              ///< between two calls of step()
  StepArrays arrays_;
  std::vector<Sampled> sampled_;
  std::vector<TokenEvent> events_;
  EngineStats counts_;
  const Status no_memory_ =
      error(Code::out_of_memory, "engine: memory is exhausted");  ///< made while there is some

  // Shared, under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable wake_, drained_;
  std::map<RequestId, LivePtr> live_;
  std::vector<LivePtr> submitted_;
  bool cancels_ = false;  ///< some live request is cancelled and has not been ended
  bool clears_ = false;   ///< the prefix cache is to be cleared
  bool stopping_ = false;
  RequestId next_id_ = 1;
  EngineStats stats_;

  /// Held around each call of a sink. cancel() passes through it, so that a call in progress is over and the
  /// next one sees the cancellation.
  std::mutex delivery_;
  std::thread thread_;
};

EngineImpl::EngineImpl(std::unique_ptr<Runner> runner, TokenBytes bytes, const EngineOptions& options,
                       EngineHooks hooks)
    : options_(options),
      bytes_(std::move(bytes)),
      hooks_(std::move(hooks)),
      runner_(std::move(runner)),
      limits_{.max_batch = options.max_batch,
              .token_budget = options.token_budget,
              .page_tokens = runner_->page_tokens(),
              .pages = runner_->pages()},
      // A request that the whole pool cannot hold could never run.
      max_model_len_(std::min({runner_->max_model_len(), limits_.pages * limits_.page_tokens,
                               options.max_model_len > 0 ? options.max_model_len : INT64_MAX})),
      kv_({.pages = limits_.pages,
           .page_tokens = limits_.page_tokens,
           .prefix_cache = options.prefix_cache}) {
  running_.reserve(static_cast<size_t>(limits_.max_batch));  // so that admission does not allocate
  publish_counts();
  thread_ = std::thread([this] { loop(); });
}

EngineImpl::~EngineImpl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

Result<RequestId> EngineImpl::submit(Request request, Sink sink) {
  return guarded("engine: submit", [&] { return accept(std::move(request), std::move(sink)); });
}

Result<RequestId> EngineImpl::accept(Request request, Sink sink) {
  if (!sink) return invalid_argument("engine: submit needs a sink, got none");
  VIVACE_TRY_ASSIGN(const int64_t max_tokens, check_request(request, vocab(), max_model_len_));
  const std::optional<uint64_t> seed = request.sampling.seed;
  Generation generation(std::move(request), max_tokens, runner_->eos_ids(), bytes_);

  std::unique_lock lock(mutex_);
  if (stopping_) return error(Code::cancelled, "engine: it is shutting down");
  // What was submitted since the last step has no place in the batch yet, though there may be one for it.
  const int64_t beyond = std::ssize(live_) - options_.max_batch;
  if (beyond >= options_.max_waiting)
    return error(Code::resource_exhausted,
                 "engine: {} requests are open, max_batch {} and max_waiting {} hold no more", live_.size(),
                 options_.max_batch, options_.max_waiting);
  const RequestId id = next_id_++;
  auto live = std::make_shared<Live>(id, seed.value_or(drawn_seed(options_.seed, id)), std::move(sink),
                                     std::move(generation), max_tokens);
  submitted_.push_back(live);
  try {
    live_.emplace(id, std::move(live));
  } catch (...) {
    submitted_.pop_back();
    throw;
  }
  lock.unlock();
  wake_.notify_one();
  return id;
}

void EngineImpl::cancel(RequestId request) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(request);
    if (found == live_.end()) return;
    found->second->cancelled = true;
    cancels_ = true;
  }
  wake_.notify_one();
  if (on_engine_thread()) return;  // a sink is calling: its own call is the one in progress
  const std::lock_guard until_delivered(delivery_);
}

void EngineImpl::drain() {
  if (on_engine_thread()) return;  // a sink that waited for the engine would wait for itself
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [&] { return live_.empty(); });
}

void EngineImpl::clear_prefix_cache() {
  {
    const std::lock_guard lock(mutex_);
    clears_ = true;
  }
  wake_.notify_one();
}

EngineStats EngineImpl::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting = std::ssize(live_) - stats.running;
  return stats;
}

void EngineImpl::update_counts() {
  counts_.running = std::ssize(running_);
  counts_.pages_total = kv_.pages();
  counts_.pages_free = kv_.free_pages();
  counts_.pages_cached = kv_.idle_pages();
}

void EngineImpl::publish_counts() {
  update_counts();
  const std::lock_guard lock(mutex_);
  stats_ = counts_;
}

/// Whatever throws (std::bad_alloc above all) ends requests, never the engine.
void EngineImpl::loop() {
  bool runs = true;
  while (runs) {
    step_.clear();
    try {
      runs = take_mail();
      if (runs && !idle()) step();
    } catch (...) {
      Status status;
      try {
        status = status_of_exception("engine: a step failed");
      } catch (const std::bad_alloc&) {  // not even memory for the message
      }
      fail(status.ok() ? no_memory_ : status);
    }
  }
}

void EngineImpl::step() {
  Flight over = launch();
  if (runner_->overlaps()) std::swap(over, flight_);
  land(std::move(over));
  if (!flight_.status.ok()) land(std::exchange(flight_, {}));  // it never flew
}

/// Plans the next step and starts it.
EngineImpl::Flight EngineImpl::launch() {
  Flight next{.plan = plan(), .lives = {}, .status = {}};
  if (hooks_.on_plan) hooks_.on_plan(next.plan);
  if (next.plan.work.empty() && !flight_.lives.empty()) {  // all depends on what is in flight
    for (const uint64_t id : next.plan.preempted) preempt(id);
    return {};
  }
  ++counts_.steps;
  next.status = prepare(next.plan);
  publish_counts();
  if (next.status.ok()) next.status = enqueue(next.plan);
  if (next.status.ok()) {
    int64_t row = 0;
    for (size_t i = 0; i < step_.size(); ++i) {
      const Work& work = next.plan.work[i];
      Live& live = *step_[i];
      live.computed = work.start + work.tokens;
      if (!work.samples) continue;
      ++live.drawing;
      live.row = row++;
    }
  }
  next.lives = std::move(step_);
  step_.clear();
  return next;
}

/// Ends a step: waits for it and hands out what it drew.
void EngineImpl::land(Flight flight) {
  if (flight.lives.empty()) return;
  step_ = std::move(flight.lives);
  collect(flight.plan, flight.status.ok() ? finish(flight.plan) : flight.status);
  publish_counts();
  audit();
}

/// Ends the requests of the step that threw; where there was no plan yet, all, so that the same work cannot throw for
/// ever. A step in flight stays there and is collected for nobody. Allocates nothing.
void EngineImpl::fail(const Status& status) {
  const std::vector<LivePtr> blamed = std::exchange(step_, {});
  for (const LivePtr& live : blamed)
    if (live->sink) end(*live, FinishReason::error, status);
  if (blamed.empty()) {
    std::vector<LivePtr> fresh;
    {
      const std::lock_guard lock(mutex_);
      fresh.swap(submitted_);
    }
    for (const LivePtr& live : fresh) end(*live, FinishReason::error, status);
    while (!running_.empty()) end(*LivePtr(running_.back()), FinishReason::error, status);
    while (!waiting_.empty()) end(*LivePtr(waiting_.back()), FinishReason::error, status);
  }
  publish_counts();
}

/// Sleeps while there is nothing to do; false when the engine stops.
bool EngineImpl::take_mail() {
  bool sweep = false, stop = false, clear = false;
  {
    std::unique_lock lock(mutex_);
    if (idle()) wake_.wait(lock, [&] { return stopping_ || cancels_ || clears_ || !submitted_.empty(); });
    waiting_.insert(waiting_.end(), submitted_.begin(), submitted_.end());
    submitted_.clear();
    stop = stopping_;
    sweep = std::exchange(cancels_, false) || stop;
    clear = std::exchange(clears_, false);
  }
  if (clear) {
    kv_.clear_cache();
    publish_counts();
  }
  // max_tokens 0 asks for no token: such a request ends where it would have started.
  const auto ends = [&](const LivePtr& live) { return stop || live->cancelled || live->max_tokens == 0; };
  std::vector<LivePtr> over;
  over.reserve(
      static_cast<size_t>(std::ranges::count_if(running_, ends) + std::ranges::count_if(waiting_, ends)));
  const auto is_over = [&](const LivePtr& live) {
    // Who is cancelled only now waits for the next sweep: an exception here would leave holes in the queue.
    if (over.size() == over.capacity() || !ends(live)) return false;
    over.push_back(live);
    return true;
  };
  if (sweep) std::erase_if(running_, is_over);
  std::erase_if(waiting_, is_over);
  for (const LivePtr& live : over)
    end(*live, stop || live->cancelled ? FinishReason::cancelled : FinishReason::length);
  if (!over.empty()) audit();
  return !stop;
}

StepPlan EngineImpl::plan() {
  return plan_step(plan_running(), plan_waiting(), kv_.available(), limits_);
}

std::vector<Sequence> EngineImpl::plan_running() {
  std::vector<Sequence> sequences;
  int64_t missing = 0;
  for (const LivePtr& live : running_) {
    const int64_t drawn = std::ssize(live->generation.output()) + live->drawing;
    const int64_t known =
        drawn == live->max_tokens  // the last it may have is being drawn and will not be computed
            ? live->computed
            : std::ssize(live->generation.prompt()) + drawn;
    sequences.push_back(
        {.id = live->id, .known = known, .computed = live->computed, .pages = std::ssize(live->chain.pages)});
    missing += pages_for(known, limits_.page_tokens) - sequences.back().pages;
  }
  if (missing > kv_.available())  // only a preemption asks what it would bring
    for (size_t i = 0; i < running_.size(); ++i) sequences[i].sole_pages = kv_.sole_pages(running_[i]->chain);
  return sequences;
}

/// The waiting requests that one step could admit, and the first that it could not.
std::vector<Sequence> EngineImpl::plan_waiting() {
  std::vector<Sequence> sequences;
  int64_t places = limits_.max_batch - std::ssize(running_);
  int64_t tokens = limits_.token_budget, pages = kv_.available();
  for (const LivePtr& live : waiting_) {
    if (places-- <= 0 || tokens <= 0 || pages < 0) break;
    if (live->drawing > 0)
      break;  // preempted for a step that could not start: its last token is not known yet
    const std::span<const int32_t> known = live->generation.tokens();
    // At least one token is computed: its logits are what the request waits for.
    live->hit = kv_.find(live->generation.request().cache_salt, known, std::ssize(known) - 1);
    const int64_t cached_pages = std::ssize(live->hit.chain.pages);
    sequences.push_back({.id = live->id,
                         .known = std::ssize(known),
                         .computed = cached_pages * limits_.page_tokens,
                         .pages = cached_pages,
                         .sole_pages = live->hit.idle_pages});
    tokens -= sequences.back().known - sequences.back().computed;
    pages -= pages_for(std::ssize(known), limits_.page_tokens) - cached_pages + live->hit.idle_pages;
  }
  return sequences;
}

/// Makes the queues and pages what the plan says, and step_ the requests of its work items.
Status EngineImpl::prepare(const StepPlan& plan) {
  step_.clear();
  if (plan.work.empty()) {
    step_.push_back(running_.empty() ? waiting_.front() : running_.front());
    return error(Code::internal, "engine: no step is possible with {} pages of {} tokens", limits_.pages,
                 limits_.page_tokens);
  }
  // First who takes part: it is them that end when something below throws.
  size_t admitted = 0;
  for (const Work& work : plan.work) {
    const LivePtr* live = nullptr;
    if (work.admitted) {
      if (admitted < waiting_.size()) live = &waiting_[admitted++];
    } else if (const auto found = std::ranges::lower_bound(running_, work.id, {}, &Live::id);
               found != running_.end()) {
      live = &*found;
    }
    if (live == nullptr || (*live)->id != work.id)
      return error(Code::internal, "engine: the plan takes request {}, which is not next in its queue",
                   work.id);
    step_.push_back(*live);
  }
  for (const uint64_t id : plan.preempted) preempt(id);
  for (size_t i = 0; i < step_.size();
       ++i)  // all cached pages are held before an allocation could evict them
    if (plan.work[i].admitted) admit(step_[i], plan.work[i].start);
  for (size_t i = 0; i < step_.size(); ++i) {
    PageChain& chain = step_[i]->chain;
    if (!kv_.grow(chain, std::ssize(chain.pages) + plan.work[i].new_pages))
      return error(Code::internal, "engine: the plan takes {} pages, {} are free", plan.work[i].new_pages,
                   kv_.available());
  }
  return {};
}

void EngineImpl::preempt(RequestId id) {
  const auto found = std::ranges::lower_bound(running_, id, {}, &Live::id);
  waiting_.push_front(*found);
  kv_.release((*found)->chain);
  (*found)->computed = 0;
  running_.erase(found);
  ++counts_.preemptions;
}

/// `live` is the oldest waiting.
void EngineImpl::admit(const LivePtr& live, int64_t start) {
  live->chain = kv_.take(live->hit);
  live->hit = {};
  waiting_.pop_front();
  running_.push_back(live);
  live->computed = start;
  if (std::exchange(live->started, true)) return;
  live->generation.cached_tokens = start;
  counts_.prompt_tokens += std::ssize(live->generation.prompt());
  counts_.cached_tokens += start;
}

StepInput EngineImpl::fill(const StepPlan& plan) {
  StepArrays& a = arrays_;
  a.clear();
  size_t max_pages = 1;
  for (const LivePtr& live : step_) max_pages = std::max(max_pages, live->chain.pages.size());
  a.query_start.push_back(0);
  for (size_t i = 0; i < plan.work.size(); ++i) {
    const Work& work = plan.work[i];
    const Live& live = *step_[i];
    const std::span<const int32_t> known = live.generation.tokens();
    for (int64_t position = work.start; position < work.start + work.tokens; ++position) {
      const int64_t page = live.chain.pages[static_cast<size_t>(position / limits_.page_tokens)];
      a.token_ids.push_back(position < std::ssize(known) ? known[static_cast<size_t>(position)]
                                                         : static_cast<int32_t>(-1 - live.row));
      a.positions.push_back(static_cast<int32_t>(position));
      a.slots.push_back(page * limits_.page_tokens + position % limits_.page_tokens);
    }
    a.query_start.push_back(static_cast<int32_t>(a.token_ids.size()));
    a.kv_lengths.push_back(static_cast<int32_t>(work.start + work.tokens));
    a.page_table.insert(a.page_table.end(), live.chain.pages.begin(), live.chain.pages.end());
    a.page_table.resize((i + 1) * max_pages, -1);
    if (!work.samples) continue;
    const int64_t drawn = std::ssize(live.generation.output()) + live.drawing;
    a.samples.push_back({.row = std::ssize(a.token_ids) - 1,
                         .params = &live.generation.request().sampling,
                         .seed = live.seed,
                         .position = drawn,
                         .prompt_ids = live.generation.prompt(),
                         .output_ids = live.generation.output(),
                         .banned_ids = live.generation.banned_ids(drawn),
                         .request = live.id});
  }
  return {.token_ids = a.token_ids,
          .positions = a.positions,
          .slots = a.slots,
          .query_start = a.query_start,
          .kv_lengths = a.kv_lengths,
          .page_table = a.page_table,
          .max_pages = static_cast<int64_t>(max_pages),
          .decode_requests = plan.decodes,
          .samples = a.samples};
}

Status EngineImpl::enqueue(const StepPlan& plan) {
  const StepInput input = fill(plan);
  return guarded("engine: a step failed", [&] { return runner_->enqueue(input); });
}

Status EngineImpl::finish(const StepPlan& plan) {
  sampled_.clear();
  VIVACE_TRY(guarded("engine: a step failed", [&] { return runner_->finish(sampled_); }));
  const auto samples = static_cast<size_t>(std::ranges::count(plan.work, true, &Work::samples));
  if (sampled_.size() != samples)
    return error(Code::internal, "engine: a step returned {} tokens, needs {}", sampled_.size(), samples);
  const ExpertCount experts = runner_->experts();
  counts_.moe_layers = experts.layers;
  counts_.touched_experts = experts.touched;
  return {};
}

/// For the requests of step_ that have not ended since the step was planned: what it drew for those does not exist.
void EngineImpl::collect(const StepPlan& plan, const Status& status) {
  if (!status.ok()) {
    for (const LivePtr& live : step_)
      if (live->sink) end(*live, FinishReason::error, status);
    return;
  }
  size_t sample = 0;
  for (size_t i = 0; i < plan.work.size(); ++i) {
    const Work& work = plan.work[i];
    Live& live = *step_[i];
    const auto drawn = std::span<const Sampled>(sampled_).subspan(sample, work.samples ? 1 : 0);
    sample += drawn.size();
    live.drawing -= std::ssize(drawn);
    if (!live.sink) continue;
    // Keys and values that led to NaN are not offered to others; one preempted since has no pages.
    if (std::ranges::all_of(drawn, &Sampled::valid) && !live.chain.pages.empty())
      kv_.publish(live.chain, live.generation.request().cache_salt,
                  live.generation.tokens().first(static_cast<size_t>(work.start + work.tokens)));
    if (live.cancelled) continue;  // the next sweep ends it
    events_.clear();
    live.generation.append(drawn, events_);
    for (TokenEvent& event : events_) {
      if (!deliver(live, event)) break;
      if (event.finish != FinishReason::none) retire(live, event.finish);
    }
  }
}

/// False when the request was cancelled before; the event is dropped then.
bool EngineImpl::deliver(Live& live, TokenEvent& event) {
  const std::lock_guard lock(delivery_);
  if (live.cancelled && event.finish != FinishReason::cancelled) return false;
  event.request = live.id;
  event.time = std::chrono::steady_clock::now();
  if (event.id >= 0) {
    ++live.delivered;
    ++counts_.generated_tokens;
  }
  try {
    live.sink(event);
  } catch (...) {  // a sink that throws has no use for more tokens
    cancel(live.id);
  }
  return true;
}

/// Ends a request without a token. Throws nothing, so that it can end those that an exception hit.
void EngineImpl::end(Live& live, FinishReason reason, const Status& error) {
  TokenEvent event;
  event.finish = live.cancelled ? FinishReason::cancelled : reason;
  if (event.finish == FinishReason::error) {
    try {
      event.error = error;
    } catch (const std::bad_alloc&) {  // the reason alone has to do
    }
  }
  event.usage = live.generation.usage();
  event.usage.completion_tokens = live.delivered;
  if (!deliver(live, event)) {  // cancelled between the two lines above
    event.finish = FinishReason::cancelled;
    event.error = {};
    deliver(live, event);
  }
  retire(live, event.finish);
}

/// After the final event: frees the pages and forgets the request.
void EngineImpl::retire(Live& live, FinishReason reason) {
  live.sink = nullptr;  // what it captured is free before drain() returns
  kv_.release(live.chain);
  const auto is_live = [&](const LivePtr& other) { return other.get() == &live; };
  std::erase_if(running_, is_live);
  std::erase_if(waiting_, is_live);
  ++(reason == FinishReason::cancelled ? counts_.cancelled
     : reason == FinishReason::error   ? counts_.failed
                                       : counts_.finished);
  update_counts();
  LivePtr last;  // destroyed after the lock is gone
  const std::lock_guard lock(mutex_);
  stats_ = counts_;
  const auto found = live_.find(live.id);
  last = std::move(found->second);
  live_.erase(found);
  if (live_.empty()) drained_.notify_all();
}

void EngineImpl::audit() {
  if (!hooks_.on_audit) return;
  std::vector<const PageChain*> chains;
  for (const LivePtr& live : running_) chains.push_back(&live->chain);
  for (const LivePtr& live : waiting_) chains.push_back(&live->chain);
  hooks_.on_audit(kv_.audit(chains));
}

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Runner> runner, TokenBytes bytes,
                                            const EngineOptions& options, EngineHooks hooks) {
  VIVACE_TRY(check_options(options));
  if (runner->pages() < 1 || runner->pages() > INT32_MAX || runner->page_tokens() < 1)
    return error(Code::internal, "engine: the runner has {} KV pages of {} tokens", runner->pages(),
                 runner->page_tokens());
  return guarded("engine", [&] {
    return Result<std::unique_ptr<Engine>>(
        std::make_unique<EngineImpl>(std::move(runner), std::move(bytes), options, std::move(hooks)));
  });
}

Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Runner> runner,
                                            std::shared_ptr<const model::Tokenizer> tokenizer,
                                            const EngineOptions& options, EngineHooks hooks) {
  TokenBytes bytes = [tokenizer = std::move(tokenizer)](int32_t id, bool skip_special) {
    return tokenizer->bytes_of(id, skip_special);
  };
  return make_engine(std::move(runner), std::move(bytes), options, std::move(hooks));
}

}  // namespace vivace::engine
