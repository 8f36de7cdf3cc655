#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/cpu/thread_pool.h"
#include "src/model/checkpoint.h"
#include "src/model/memory.h"
#include "src/model/model.h"

// Runs a model step by step the way an engine does, and compares it with a file of references.

namespace vivace::testing {

/// Where models under test run: the CPU, or in vivace-gpu-tests its stream.
struct ModelDevice {
  Stream stream;
  static ModelDevice& current() {
    static ModelDevice device;
    return device;
  }
};

/// A request in the making: a run of pages in the pool, and how many tokens have keys and values.
struct Conversation {
  int64_t first_page = 0;
  int64_t length = 0;
};

enum class Rows { none, last, all };

/// One step of several requests. Requests with one token that shall decode come first.
class StepBuilder {
 public:
  StepBuilder(model::Model& model, int64_t pages_per_request)
      : model_(model), max_pages_(pages_per_request) {}

  StepBuilder& add(Conversation& request, std::span<const int32_t> ids, Rows rows, bool decode = false) {
    const int64_t page_tokens = model_.options().page_tokens;
    const auto begin = static_cast<int64_t>(ids_.size());
    for (const int32_t id : ids) {
      ids_.push_back(id);
      positions_.push_back(static_cast<int32_t>(request.length));
      slots_.push_back(request.first_page * page_tokens + request.length++);
    }
    starts_.push_back(static_cast<int32_t>(ids_.size()));
    lengths_.push_back(static_cast<int32_t>(request.length));
    for (int64_t p = 0; p < max_pages_; ++p)
      page_table_.push_back(static_cast<int32_t>(request.first_page + p));
    const auto end = static_cast<int64_t>(ids_.size());
    if (rows != Rows::none)
      for (int64_t row = rows == Rows::all ? begin : end - 1; row < end; ++row) rows_.push_back(row);
    decodes_ += decode;
    return *this;
  }
  model::ForwardInput input() const {
    return {.token_ids = ids_,
            .positions = positions_,
            .slots = slots_,
            .query_start = starts_,
            .kv_lengths = lengths_,
            .page_table = page_table_,
            .max_pages = max_pages_,
            .decode_requests = decodes_,
            .logit_rows = rows_};
  }
  /// The logits of all rows that were asked for, in order; with a bucket, in a step of so many rows.
  std::vector<std::vector<float>> run(const Stream& stream, int64_t bucket = 0) {
    const int64_t vocab = model_.config().vocab, rows = std::max(std::ssize(rows_), bucket);
    std::vector<float> flat(static_cast<size_t>(rows * vocab), NAN);
    Tensor logits(flat.data(), DType::f32, {rows, vocab});
    model::Memory on_device;
    if (stream.device == Device::cuda) {
      Result<model::Memory> reserved = model::Memory::reserve(logits.bytes(), "logits", stream);
      EXPECT_TRUE(reserved.ok()) << reserved.status().message();
      if (!reserved.ok()) return {};
      on_device = std::move(*reserved);
      logits = on_device.tensor(DType::f32, {rows, vocab});
    }
    model::ForwardInput step = input();
    step.bucket = bucket;
    Status status = model_.forward(step, logits, stream);
    if (status.ok() && stream.device == Device::cuda) {
      status = device::copy_to_host(flat.data(), logits.data, logits.bytes(), stream);
      if (status.ok()) status = device::synchronize(stream);
    }
    EXPECT_TRUE(status.ok()) << status.message();
    std::vector<std::vector<float>> result;
    for (size_t i = 0; i < rows_.size(); ++i)
      result.emplace_back(flat.begin() + i * vocab, flat.begin() + (i + 1) * vocab);
    return result;
  }

