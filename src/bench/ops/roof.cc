// What this machine sustains: the roofs that every share of a floor refers to.

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/device/random.h"
#include "vivace/linear.h"

namespace vivace::bench {

namespace {

constexpr const char* kCases[] = {"read", "copy", "bf16", "fp8"};
constexpr int64_t kMemoryBytes = int64_t{4} << 30, kMatrix = 8192;

class PreparedMemoryRoof final : public PreparedOp {
 public:
  explicit PreparedMemoryRoof(bool copies) : copies_(copies) {}
  Status prepare(const Stream& stream) {
    VIVACE_TRY_ASSIGN(data_, memory_.random(DType::f32, {kMemoryBytes / 4}, 1, 1, stream));
    VIVACE_TRY_ASSIGN(sink_, memory_.make(DType::f32, {1}, stream));
    return {};
  }
  int64_t sets() const override { return 1; }
  Status call(int64_t, const Stream& stream) override {
    if (!copies_) return device::read_all(data_.data, kMemoryBytes, sink_.as<float>(), stream);
    return device::copy_on_device(data_.as<char>() + kMemoryBytes / 2, data_.data, kMemoryBytes / 2, stream);
  }
  std::string row() const override { return copies_ ? "copy" : "read"; }
  Floor floor() const override { return {.bytes = static_cast<double>(kMemoryBytes)}; }
  Result<std::optional<double>> max_abs_error(const Stream&) override { return std::optional<double>(); }

 private:
  bool copies_;
  DeviceTensors memory_;
  Tensor data_, sink_;
};

class PreparedMatrixRoof final : public PreparedOp {
 public:
  explicit PreparedMatrixRoof(bool fp8) : fp8_(fp8) {}
  Status prepare(const Stream& stream) {
    const DType type = fp8_ ? DType::fp8_e4m3 : DType::bf16;
    VIVACE_TRY_ASSIGN(args_.x, memory_.random(type, {kMatrix, kMatrix}, 1, 1, stream));
    VIVACE_TRY_ASSIGN(args_.parts[0].weight, memory_.random(type, {kMatrix, kMatrix}, 1, 2, stream));
    VIVACE_TRY_ASSIGN(args_.parts[0].y, memory_.make(DType::bf16, {kMatrix, kMatrix}, stream));
    if (fp8_) {
      VIVACE_TRY_ASSIGN(args_.x_scale, memory_.copy_of(std::vector<float>{1}, DType::f32, {1}, stream));
      args_.parts[0].weight_scale = args_.x_scale;
    }
    VIVACE_TRY_ASSIGN(const int64_t scratch, linear_workspace_bytes(args_, stream));
    if (scratch > 0) {
      VIVACE_TRY_ASSIGN(args_.workspace, memory_.make(DType::u8, {scratch}, stream));
    }
    choice_ = linear_explain(args_, stream);
    return {};
  }
  int64_t sets() const override { return 1; }
  Status call(int64_t, const Stream& stream) override { return linear(args_, stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override {
    return {.bytes = 0, .flops = 2.0 * kMatrix * kMatrix * kMatrix, .flop_rate = fp8_ ? kFp8Rate : kBf16Rate};
  }
  Result<std::optional<double>> max_abs_error(const Stream&) override { return std::optional<double>(); }

 private:
  bool fp8_;
  DeviceTensors memory_;
  LinearArgs args_;
  Choice choice_;
};

Status check(const OpWorkload& w) {
  for (const char* name : kCases) {
    if (w.name == name) return {};
  }
  return invalid_argument("roof: case is '{}', needs read, copy, bf16 or fp8", w.name);
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  if (w.name == "read" || w.name == "copy") return prepared<PreparedMemoryRoof>(stream, w.name == "copy");
  return prepared<PreparedMatrixRoof>(stream, w.name == "fp8");
}

std::vector<OpWorkload> workloads() {
  std::vector<OpWorkload> all;
  for (const char* name : kCases) all.push_back({.suite = "roof", .name = name, .fields = {}});
  return all;
}

}  // namespace

const OpSuite kRoofSuite = {"roof", "memory read and copy, and the largest library products", workloads,
                            check, prepare};

}  // namespace vivace::bench
