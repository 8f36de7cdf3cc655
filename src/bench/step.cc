#include "src/bench/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "src/bench/ops/suites.h"
#include "src/bench/ops/timing.h"
#include "src/core/error.h"
#include "src/cpu/thread_pool.h"
#include "src/engine/decode_bucket.h"
#include "src/engine/operator_times.h"
#include "src/engine/plan.h"
#include "src/model/zero_memory.h"

namespace vivace::bench {

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr int64_t kWarmUps = 3;         // the first of a shape runs without a graph, the second is captured
constexpr int64_t kRoutedSteps = 3;     // whose touched experts are averaged
constexpr int64_t kOperatorSteps = 15;  // whose operators are timed

/// The sum of an array as words: eight sums at once, so that memory is what it waits for.
uint64_t sum_of(const uint64_t* words, int64_t count) {
  constexpr int kSums = 8;
  uint64_t sums[kSums] = {};
  for (int64_t i = 0; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += words[i + j];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

Result<double> cpu_read_rate(const Stream& stream) {
  constexpr int64_t kBytes = int64_t{512} << 20, kPiece = int64_t{1} << 20;
  constexpr int kReads = 5;
  VIVACE_TRY_ASSIGN(const model::ZeroMemory memory,
                    model::ZeroMemory::reserve(kBytes, "the memory whose reading is timed"));
  const int64_t pieces = kBytes / kPiece;
  std::vector<uint64_t> sums(static_cast<size_t>(pieces));
  // Written once: pages that were never written may all be one.
  cpu::parallel_for(stream.threads, pieces, [&](int64_t piece, int) {
    std::fill_n(memory.data() + piece * kPiece, kPiece, static_cast<uint8_t>(piece));
  });
  double best_s = INFINITY;
  for (int read = 0; read < kReads; ++read) {
    const auto start = Clock::now();
    cpu::parallel_for(stream.threads, pieces, [&](int64_t piece, int) {
      sums[piece] += sum_of(reinterpret_cast<const uint64_t*>(memory.data() + piece * kPiece), kPiece / 8);
    });
    best_s = std::min(best_s, std::chrono::duration<double>(Clock::now() - start).count());
  }
  if (std::ranges::count(sums, uint64_t{0}) == pieces)
    return error(Code::internal, "the memory was not read");
  return static_cast<double>(kBytes) / best_s;
}

/// A batch of requests that decode at one context length, step after step.
class Batch {
 public:
  Batch(engine::ModelRunner& runner, const StepOptions& options, int64_t batch)
      : runner_(runner), options_(options), batch_(batch) {
    const int64_t page_tokens = runner.page_tokens(), position = options.context - 1;
    max_pages_ = engine::pages_for(options.context, page_tokens);
    query_start_.push_back(0);
    for (int64_t i = 0; i < batch; ++i) {
      // As requests that grew together hold them: the pages of one lie between those of the others.
      for (int64_t page = 0; page < max_pages_; ++page)
        page_table_.push_back(static_cast<int32_t>(page * batch + i));
      slots_.push_back(page_table_.back() * page_tokens + position % page_tokens);
      positions_.push_back(static_cast<int32_t>(position));
      kv_lengths_.push_back(static_cast<int32_t>(options.context));
      query_start_.push_back(static_cast<int32_t>(i + 1));
      ids_.push_back(static_cast<int32_t>((options.seed * 7919 + static_cast<uint64_t>(i) * 104729 + 1) %
                                          static_cast<uint64_t>(runner.vocab())));
    }
  }

  /// Starts the next step, which computes what the one before drew.
  Status enqueue() {
    samples_.clear();
    for (int64_t i = 0; i < batch_; ++i) {
      if (in_flight_ > 0) ids_[i] = static_cast<int32_t>(-1 - i);
      samples_.push_back({.row = i,
                          .params = &params_,
                          .seed = options_.seed + static_cast<uint64_t>(i),
                          .position = steps_,
                          .prompt_ids = {},
                          .output_ids = {},
                          .banned_ids = {},
                          .request = static_cast<RequestId>(i + 1)});
    }
    VIVACE_TRY(runner_.enqueue({.token_ids = ids_,
                                .positions = positions_,
                                .slots = slots_,
                                .query_start = query_start_,
                                .kv_lengths = kv_lengths_,
                                .page_table = page_table_,
                                .max_pages = max_pages_,
                                .decode_requests = batch_,
                                .samples = samples_}));
    ++steps_;
    ++in_flight_;
    return {};
  }

  Status finish() {
    VIVACE_TRY(runner_.finish(sampled_));
    --in_flight_;
    for (int64_t i = 0; i < batch_; ++i) {
      if (!sampled_[i].valid) return error(Code::internal, "the logits of request {} are not numbers", i);
      ids_[i] = sampled_[i].id;
    }
    return {};
  }

  Status step() {
    VIVACE_TRY(enqueue());
    return finish();
  }

 private:
  engine::ModelRunner& runner_;
  const StepOptions& options_;
  const int64_t batch_;
  const SamplingParams params_;
  int64_t max_pages_ = 0, steps_ = 0, in_flight_ = 0;
  std::vector<int32_t> ids_, positions_, query_start_, kv_lengths_, page_table_;
  std::vector<int64_t> slots_;
  std::vector<engine::SampleSlot> samples_;
  std::vector<engine::Sampled> sampled_;
};

/// Mean over layers and a few steps of the number of distinct experts.
Result<double> touched_experts(engine::ModelRunner& runner, Batch& batch) {
  const engine::ExpertCount before = runner.experts();
  runner.count_experts(true);
  Status status;
  for (int64_t i = 0; i < kRoutedSteps && status.ok(); ++i) status = batch.step();
  runner.count_experts(false);
  VIVACE_TRY(status);
  const engine::ExpertCount after = runner.experts();
  const int64_t layers = after.layers - before.layers;
  return layers == 0 ? 0 : static_cast<double>(after.touched - before.touched) / static_cast<double>(layers);
}

/// Microseconds from the end of one step to the end of the next, sorted.
Result<std::vector<double>> step_times(engine::ModelRunner& runner, Batch& batch, int64_t steps) {
  std::vector<double> times;
  Clock::time_point last = Clock::now();
  const bool overlaps = runner.overlaps();
  if (overlaps) VIVACE_TRY(batch.enqueue());
  for (int64_t i = -kWarmUps; i < steps; ++i) {
    VIVACE_TRY(batch.enqueue());
    VIVACE_TRY(batch.finish());
    const auto now = Clock::now();
    if (i >= 0) times.push_back(std::chrono::duration<double, std::micro>(now - last).count());
    last = now;
  }
  if (overlaps) VIVACE_TRY(batch.finish());
  std::ranges::sort(times);
  return times;
}

/// Tokens whose keys a step reads for each request.
int64_t attended(const model::ModelConfig& config, int64_t context) {
  return config.sliding_window > 0 ? std::min(context, config.sliding_window) : context;
}

/// What is to be added to the bytes that the cost of a call counts: it knows the shapes of the call, not the lengths of its
/// requests, and on a GPU not its routing. The mean over the layers.
double correction_bytes(std::string_view op, engine::ModelRunner& runner, const StepOptions& options,
                        const StepPoint& point) {
  model::Model& model = runner.model();
  const model::ModelConfig& config = model.config();
  const bool on_gpu = runner.stream().device == Device::cuda;
  const int64_t rows =
      on_gpu ? engine::decode_bucket(point.batch, model.options().max_requests) : point.batch;
  if (op == "attention_decode") {
    const int64_t pages = rows * engine::pages_for(options.context, runner.page_tokens());
    return static_cast<double>(point.bytes.kv - pages * model.page_bytes()) /
           static_cast<double>(config.layers);
  }
  if (op == "fused_moe" && on_gpu) {
    const int64_t visited = std::min(config.experts, rows * config.top_k);  // as many as the pairs can
    return static_cast<double>(model.weight_bytes().expert) *
           (point.touched_experts - static_cast<double>(visited));
  }
  return 0;
}

int64_t calls_of(const Dispatch& dispatch) {
  int64_t calls = 0;
  for (const RowCount& row : dispatch.counts()) calls += row.calls;
  return calls;
}

/// The operators of this batch's steps, whose other figures `point` has.
Result<std::vector<StepOperator>> time_operators(engine::ModelRunner& runner, const StepOptions& options,
                                                 Batch& batch, const StepPoint& point) {
  const int64_t calls_before = calls_of(runner.dispatch());
  VIVACE_TRY(batch.step());
  VIVACE_TRY_ASSIGN(const auto times, engine::OperatorTimes::create(
                                          calls_of(runner.dispatch()) - calls_before, runner.stream()));
  runner.time_operators(times.get());
  Status status;
  for (int64_t i = -kWarmUps; i < kOperatorSteps && status.ok(); ++i) {
    status = batch.step();
    if (status.ok() && i >= 0) status = times->end_step();
  }
  runner.time_operators(nullptr);
  VIVACE_TRY(status);
  std::vector<StepOperator> operators;
  for (const engine::OperatorTime& time : times->medians()) {
    const double bytes =
        time.bytes + static_cast<double>(time.calls) * correction_bytes(time.op, runner, options, point);
    operators.push_back({.op = std::string(time.op),
                         .row = std::string(time.row),
                         .calls = time.calls,
                         .us = time.us,
                         .bytes = bytes,
                         .floor_us = 1e6 * bytes / options.read_rate,
                         .flops = time.calls * time.flops});
  }
  std::ranges::sort(operators, std::ranges::greater(), &StepOperator::us);
  return operators;
}

Result<StepPoint> time_batch(engine::ModelRunner& runner, const StepOptions& options, int64_t size) {
  Batch batch(runner, options, size);
  StepPoint point{.batch = size};
  VIVACE_TRY(batch.step());  // now each computes a token that was drawn
  VIVACE_TRY_ASSIGN(point.touched_experts, touched_experts(runner, batch));
  VIVACE_TRY_ASSIGN(const std::vector<double> times, step_times(runner, batch, options.steps));
  const auto quantile = [&](double q) {
    return times[static_cast<size_t>(q * static_cast<double>(times.size() - 1))];
  };
  point.median_us = quantile(0.5);
  point.p10_us = quantile(0.1);
  point.p90_us = quantile(0.9);

  model::Model& model = runner.model();
  const model::ModelConfig& config = model.config();
  const model::WeightBytes weights = model.weight_bytes();
  point.bytes.dense = weights.dense;
  point.bytes.experts = static_cast<int64_t>(static_cast<double>(weights.expert) * point.touched_experts *
                                             static_cast<double>(config.sparse_layers()));
  point.bytes.kv = size * attended(config, options.context) * (model.page_bytes() / runner.page_tokens());
  point.floor_us = 1e6 * static_cast<double>(point.bytes.total()) / options.read_rate;
  if (options.operators) {
    VIVACE_TRY_ASSIGN(point.operators, time_operators(runner, options, batch, point));
  }
  return point;
}

Json json_of(const StepOperator& o, const StepPoint& point) {
  return {{"op", o.op},
          {"row", o.row},
          {"calls", o.calls},
          {"us", o.us},
          {"us_per_call", o.us_per_call()},
          {"share", quotient(o.us, point.operators_us())},
          {"bytes", o.bytes},
          {"flops", o.flops},
          {"floor_us", o.floor_us},
          {"share_of_floor", o.share_of_floor()}};
}

/// The table of a batch's operators, the step below their sum.
std::string operators_text(const StepPoint& point) {
  const double sum = point.operators_us();
  std::string out = fmt::format("\nbatch {}\n{:<20}{:<20}{:>6}{:>10}{:>13}{:>11}{:>10}{:>8}{:>11}{:>10}\n",
                                point.batch, "operator", "row", "calls", "MB/call", "MFLOP/call", "us/call",
                                "us", "share", "floor us", "of floor");
  for (const StepOperator& o : point.operators) {
    out += fmt::format("{:<20}{:<20}{:>6}{:>10.3f}{:>13.3f}{:>11.2f}{:>10.1f}{:>7.1f}%{:>11.1f}{:>10.3f}\n",
                       o.op, o.row, o.calls, 1e-6 * o.bytes_per_call(), 1e-6 * o.flops_per_call(),
                       o.us_per_call(), o.us, 100 * quotient(o.us, sum), o.floor_us, o.share_of_floor());
  }
  const auto line = [&](std::string_view name, double us) {
    out += fmt::format("{:<80}{:>10.1f}\n", name, us);
  };
  line("sum", sum);
  line("the step, its calls not timed", point.median_us);
  line("difference: see below", sum - point.median_us);
  return out;
}

std::string gigabytes(int64_t bytes) {
  return fmt::format("{:.3f}", static_cast<double>(bytes) * 1e-9);
}

}  // namespace

double StepPoint::operators_us() const {
  return std::accumulate(operators.begin(), operators.end(), 0.0,
                         [](double sum, const StepOperator& o) { return sum + o.us; });
}

Result<double> read_rate(const Stream& stream) {
  if (stream.device == Device::cpu) return cpu_read_rate(stream);
  VIVACE_TRY_ASSIGN(const auto roof,
                    kRoofSuite.prepare({.suite = "roof", .name = "read", .fields = {}}, stream));
  constexpr int64_t kReplays = 20;
  VIVACE_TRY_ASSIGN(const Timing timing, time_graph(*roof, kReplays, stream));
  return 1e6 * roof->floor().bytes / timing.median_us;
}

int64_t pages_for_steps(const StepOptions& options, int64_t page_tokens) {
  return *std::ranges::max_element(options.batches) * engine::pages_for(options.context, page_tokens);
}

Result<std::vector<StepPoint>> time_steps(engine::ModelRunner& runner, const StepOptions& options,
                                          const std::function<void(int64_t batch)>& next) {
  VIVACE_TRY(runner.model().fill_pages(options.seed, runner.stream()));
  std::vector<StepPoint> points;
  for (const int64_t batch : options.batches) {
    next(batch);
    VIVACE_TRY_ASSIGN(StepPoint point, time_batch(runner, options, batch));
    points.push_back(point);
  }
  return points;
}

Json to_json(const StepReport& report) {
  Json points = Json::array(), rows = Json::array(), settings = Json::object();
  for (const StepPoint& p : report.points) {
    points.push_back({{"batch", p.batch},
                      {"context", report.options.context},
                      {"us", p.median_us},
                      {"p10_us", p.p10_us},
                      {"p90_us", p.p90_us},
                      {"tokens_per_s", p.tokens_per_s()},
                      {"floor_us", p.floor_us},
                      {"share_of_floor", p.share_of_floor()},
                      {"touched_experts", report.sparse_layers > 0 ? Json(p.touched_experts) : Json(nullptr)},
                      {"dense_bytes", p.bytes.dense},
                      {"expert_bytes", p.bytes.experts},
                      {"kv_bytes", p.bytes.kv}});
    if (!report.options.operators) continue;
    Json operators = Json::array();
    for (const StepOperator& o : p.operators) operators.push_back(json_of(o, p));
    points.back()["operators"] = operators;
    points.back()["operators_us"] = p.operators_us();
  }
  for (const RowUse& use : report.rows) {
    Json refused = Json::array();
    for (const Refusal& r : use.refused) refused.push_back({{"row", r.row}, {"reason", r.reason}});
    rows.push_back({{"op", use.op}, {"row", use.row}, {"calls", use.calls}, {"refused", refused}});
  }
  for (const auto& [name, value] : report.settings) settings[name] = value;
  return {{"benchmark", "step"},
          {"model", report.model},
          {"model_summary", report.model_summary},
          {"layers", report.layers},
          {"sparse_layers", report.sparse_layers},
          {"experts", report.experts},
          {"top_k", report.top_k},
          {"context", report.options.context},
          {"steps", report.options.steps},
          {"seed", report.options.seed},
          {"read_bytes_per_s", report.options.read_rate},
          {"floor", "(dense_bytes + expert_bytes + kv_bytes) / read_bytes_per_s"},
          {"points", points},
          {"rows", rows},
          {"settings", settings},
          {"device", report.device},
          {"command", report.command},
          {"version", report.version},
          {"when", report.when}};
}

std::string to_text(const StepReport& report) {
  std::string out = fmt::format(
      "{}\n{}\n{} tokens of context, {} timed steps, memory read at {:.1f} GB/s\n\n", report.model_summary,
      report.device, report.options.context, report.options.steps, report.options.read_rate * 1e-9);
  out +=
      fmt::format("{:>6}{:>12}{:>12}{:>12}{:>11}{:>12}{:>10}{:>10}{:>9}{:>9}{:>9}\n", "batch", "us", "p10 us",
                  "p90 us", "tok/s", "floor us", "of floor", "experts", "GB dense", "experts", "KV");
  for (const StepPoint& p : report.points) {
    const std::string experts = report.sparse_layers > 0
                                    ? fmt::format("{:.1f}/{}", p.touched_experts, report.experts)
                                    : std::string("-");
    out += fmt::format("{:>6}{:>12.1f}{:>12.1f}{:>12.1f}{:>11.1f}{:>12.1f}{:>10.3f}{:>10}{:>9}{:>9}{:>9}\n",
                       p.batch, p.median_us, p.p10_us, p.p90_us, p.tokens_per_s(), p.floor_us,
                       p.share_of_floor(), experts, gigabytes(p.bytes.dense), gigabytes(p.bytes.experts),
                       gigabytes(p.bytes.kv));
  }
  out +=
      "\nfloor us: the bytes of dense weights, of touched experts (mean per sparse layer) and of keys and "
      "values over the\n"
      "rate at which this device reads memory; of floor: floor over median. Activations and logits are not "
      "counted.\n";
  if (std::ranges::any_of(report.points, [](const StepPoint& p) { return p.share_of_floor() > 1; })) {
    out +=
        "of floor above 1: caches hold part of what a step reads, so it takes less than reading all from "
        "memory.\n";
  }
  for (const StepPoint& p : report.points) {
    if (!p.operators.empty()) out += operators_text(p);
  }
  if (report.options.operators) {
    out +=
        "\nus: the calls of a line in one step, each timed by itself; share: of the sum; floor us: the\n"
        "bytes that they must move over the rate at which this device reads memory. difference: on a GPU\n"
        "the calls of a step overlap and follow each other without the gap that timing leaves around each,\n"
        "so the sum is larger; on a CPU it may be, since these are other steps and other work on the "
        "machine\n"
        "slows some; where it is smaller, the rest passes between calls. MFLOP/call of linear: two for each\n"
        "weight and row, which tells its lines apart.\n";
  }
  return out + "\n" + rows_text(report.rows);
}

}  // namespace vivace::bench
