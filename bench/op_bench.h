#pragma once

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "src/core/dispatch.h"
#include "src/ops/problem.h"
#include "vivace/cost.h"

// How an operator joins vivace-op-bench: a file bench/<op>_bench.cc with one line,
//
//   VIVACE_OP_BENCH(kRmsNorm, rms_norm_cases, RmsNormProblem);
//
// which registers each serving case with each row that accepts it, under the name op/row/case.

namespace vivace::bench {

struct Options {
  Stream stream;
  std::string op;          ///< only this operator; empty: all
  bool warm = false;       ///< one set of tensors that stays in the caches, if it fits
  bool reference = false;  ///< also the reference rows
};

/// Something that registers benchmarks once the options are known.
using Registration = std::function<void(const Options&)>;
std::vector<Registration>& registrations();

/// Enough to push a call's tensors out of a third-level cache before they are used again, as the other layers of a
/// model do.
inline constexpr int64_t kColdBytes = int64_t{192} << 20;

/// Runs `row` on problems in turn and reports time, bytes and operations per second.
template <class Args, class Problem, class Case>
void measure(benchmark::State& state, const Row<Args>& row, const Case& c, const Options& options,
             Cost (*cost_of)(const Args&)) {
  std::vector<std::unique_ptr<Problem>> problems;
  const auto add_problem = [&] {
    const auto seed = static_cast<uint32_t>(problems.size());
    // A workspace may grow with the stream's threads.
    if constexpr (std::is_constructible_v<Problem, const Case&, uint32_t, const Stream&>) {
      problems.push_back(std::make_unique<Problem>(c, seed, options.stream));
    } else {
      problems.push_back(std::make_unique<Problem>(c, seed));
    }
  };
  add_problem();
  const Cost cost = cost_of(problems[0]->args);
  int64_t footprint = std::max<int64_t>(1, cost.bytes);
  if constexpr (requires { problems[0]->footprint_bytes(); }) footprint = problems[0]->footprint_bytes();
  while (!options.warm && static_cast<int64_t>(problems.size()) * footprint < kColdBytes &&
         problems.size() < 256)
    add_problem();
  size_t next = 0;
  for (auto _ : state) {
    const Status status = row.run(problems[next]->args, options.stream);
    if (!status.ok()) {
      state.SkipWithError(status.message().c_str());
      break;
    }
    if (++next == problems.size()) next = 0;
  }
  const auto rate = [&](int64_t per_call) {
    return benchmark::Counter(static_cast<double>(per_call), benchmark::Counter::kIsIterationInvariantRate,
                              benchmark::Counter::kIs1000);
  };
  state.counters["bytes/s"] = rate(cost.bytes);
  state.counters["flop/s"] = rate(cost.flops);
}

template <class Problem, class Args, class Case>
bool add(const Operator<Args>& op, std::span<const Case> cases) {
  registrations().push_back([&op, cases](const Options& options) {
    if (!options.op.empty() && options.op != op.name) return;
    for (const Case& c : cases) {
      const Problem problem(c, 0);
      const Facts facts = op.facts(problem.args);
      for (const Row<Args>& row : op.rows) {
        bool fits = row.device == options.stream.device && (options.reference || row.name != "reference");
        for (const Need& need : row.needs) fits = fits && satisfied(need, facts);
        if (!fits) continue;
        const std::string name = std::string(op.name) + "/" + std::string(row.name) + "/" + c.name;
        benchmark::RegisterBenchmark(name.c_str(),
                                     [&op, &row, &c, options](benchmark::State& state) {
                                       measure<Args, Problem, Case>(state, row, c, options, op.cost);
                                     })
            ->Unit(benchmark::kMicrosecond)
            ->UseRealTime()
            ->MeasureProcessCPUTime();
      }
    }
  });
  return true;
}

}  // namespace vivace::bench

#define VIVACE_OP_BENCH(op, cases, Problem)                                                   \
  namespace vivace::bench {                                                                   \
  [[maybe_unused]] static const bool added_##op = add<Problem>(op, cases(CaseSize::serving)); \
  }                                                                                           \
  static_assert(true)