 private:
  model::Model& model_;
  int64_t max_pages_, decodes_ = 0;
  std::vector<int32_t> ids_, positions_, starts_{0}, lengths_, page_table_;
  std::vector<int64_t> slots_, rows_;
};

/// A checkpoint, a model over it with a pool of `requests` conversations of `tokens` tokens, and threads.
class LoadedModel {
 public:
  LoadedModel(std::shared_ptr<const model::Checkpoint> checkpoint, model::ModelOptions options,
              int64_t tokens, int64_t requests = 1, int threads = 2)
      : checkpoint_(std::move(checkpoint)), threads_(threads) {
    options.device = ModelDevice::current().stream.device;
    options.ordinal = ModelDevice::current().stream.ordinal;
    auto loaded = model::Model::load(*checkpoint_, options);
    if (!loaded.ok()) {
      ADD_FAILURE() << loaded.status().message();
      return;
    }
    model_ = std::move(*loaded);
    pages_per_request_ = (tokens + options.page_tokens - 1) / options.page_tokens;
    const Status status = model_->allocate_pages(requests * pages_per_request_, stream());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  bool ok() const { return model_ != nullptr; }
  model::Model& model() { return *model_; }
  Stream stream() {
    Stream stream = ModelDevice::current().stream;
    if (stream.device == Device::cpu) stream.threads = &threads_;
    return stream;
  }
  Conversation conversation(int64_t index = 0) const { return {.first_page = index * pages_per_request_}; }
  StepBuilder step() { return StepBuilder(*model_, pages_per_request_); }

  /// Feeds the ids in chunks of at most `chunk` tokens; the logits after the last one.
  std::vector<float> feed(Conversation& request, std::span<const int32_t> ids, int64_t chunk,
                          bool decode = false) {
    std::vector<float> logits;
    for (size_t begin = 0; begin < ids.size(); begin += chunk) {
      const auto part = ids.subspan(begin, std::min<size_t>(chunk, ids.size() - begin));
      const bool last = begin + part.size() == ids.size();
      auto rows = step().add(request, part, last ? Rows::last : Rows::none, decode).run(stream());
      if (last && !rows.empty()) logits = std::move(rows.front());
    }
    return logits;
  }

 private:
  std::shared_ptr<const model::Checkpoint> checkpoint_;
  cpu::ThreadPool threads_;
  std::unique_ptr<model::Model> model_;
  int64_t pages_per_request_ = 0;
};

inline std::shared_ptr<const model::Checkpoint> open_checkpoint(const std::string& path) {
  auto opened = model::Checkpoint::open(path);
  if (!opened.ok()) {
    ADD_FAILURE() << opened.status().message();
    return nullptr;
  }
  return std::shared_ptr<const model::Checkpoint>(std::move(*opened));
}

inline nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return nlohmann::json::parse(file);
}

inline std::vector<double> log_probabilities(const std::vector<float>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - largest);
  std::vector<double> result;
  for (const float l : logits) result.push_back(l - largest - std::log(sum));
  return result;
}

inline int32_t argmax(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// How closely a model must follow its references.
struct Closeness {
  double smallest_gap;     ///< greedy ids agree up to the first position with a smaller gap
  double log_probability;  ///< of the eight best after the prompt, and of the greedy ids
};

/// Every case of references.json. Returns how many greedy ids were compared.
inline int64_t expect_references(LoadedModel& loaded, const nlohmann::json& references,
                                 const Closeness& closeness) {
  int64_t compared = 0;
  for (const nlohmann::json& c : references.at("cases")) {
    SCOPED_TRACE("prompt of " + std::to_string(c.at("prompt_ids").size()) + " tokens");
    std::vector<std::vector<int32_t>> experts;
    loaded.model().observe_routes([&](int64_t, const Tensor& ids) {
      const int32_t* last = ids.at(ids.shape[0] - 1).as<int32_t>();
      experts.emplace_back(last, last + ids.shape[1]);
      std::sort(experts.back().begin(), experts.back().end());
    });
    Conversation request = loaded.conversation();
    const auto prompt = c.at("prompt_ids").get<std::vector<int32_t>>();
    const int64_t chunk = loaded.model().options().max_tokens;
    std::vector<float> logits = loaded.feed(request, prompt, chunk);
    if (c.contains("last_token_experts")) {
      auto wanted = c.at("last_token_experts").get<std::vector<std::vector<int32_t>>>();
      for (auto& layer : wanted) std::sort(layer.begin(), layer.end());
      EXPECT_EQ(std::vector(experts.end() - static_cast<int64_t>(wanted.size()), experts.end()), wanted);
    }
    loaded.model().observe_routes({});

    const auto top_ids = c.at("top_ids").get<std::vector<int32_t>>();
    const auto top = c.at("top_logprobs").get<std::vector<double>>();
    const std::vector<double> after_prompt = log_probabilities(logits);
    for (size_t i = 0; i < top_ids.size(); ++i) {
      EXPECT_NEAR(after_prompt[top_ids[i]], top[i], closeness.log_probability) << "of id " << top_ids[i];
    }
    const auto greedy = c.at("greedy_ids").get<std::vector<int32_t>>();
    const auto greedy_logprobs = c.at("greedy_logprobs").get<std::vector<double>>();
    const auto gaps = c.at("greedy_gap").get<std::vector<double>>();
    for (size_t i = 0; i < greedy.size() && gaps[i] >= closeness.smallest_gap; ++i) {
      if (argmax(logits) != greedy[i]) {
        ADD_FAILURE() << "greedy id " << i << " is " << argmax(logits) << ", reference " << greedy[i]
                      << " with a gap of " << gaps[i];
        break;
      }
      EXPECT_NEAR(log_probabilities(logits)[greedy[i]], greedy_logprobs[i], closeness.log_probability)
          << "of greedy id " << i;
      ++compared;
      logits = loaded.feed(request, std::span(&greedy[i], 1), 1, true);
    }
  }
  return compared;
}

}  // namespace vivace::testing
