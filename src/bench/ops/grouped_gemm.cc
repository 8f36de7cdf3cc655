#include <algorithm>
#include <cmath>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/core/number.h"
#include "src/ops/linear/cublaslt.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "vivace/grouped_gemm.h"

namespace vivace::bench {

namespace {

int64_t sets_of(int64_t rows) {
  return rows >= 1024 ? 2 : 3;
}

class PreparedGroupedGemm final : public PreparedOp {
 public:
  explicit PreparedGroupedGemm(const OpWorkload& w)
      : groups_(w.number("groups")),
        rows_(w.number("rows")),
        n_(w.number("n")),
        k_(w.number("k")),
        quant_(w.text("quant")) {}

  Status prepare(const Stream& stream) {
    const int64_t count = sets_of(rows_), all = groups_ * rows_;
    const bool fp8 = quant_ != "bf16", blockwise = quant_ == "blockwise";
    const DType type = fp8 ? DType::fp8_e4m3 : DType::bf16;
    std::vector<int32_t> starts, rows(static_cast<size_t>(groups_), static_cast<int32_t>(rows_));
    for (int64_t g = 0; g < groups_; ++g) starts.push_back(static_cast<int32_t>(g * rows_));
    const int64_t blocks_n = scale_blocks(n_), blocks_k = scale_blocks(k_);
    const auto constant = [&](std::initializer_list<int64_t> shape, double value) {
      return memory_.copy_of(
          std::vector<float>(static_cast<size_t>(Tensor(nullptr, DType::f32, shape).elements()),
                             static_cast<float>(value)),
          DType::f32, shape, stream);
    };
    scale_ = 1 / std::sqrt(static_cast<double>(k_));
    for (int64_t i = 0; i < count; ++i) {
      GroupedGemmArgs& args = sets_.emplace_back();
      VIVACE_TRY_ASSIGN(args.x, memory_.random(type, {all, k_}, 1, 10 * i + 1, stream));
      VIVACE_TRY_ASSIGN(args.weight,
                        memory_.random(type, {groups_, n_, k_}, fp8 ? 1 : scale_, 10 * i + 2, stream));
      VIVACE_TRY_ASSIGN(args.y, memory_.make(DType::bf16, {all, n_}, stream));
      VIVACE_TRY_ASSIGN(args.group_start, memory_.copy_of(starts, DType::i32, {groups_}, stream));
      VIVACE_TRY_ASSIGN(args.group_rows, memory_.copy_of(rows, DType::i32, {groups_}, stream));
      if (blockwise) {
        VIVACE_TRY_ASSIGN(args.x_scale, constant({all, blocks_k}, 1));
        VIVACE_TRY_ASSIGN(args.weight_scale, constant({groups_, blocks_n, blocks_k}, scale_));
      } else if (fp8) {
        VIVACE_TRY_ASSIGN(args.x_scale, constant({1}, 1));
        VIVACE_TRY_ASSIGN(args.weight_scale, constant({groups_}, scale_));
      }
    }
    if (!fp8) scale_ = 1;  // it is in the weights
    choice_ = grouped_gemm_explain(sets_[0], stream);
    return {};
  }
  int64_t sets() const override { return std::ssize(sets_); }
  Status call(int64_t set, const Stream& stream) override { return grouped_gemm(sets_[set], stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override {
    const double element = quant_ == "bf16" ? 2 : 1;
    return {.bytes = static_cast<double>(groups_ * (n_ + rows_) * k_) * element +
                     static_cast<double>(groups_ * rows_ * n_) * 2,
            .flops = 2.0 * static_cast<double>(groups_ * rows_ * n_ * k_),
            .flop_rate = quant_ == "bf16" ? kBf16Rate : kFp8Rate};
  }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    return error_of(sets_[0].y, stream);
  }
  Result<std::unique_ptr<PreparedOp>> through_library(std::string_view row, const Stream& stream) override;

  const GroupedGemmArgs& args(int64_t set) const { return sets_[set]; }
  int64_t rows_per_group() const { return rows_; }
  /// Of results for set 0: of the last row of each group.
  Result<std::optional<double>> error_of(const Tensor& results, const Stream& stream) const {
    const GroupedGemmArgs& args = sets_[0];
    double worst = 0;
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t row = (g + 1) * rows_ - 1;
      VIVACE_TRY_ASSIGN(const HostTensor x, download(args.x.rows(row, 1), stream));
      VIVACE_TRY_ASSIGN(const HostTensor w, download(args.weight.at(g), stream));
      VIVACE_TRY_ASSIGN(const HostTensor y, download(results.rows(row, 1), stream));
      std::vector<float> values(static_cast<size_t>(k_));
      for (int64_t i = 0; i < k_; ++i) values[i] = load(x.tensor.dtype, x.tensor.data, i);
      std::vector<double> differences(static_cast<size_t>((n_ + 16) / 17), 0);
      check_threads().parallel_for(std::ssize(differences), [&](int64_t sample, int) {
        const int64_t n = sample * 17;
        double want = 0;
        for (int64_t i = 0; i < k_; ++i)
          want += double{values[i]} * load(w.tensor.dtype, w.tensor.data, n * k_ + i);
        differences[sample] = std::abs(want * scale_ - load(DType::bf16, y.tensor.data, n));
      });
      worst = larger(worst, largest(differences));
    }
    return std::optional<double>(worst);
  }

