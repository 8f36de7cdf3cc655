#include <algorithm>
#include <cmath>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "vivace/sampler.h"

namespace vivace::bench {

namespace {

int64_t logit_bytes(int64_t batch, int64_t vocab) {
  return batch * vocab * 2;
}

int64_t sets_of(int64_t bytes) {
  constexpr int64_t kColdBytes = 300'000'000;
  return std::clamp<int64_t>((kColdBytes + bytes - 1) / bytes, 2, 16);
}

/// "temperature": over the whole vocabulary. "full": repetition penalty from a bit mask, top-k 20, top-p 0.9; nothing
/// is counted.
class PreparedSampler final : public PreparedOp {
 public:
  explicit PreparedSampler(const OpWorkload& w)
      : batch_(w.number("batch")), vocab_(w.number("vocab")), full_(w.name == "full") {}

  Status prepare(const Stream& stream) {
    const int64_t count = sets_of(logit_bytes(batch_, vocab_));
    const auto filled = [&](double value) {
      return memory_.copy_of(std::vector<float>(static_cast<size_t>(batch_), static_cast<float>(value)),
                             DType::f32, {batch_}, stream);
    };
    for (int64_t i = 0; i < count; ++i) {
      SamplerArgs& args = sets_.emplace_back();
      VIVACE_TRY_ASSIGN(args.logits, memory_.random(DType::bf16, {batch_, vocab_}, 4, i + 1, stream));
      VIVACE_TRY_ASSIGN(args.ids, memory_.make(DType::i32, {batch_}, stream));
      VIVACE_TRY_ASSIGN(args.valid, memory_.make(DType::u8, {batch_}, stream));
      VIVACE_TRY_ASSIGN(args.temperature, filled(0.8));
      std::vector<int64_t> seeds, positions(static_cast<size_t>(batch_), i);
      for (int64_t row = 0; row < batch_; ++row) seeds.push_back(1000 * i + row);
      VIVACE_TRY_ASSIGN(args.seed, memory_.copy_of(seeds, DType::i64, {batch_}, stream));
      VIVACE_TRY_ASSIGN(args.position, memory_.copy_of(positions, DType::i64, {batch_}, stream));
      if (!full_) continue;
      const int64_t words = (vocab_ + 31) / 32;
      // One id in thirty was seen.
      std::vector<int32_t> bits(static_cast<size_t>(batch_ * words), 1 << 7);
      VIVACE_TRY_ASSIGN(args.repetition_penalty, filled(1.1));
      VIVACE_TRY_ASSIGN(args.top_p, filled(0.9));
      VIVACE_TRY_ASSIGN(args.top_k, memory_.copy_of(std::vector<int32_t>(static_cast<size_t>(batch_), 20),
                                                    DType::i32, {batch_}, stream));
      VIVACE_TRY_ASSIGN(args.prompt_bits, memory_.copy_of(bits, DType::i32, {batch_, words}, stream));
    }
    VIVACE_TRY_ASSIGN(const int64_t scratch, sampler_workspace_bytes(sets_[0], stream));
    if (scratch > 0) {
      VIVACE_TRY_ASSIGN(const Tensor workspace, memory_.make(DType::u8, {scratch}, stream));
      for (SamplerArgs& args : sets_) args.workspace = workspace;
    }
    choice_ = sampler_explain(sets_[0], stream);
    return {};
  }
  int64_t sets() const override { return std::ssize(sets_); }
  Status call(int64_t set, const Stream& stream) override { return sampler(sets_[set], stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override { return {.bytes = static_cast<double>(batch_ * vocab_) * 2}; }
  /// A draw has no error; the tests compare it with the reference. Here every row must be valid.
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    VIVACE_TRY_ASSIGN(const HostTensor valid, download(sets_[0].valid, stream));
    for (int64_t row = 0; row < batch_; ++row) {
      if (valid.tensor.as<uint8_t>()[row] != 1)
        return error(Code::internal, "sampler: row {} is not valid", row);
    }
    return std::optional<double>();
  }

 private:
  int64_t batch_, vocab_;
  bool full_;
  DeviceTensors memory_;
  std::vector<SamplerArgs> sets_;
  Choice choice_;
};

std::vector<OpWorkload> workloads() {
  std::vector<OpWorkload> all;
  for (const char* name : {"temperature", "full"}) {
    for (const int64_t batch : {1, 8, 16, 32, 64, 128, 256, 512}) {
      OpWorkload w{.suite = "sampler", .name = name, .fields = {}};
      all.push_back(w.with("batch", batch).with("vocab", int64_t{120832}));
    }
  }
  return all;
}

Status check(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "batch", 1, 65536));
  VIVACE_TRY(check_field(w, "vocab", 1, 1 << 22));
  const int64_t bytes = logit_bytes(w.number("batch"), w.number("vocab"));
  return check_memory(w, static_cast<double>(sets_of(bytes) * bytes));
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  return prepared<PreparedSampler>(stream, w);
}

}  // namespace

const OpSuite kSamplerSuite = {"sampler", "one token per row of logits", workloads, check, prepare};

}  // namespace vivace::bench
