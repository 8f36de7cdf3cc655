#include <cmath>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/core/number.h"
#include "src/device/widen.h"
#include "src/ops/linear/cublaslt.h"
#include "vivace/router_gemm.h"

namespace vivace::bench {

namespace {

constexpr int64_t kSets = 24;

class PreparedRouterGemm final : public PreparedOp {
 public:
  explicit PreparedRouterGemm(const OpWorkload& w)
      : m_(w.number("m")), n_(w.number("n")), k_(w.number("k")), mode_(w.text("mode")) {}

  Status prepare(const Stream& stream) {
    for (int64_t i = 0; i < kSets; ++i) {
      RouterGemmArgs& args = sets_.emplace_back();
      VIVACE_TRY_ASSIGN(args.x, memory_.random(DType::bf16, {m_, k_}, 1, 100 + i, stream));
      VIVACE_TRY_ASSIGN(args.scores, memory_.make(DType::f32, {m_, n_}, stream));
      VIVACE_TRY_ASSIGN(args.weight, weight(i, stream));
      args.weight_ready = true;  // as in a step of a model
    }
    choice_ = router_gemm_explain(sets_[0], stream);
    return {};
  }
  int64_t sets() const override { return kSets; }
  Status call(int64_t set, const Stream& stream) override { return router_gemm(sets_[set], stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override {
    const double bytes = static_cast<double>(m_ * k_ * 2 + n_ * k_ * (mode_ == "bf16" ? 2 : 4) + m_ * n_ * 4);
    return {.bytes = bytes, .flops = 2.0 * static_cast<double>(m_ * n_ * k_) * (mode_ == "bf16" ? 1 : 2)};
  }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    return error_of(sets_[0].scores, stream);
  }
  Result<std::unique_ptr<PreparedOp>> through_library(std::string_view row, const Stream& stream) override;

  const RouterGemmArgs& args(int64_t set) const { return sets_[set]; }
  /// What a set's terms are made from: fp32 from N(0, 1), or for mode bf16 a weight whose low terms are zero.
  Result<Tensor> whole_weight(DeviceTensors& memory, int64_t set, const Stream& stream) const {
    const DType type = mode_ == "bf16" ? DType::bf16 : DType::f32;
    return memory.random(type, {n_, k_}, 1, 1000 + static_cast<uint64_t>(set), stream);
  }
  /// Of scores for set 0.
  Result<std::optional<double>> error_of(const Tensor& given, const Stream& stream) const {
    VIVACE_TRY_ASSIGN(const HostTensor x, download(sets_[0].x, stream));
    VIVACE_TRY_ASSIGN(const HostTensor scores, download(given, stream));
    const int64_t step = std::max<int64_t>(1, m_ / 32);
    std::vector<double> worst(static_cast<size_t>((m_ + step - 1) / step), 0);
    check_threads().parallel_for(std::ssize(worst), [&](int64_t sample, int) {
      const int64_t row = sample * step;
      for (int64_t e = 0; e < n_; ++e) {
        double want = 0;
        for (int64_t i = 0; i < k_; ++i)
          want += double{load(DType::bf16, x.tensor.data, row * k_ + i)} * source_[e * k_ + i];
        worst[sample] = larger(worst[sample], std::abs(want - scores.tensor.as<float>()[row * n_ + e]));
      }
    });
    return std::optional<double>(largest(worst));
  }

 private:
  Result<RouterWeight> weight(int64_t set, const Stream& stream) {
    DeviceTensors scratch;
    VIVACE_TRY_ASSIGN(const Tensor random, whole_weight(scratch, set, stream));
    VIVACE_TRY_ASSIGN(const HostTensor host, download(random, stream));
    if (set == 0) {
      source_.resize(static_cast<size_t>(n_ * k_));
      for (int64_t i = 0; i < n_ * k_; ++i) source_[i] = load(random.dtype, host.tensor.data, i);
    }
    RouterWeightSource source{.weight = host.tensor,
                              .mode = mode_ == "two_term" ? RouterMode::two_term : RouterMode::exact};
    std::vector<uint8_t> storage(static_cast<size_t>(router_weight_bytes(source)));
    if (!storage.empty()) source.storage = Tensor(storage.data(), DType::u8, {std::ssize(storage)});
    VIVACE_TRY_ASSIGN(RouterWeight prepared, prepare_router_weight(source));
    for (int i = 0; i < prepared.term_count; ++i) {
      const Tensor& term = prepared.terms[i];
      VIVACE_TRY_ASSIGN(const Tensor copy, memory_.make(DType::bf16, {n_, k_}, stream));
      VIVACE_TRY(device::copy_to_device(copy.data, term.data, term.bytes(), stream));
      VIVACE_TRY(device::synchronize(stream));
      prepared.terms[i] = copy;
    }
    return prepared;
  }

  int64_t m_, n_, k_;
  std::string mode_;
  DeviceTensors memory_;
  std::vector<RouterGemmArgs> sets_;
  std::vector<float> source_;  // set 0's weight as it was given
  Choice choice_;
};

/// The same scores by cuBLASLt: from factors in fp32, multiplied in fp32 or tf32, or from bf16 factors, the weight
/// rounded once. A router's x is bf16, so a caller of the fp32 product widens it first: `cublas_fp32_with_cast`; the
/// others have it as they need it.
class LibraryRouterGemm final : public PreparedOp {
 public:
  LibraryRouterGemm(const PreparedRouterGemm& ours, std::string_view row)
      : ours_(ours), row_(row), casts_(row == "cublas_fp32_with_cast") {}