 private:
  int64_t groups_, rows_, n_, k_;
  std::string quant_;
  double scale_ = 1;
  DeviceTensors memory_;
  std::vector<GroupedGemmArgs> sets_;
  Choice choice_;
};

/// The same results by cuBLASLt: a product per group, one after the other.
class LibraryLoop final : public PreparedOp {
 public:
  LibraryLoop(const PreparedGroupedGemm& ours, std::string_view row) : ours_(ours), row_(row) {}

  Status prepare(const Stream& stream) {
    VIVACE_TRY_ASSIGN(const Tensor workspace, memory_.make(DType::u8, {kCublasltWorkspaceBytes}, stream));
    const int64_t rows = ours_.rows_per_group();
    for (int64_t i = 0; i < ours_.sets(); ++i) {
      const GroupedGemmArgs& args = ours_.args(i);
      VIVACE_TRY_ASSIGN(const Tensor y,
                        memory_.make(DType::bf16, {args.y.shape[0], args.y.shape[1]}, stream));
      y_.push_back(y);
      for (int64_t g = 0; g < args.weight.shape[0]; ++g) {
        CublasltProduct& product = products_.emplace_back();
        product.x = args.x.rows(g * rows, rows);
        product.weight = args.weight.at(g);
        product.y = y.rows(g * rows, rows);
        product.x_scale = args.x_scale;
        // The scales of all groups are equal, and cuBLASLt wants its own at a multiple of 16 bytes.
        if (args.weight_scale.present()) product.weight_scale = args.weight_scale.rows(0, 1);
        product.workspace = workspace.data;
      }
    }
    return {};
  }
  int64_t sets() const override { return ours_.sets(); }
  Status call(int64_t set, const Stream& stream) override {
    const int64_t groups = std::ssize(products_) / sets();
    for (int64_t g = 0; g < groups; ++g) VIVACE_TRY(cublaslt_multiply(products_[set * groups + g], stream));
    return {};
  }
  std::string row() const override { return row_; }
  Floor floor() const override { return ours_.floor(); }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    return ours_.error_of(y_[0], stream);
  }

 private:
  const PreparedGroupedGemm& ours_;
  std::string row_;
  DeviceTensors memory_;
  std::vector<Tensor> y_;                  // of each set
  std::vector<CublasltProduct> products_;  // of each set, its groups
};

Result<std::unique_ptr<PreparedOp>> PreparedGroupedGemm::through_library(std::string_view row,
                                                                         const Stream& stream) {
  return prepared<LibraryLoop>(stream, *this, row);
}

/// The library takes no scales of 128 x 128 beside activations with scales of 1 x 128.
std::vector<std::string> libraries(const OpWorkload& w) {
  return w.text("quant") == "blockwise" ? std::vector<std::string>()
                                        : std::vector<std::string>{"cublaslt_loop"};
}

std::vector<OpWorkload> workloads() {
  std::vector<OpWorkload> all;
  for (const char* quant : {"per_tensor", "blockwise", "bf16"}) {
    for (const int64_t rows : {1, 16, 64, 256, 1024, 4096}) {
      OpWorkload w{.suite = "grouped_gemm", .name = "8x" + std::to_string(rows), .fields = {}};
      w.with("groups", int64_t{8}).with("rows", rows).with("n", int64_t{4096}).with("k", int64_t{4096});
      all.push_back(w.with("quant", std::string(quant)));
    }
  }
  return all;
}

Status check(const OpWorkload& w) {
  const int64_t groups = w.number("groups");
  VIVACE_TRY(check_field(w, "groups", 1, 4096));
  VIVACE_TRY(check_field(w, "rows", 1, std::min<int64_t>(1 << 20, INT32_MAX / groups)));
  VIVACE_TRY(check_field(w, "n", 1, 1 << 17));
  VIVACE_TRY(check_field(w, "k", 16, 1 << 17));
  VIVACE_TRY_ASSIGN(const size_t quant, choice_of(w, "quant", {"per_tensor", "blockwise", "bf16"}));
  const double element = quant == 2 ? 2 : 1;
  const auto rows = static_cast<double>(w.number("rows")), n = static_cast<double>(w.number("n")),
             k = static_cast<double>(w.number("k"));
  return check_memory(
      w, static_cast<double>(sets_of(w.number("rows")) * groups) * ((n + rows) * k * element + 2 * rows * n));
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  return prepared<PreparedGroupedGemm>(stream, w);
}

}  // namespace

const OpSuite kGroupedGemmSuite = {"grouped_gemm", "matrices of experts after tokens were sorted by expert",
                                   workloads,      check,
                                   prepare,        libraries,
                                   nullptr,        {"groups", "rows"}};

}  // namespace vivace::bench
