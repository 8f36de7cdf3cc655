// vivace-op-bench [OP] [--filter REGEX] [--threads N] [--warm] [--reference]

#include "bench/op_bench.h"

#include <CLI/CLI.hpp>
#include <thread>

#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"

namespace vivace::bench {

std::vector<Registration>& registrations() {
  static std::vector<Registration> all;
  return all;
}

namespace {

/// The roof: all threads read memory that no cache holds.
void memory_read(benchmark::State& state, cpu::ThreadPool* pool) {
  constexpr int64_t kTask = 1 << 16;
  std::vector<uint64_t> memory(kColdBytes / sizeof(uint64_t), 1);
  const int64_t tasks = kColdBytes / kTask;
  for (auto _ : state) {
    cpu::parallel_for(pool, tasks, [&](int64_t task, int) {
      const uint64_t* words = memory.data() + task * (kTask / 8);
      uint64_t sums[8] = {};
      for (int64_t i = 0; i < kTask / 8; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
      for (uint64_t sum : sums) benchmark::DoNotOptimize(sum);
    });
  }
  state.counters["bytes/s"] =
      benchmark::Counter(static_cast<double>(kColdBytes), benchmark::Counter::kIsIterationInvariantRate);
}

int run(int argc, char** argv) {
  Options options;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::string filter;
  CLI::App app(
      "Times every row of every operator on its serving cases. Options of Google Benchmark (--benchmark_...) "
      "pass through.");
  app.add_option("op", options.op, "Only this operator");
  app.add_option("--filter", filter, "Only names (op/row/case) that match this regular expression");
  app.add_option("--threads", threads, "CPU threads")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_flag("--warm", options.warm, "Reuse one set of tensors, which the caches may hold");
  app.add_flag("--reference", options.reference, "Time the reference rows too");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);

  cpu::ThreadPool pool(threads);
  options.stream.threads = &pool;
  if (options.op.empty() || options.op == "memory") {
    benchmark::RegisterBenchmark("memory/read", memory_read, &pool)
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
  }
  for (const Registration& registration : registrations()) registration(options);

  std::vector<std::string> passed = app.remaining();
  if (!filter.empty()) passed.push_back("--benchmark_filter=" + filter);
  std::vector<char*> arguments = {argv[0]};
  for (std::string& argument : passed) arguments.push_back(argument.data());
  int count = static_cast<int>(arguments.size());
  benchmark::AddCustomContext("threads", std::to_string(threads));
  benchmark::AddCustomContext("simd", std::string(cpu::name_of(cpu::isa())));
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  if (benchmark::RunSpecifiedBenchmarks() == 0) return 1;
  return 0;
}

}  // namespace
}  // namespace vivace::bench

int main(int argc, char** argv) {
  return vivace::bench::run(argc, argv);
}