  Status prepare(const Stream& stream) {
    VIVACE_TRY_ASSIGN(const Tensor workspace, memory_.make(DType::u8, {kCublasltWorkspaceBytes}, stream));
    for (int64_t i = 0; i < kSets; ++i) {
      const RouterGemmArgs& args = ours_.args(i);
      const int64_t m = args.x.shape[0], k = args.x.shape[1];
      CublasltProduct product{.x = args.x,
                              .weight = args.weight.terms[0],
                              .tf32 = row_ == "cublas_tf32",
                              .workspace = workspace.data};
      VIVACE_TRY_ASSIGN(product.y, memory_.make(DType::f32, {m, args.scores.shape[1]}, stream));
      if (row_ != "cublas_bf16") {
        VIVACE_TRY_ASSIGN(product.weight, ours_.whole_weight(memory_, i, stream));
        if (casts_ && i > 0) {
          product.x = products_[0].x;  // scratch between two kernels of a call
        } else {
          VIVACE_TRY_ASSIGN(product.x, memory_.make(DType::f32, {m, k}, stream));
          VIVACE_TRY(device::widen(args.x, product.x, stream));
        }
      }
      products_.push_back(product);
    }
    return {};
  }
  int64_t sets() const override { return kSets; }
  Status call(int64_t set, const Stream& stream) override {
    if (casts_) VIVACE_TRY(device::widen(ours_.args(set).x, products_[set].x, stream));
    return cublaslt_multiply(products_[set], stream);
  }
  std::string row() const override { return row_; }
  Floor floor() const override { return ours_.floor(); }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    return ours_.error_of(products_[0].y, stream);
  }

 private:
  const PreparedRouterGemm& ours_;
  std::string row_;
  bool casts_;
  DeviceTensors memory_;
  std::vector<CublasltProduct> products_;
};

Result<std::unique_ptr<PreparedOp>> PreparedRouterGemm::through_library(std::string_view row,
                                                                        const Stream& stream) {
  return prepared<LibraryRouterGemm>(stream, *this, row);
}

std::vector<std::string> libraries(const OpWorkload& w) {
  if (w.text("mode") == "bf16") return {"cublas_bf16"};
  return {"cublas_fp32_with_cast", "cublas_fp32", "cublas_tf32", "cublas_bf16"};
}

std::vector<OpWorkload> workloads() {
  struct Model {
    const char* name;
    int64_t n, k;
  };
  std::vector<OpWorkload> all;
  for (const Model& model : {Model{"hy3", 192, 4096},
                             {"longcat-chat", 768, 6144},
                             {"longcat-lite", 384, 3072},
                             {"dsv3", 256, 7168},
                             {"qwen3-235b", 128, 4096}}) {
    for (const char* mode : {"two_term", "exact", "bf16"}) {
      for (const int64_t m : {1, 4, 16, 48, 96, 208, 512, 1024, 2048, 4096, 8192}) {
        OpWorkload w{.suite = "router_gemm", .name = model.name, .fields = {}};
        all.push_back(w.with("m", m).with("n", model.n).with("k", model.k).with("mode", std::string(mode)));
      }
    }
  }
  return all;
}

Status check(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "m", 1, 1 << 20));
  VIVACE_TRY(check_field(w, "n", 1, 65536));
  VIVACE_TRY(check_field(w, "k", 1, 1 << 17));
  VIVACE_TRY(choice_of(w, "mode", {"two_term", "exact", "bf16"}).status());
  const auto m = static_cast<double>(w.number("m")), n = static_cast<double>(w.number("n")),
             k = static_cast<double>(w.number("k"));
  return check_memory(w, kSets * (2 * m * k + 4 * n * k + 4 * m * n));
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  return prepared<PreparedRouterGemm>(stream, w);
}

}  // namespace

const OpSuite kRouterGemmSuite = {
    "router_gemm", "bf16 activations times an fp32 or bf16 router weight, to fp32",
    workloads,     check,
    prepare,       libraries,
    nullptr,       {"n", "k"}};

}  // namespace vivace::bench
