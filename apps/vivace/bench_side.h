#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/vivace/arguments.h"
#include "apps/vivace/model_files.h"
#include "src/bench/http_target.h"
#include "src/bench/report.h"
#include "src/bench/workload.h"

namespace vivace::cli {

/// What one side of `bench serve` is put on: an engine of this process or a server, ready to run.
class BenchSide {
 public:
  /// Loads the engine, or reaches the server at `url` when that is not empty.
  static Result<std::unique_ptr<BenchSide>> open(const BenchServeArgs& args, const EngineOptions& engine,
                                                 const std::string& url);

  const std::string& url() const { return url_; }
  /// An address, or a model.
  const std::string& name() const { return url_.empty() ? options_.model : url_; }
  const EngineOptions& options() const { return options_; }
  const ModelFiles& files() const { return files_; }
  bench::Target& target() { return *target_; }
  int64_t max_model_len() const;             ///< 0: the server does not say
  double load_s() const { return load_s_; }  ///< until it was ready
  int64_t vocab() const { return engine_ != nullptr ? engine_->vocab() : 0; }

  /// How long the target's prompts of text are: `tokens = bytes / bytes_per_token + template_tokens`. An engine's
  /// tokenizer is asked, a server gets two small requests.
  struct TextLength {
    double bytes_per_token = 0;
    int64_t template_tokens = 0;
  };
  Result<TextLength> text_length(bool chat);
  /// A small request that has nothing in common with those of the plan, so that the first of them does not pay for
  /// reading the weights.
  Status warm_up(const bench::PlannedRequest& first);

  /// Begins to count rows.
  void begin();
  void add(bench::LoadResult round) { bench::append_round(load_, std::move(round)); }
  /// Everything that was measured. Ends the engine.
  Result<bench::Report> finish(const BenchServeArgs& args);

 private:
  BenchSide() = default;
  /// Calls per row; empty where a server does not say.
  std::vector<bench::RowUse> rows_so_far();
  Status add_engine_facts(const BenchServeArgs& args, bench::Report& report);

  std::string url_;
  EngineOptions options_;
  ModelFiles files_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<bench::Target> target_;
  bench::HttpTarget* server_ = nullptr;  ///< the target, when it is one
  double load_s_ = 0;
  std::vector<bench::RowUse> rows_before_;
  bench::LoadResult load_;
};

}  // namespace vivace::cli
