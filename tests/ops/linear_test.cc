#include <fstream>
#include <iterator>

#include "src/device/runtime.h"
#include "src/ops/linear/cases.h"
#include "src/ops/linear/cpu_gemm.h"
#include "src/ops/linear/cublaslt.h"
#include "src/ops/linear/panel.h"
#include "src/ops/linear/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

enum class Arithmetic {
  fp32,
  integers,      ///< block formats with quantised activations
  tensor_cores,  ///< 16 products at once; addends and sums truncated to 2^-25 and 2^-23 of the largest
  fp8_wgmma,     ///< 32 products at once with 13 fraction bits, added in fp32 at least every 128
};

Arithmetic arithmetic_of(std::string_view row, DType x) {
  if (row == "cpu.q8") return Arithmetic::integers;
  if (row == "cuda.cublaslt.fp8" || (row.starts_with("sm90.split") && x == DType::fp8_e4m3))
    return Arithmetic::fp8_wgmma;
  return row.starts_with("cpu") || row == "reference" ? Arithmetic::fp32 : Arithmetic::tensor_cores;
}

/// What an implementation may differ by from float64 in y(t, n), from how it computes.
class Bounds {
 public:
  explicit Bounds(const LinearArgs& args) : args_(args) {}

  Bound of(const LinearPart& part, int64_t n, int64_t t, Arithmetic arithmetic) const {
    const int64_t k = args_.x.shape[1];
    const Tensor x_row = args_.x.at(t);
    const Fp8Scales x_scales = activation_scales(args_.x_scale), scales = fp8_scales(part.weight_scale);
    const auto* row = part.weight.at(n).as<const uint8_t>();
    std::vector<float> w(static_cast<size_t>(k));
    dequantize_row(part.weight.dtype, row, k, w.data());
    double magnitude = part.bias.present() ? std::abs(load(part.bias.dtype, part.bias.data, n)) : 0;
    double rounding = 0;
    for (int64_t i = 0; i < k; ++i) {
      const double x = double{load(x_row.dtype, x_row.data, i)} * x_scales.at(t, i);
      magnitude += std::abs(double{w[i]} * scales.at(n, i) * x);
    }
    for (int64_t g = 0; is_block_format(part.weight.dtype) && g < k / 32; ++g) {
      const auto* x = x_row.as<const float>();
      int16_t q[32];
      float d, m;
      cpu::decode_group(part.weight.dtype, row, g, q, d, m);
      double top = 0, weights = 0;
      for (int64_t i = 0; i < 32; ++i) {
        // d q and m are added apart, and each may be larger than the weight.
        magnitude += (std::abs(double{d} * q[i]) + std::abs(m)) * std::abs(x[32 * g + i]);
        top = std::max<double>(top, std::abs(x[32 * g + i]));
        weights += std::abs(w[32 * g + i]);
      }
      // Each activation is off by half a step, and the quotient that is rounded by 2^-23 of itself.
      const bool int8 = cpu::quantized_type_for(part.weight.dtype) == cpu::QuantizedType::int8;
      const double levels = int8 ? 127 : 16383, step = top / levels;
      if (arithmetic == Arithmetic::integers) rounding += weights * step * (0.5 + levels * 0x1p-22);
    }
    const Bound store = Bound::store(part.y.dtype);
    // 17 truncated addends and a truncated sum for every 16 products, each relative to at most the magnitude; their
    // signs do not cancel.
    const double steps = static_cast<double>(k) / 16 + 1;
    if (arithmetic == Arithmetic::tensor_cores)
      return Bound{(17 * 0x1p-25 + 0x1p-23) * steps * magnitude, 0} + store;
    // 33 addends, relative to the largest partial sum of 128 products, a quarter of the steps of 32 at a time.
    if (arithmetic == Arithmetic::fp8_wgmma) return Bound{33 * 0x1p-13 * magnitude / 8, 0} + store;
    return Bound{rounding, 0} + Bound::fp32_sum(k + 1, magnitude) + Bound{0x1p-23 * magnitude, 0} + store;
  }

 private:
  const LinearArgs& args_;
};

void expect_close(const LinearArgs& got, const LinearArgs& want, Arithmetic arithmetic) {
  const Bounds bounds(want);
  for (int p = 0; p < want.part_count; ++p) {
    for (int64_t t = 0; t < want.x.shape[0]; ++t) {
      const Tensor a_row = got.parts[p].y.at(t), b_row = want.parts[p].y.at(t);
      for (int64_t n = 0; n < want.parts[p].weight.shape[0]; ++n) {
        const double a = load(a_row.dtype, a_row.data, n), b = load(b_row.dtype, b_row.data, n);
        if (a == b) continue;
        const Bound bound = bounds.of(want.parts[p], n, t, arithmetic);
        // The reference is rounded when it is stored, too.
        ASSERT_LE(std::abs(a - b), bound.absolute + 2 * bound.relative * std::abs(b))
            << "part " << p << " token " << t << " output " << n << ": " << a << ", reference " << b;
      }
    }
  }
}

TEST(Linear, EveryRowAgreesWithTheReference) {
  for (const LinearCase& c : linear_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    LinearProblem want(c, 1);
    ASSERT_OK(linear_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kLinear, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        LinearProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        expect_close(got.args, want.args, arithmetic_of(row.name, c.x));
        EXPECT_TRUE(got.canaries_intact());
        if (c.strided) {  // between the parts' rows nothing is written
          const Tensor& y = got.y[0];
          for (int64_t t = 0; t < c.tokens; ++t)
            for (int64_t i = y.shape[1]; i < y.stride[0]; ++i)
              EXPECT_TRUE(std::isnan(load(y.dtype, y.data, t * y.stride[0] + i)));
        }
      });
    }
  }
}

TEST(Linear, EveryInstructionSetAgreesWithTheReference) {
  for (const LinearCase& c : linear_cases(CaseSize::test)) {
    if (c.x != DType::f32) continue;
    SCOPED_TRACE(c.name);
    LinearProblem want(c, 2), got(c, 2);
    ASSERT_OK(linear_reference(want.args, Stream{}));
    for (const cpu::Isa isa : {cpu::Isa::baseline, cpu::isa()}) {
      SCOPED_TRACE(cpu::name_of(isa));
      const cpu::GemmKernels kernels = cpu::gemm_kernels(isa);
      for (const bool quantized : {false, true}) {
        for (int p = 0; p < got.args.part_count; ++p) {
          const LinearPart& part = got.args.parts[p];
          const int64_t rows = part.weight.shape[0], k = c.k;
          const cpu::YRows y{part.y.as<float>(), part.y.stride[0]};
          if (!quantized || !is_block_format(part.weight.dtype)) {
            const cpu::XRows x{got.x.as<float>(), got.args.x.stride[0]};
            kernels.f32(x, c.tokens, part.weight, 0, rows, part.bias, y, fp8_scales(part.weight_scale));
            continue;
          }
          const cpu::QuantizedType type = cpu::quantized_type_for(part.weight.dtype);
          std::vector<float> memory(c.tokens * cpu::QuantizedRows::row_bytes_for(type, k) / 4 + 1);
          const cpu::QuantizedRows x{type, k, reinterpret_cast<uint8_t*>(memory.data())};
          for (int64_t t = 0; t < c.tokens; ++t)
            kernels.quantize(got.x.as<float>() + t * got.args.x.stride[0], x, t);
          kernels.quantized(x, c.tokens, part.weight, 0, rows, part.bias, y);
        }
        expect_close(got.args, want.args, quantized ? Arithmetic::integers : Arithmetic::fp32);
      }
    }
  }
}

TEST(Linear, ATokenDoesNotDependOnItsCompany) {
  for (const DType weight : {DType::f32, DType::bf16, DType::f16, DType::q4_0, DType::q4_1, DType::q8_0,
                             DType::q4_k, DType::q6_k}) {
    for (const bool exact : {false, true}) {
      SCOPED_TRACE(std::string(name_of(weight)) + (exact ? " exact" : ""));
      for (const int64_t k : {int64_t{256}, int64_t{2816}}) {
        const LinearCase c{"", 150, k, {{weight, 45, DType::f32}}, exact};
        const Stream stream = cpu_streams()[1];
        LinearProblem all(c, 3);
        ASSERT_OK(linear(all.args, stream));
        for (const int64_t count : {1, 2, 3, 5, 7, 8}) {
          LinearProblem few(c, 3);
          for (int64_t t = 0; t + count <= c.tokens; t += 37) {
            LinearArgs args = few.args;
            args.x = few.args.x.rows(t, count);
            args.parts[0].y = few.args.parts[0].y.rows(t, count);
            ASSERT_OK(linear(args, Stream{}));
            EXPECT_EQ(0, std::memcmp(args.parts[0].y.data, all.args.parts[0].y.at(t).data,
                                     count * 45 * sizeof(float)))
                << count << " tokens from " << t << ", k " << k;
          }
        }
      }
    }
  }
}

// Tiles of all sizes add in one order: cuda.mma whatever the tokens, and cpu.fp8.
TEST(Linear, BatchInvariantRowsGiveATokenTheSameBits) {
  for (const LinearCase& c :
       {LinearCase{"bf16", 1300, 264, {{DType::bf16, 1160}}, false, false, DType::bf16},
        LinearCase{"fp8", 300, 272, {{DType::fp8_e4m3, 80}}, false, false, DType::fp8_e4m3},
        LinearCase{"fp8 per token",
                   300,
                   272,
                   {{DType::fp8_e4m3, 80}},
                   false,
                   false,
                   DType::fp8_e4m3,
                   DType::f32,
                   Fp8Scaling::token},
        LinearCase{"fp8 blocks",
                   1300,
                   272,
                   {{DType::fp8_e4m3, 1160}},
                   false,
                   false,
                   DType::fp8_e4m3,
                   DType::f32,
                   Fp8Scaling::block},
        LinearCase{"fp8 blocks, long k",
                   300,
                   4400,
                   {{DType::fp8_e4m3, 200}},
                   false,
                   false,
                   DType::fp8_e4m3,
                   DType::f32,
                   Fp8Scaling::block},
        LinearCase{"bf16, wide", 250, 72, {{DType::bf16, 6280}}, false, false, DType::bf16},
        LinearCase{"fp8, wide", 250, 144, {{DType::fp8_e4m3, 6280}}, false, false, DType::fp8_e4m3},
        LinearCase{"fp8 blocks, wide",
                   250,
                   144,
                   {{DType::fp8_e4m3, 6280}},
                   false,
                   false,
                   DType::fp8_e4m3,
                   DType::f32,
                   Fp8Scaling::block}}) {
    SCOPED_TRACE(c.name);
    LinearProblem shapes(c, 6);
    shapes.args.batch_invariant = true;
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kLinear, shapes.args, stream, [&](const auto& row) {
        if (row.name == "reference" || row.name.starts_with("cuda.cublaslt")) return;
        SCOPED_TRACE(row.name);
        LinearProblem all(c, 6), few(c, 6);
        ASSERT_OK(row.run(all.args, stream));
        for (const int64_t count : {1, 20, 64, 65, 150, 200}) {
          LinearArgs args = few.args;
          const int64_t t = 37;
          args.x = few.args.x.rows(t, count);
          if (c.scaling != Fp8Scaling::tensor) args.x_scale = few.args.x_scale.rows(t, count);
          args.parts[0].y = few.args.parts[0].y.rows(t, count);
          ASSERT_OK(row.run(args, stream));
          ASSERT_EQ(values_of(args.parts[0].y), values_of(all.args.parts[0].y.rows(t, count))) << count;
        }
      });
    }
  }
}

TEST(Linear, Fp8HandWorked) {
  uint8_t x[] = {f32_to_fp8(2), f32_to_fp8(-4)}, weight[] = {f32_to_fp8(1), f32_to_fp8(0.5f)};
  float x_scale = 0.5f, weight_scale = 3, y = 0;
  std::vector<uint8_t> memory(256);
  LinearArgs args{.x = Tensor(x, DType::fp8_e4m3, {1, 2}),
                  .x_scale = Tensor(&x_scale, DType::f32, {1}),
                  .workspace = Tensor(memory.data(), DType::u8, {256})};
  args.parts[0].weight = Tensor(weight, DType::fp8_e4m3, {1, 2});
  args.parts[0].weight_scale = Tensor(&weight_scale, DType::f32, {1});
  args.parts[0].y = Tensor(&y, DType::f32, {1, 1});
  ASSERT_OK(linear(args, Stream{}));
  EXPECT_EQ(y, 0);
  x[0] = f32_to_fp8(6);
  args.x_scaling = Fp8Scaling::block;
  args.x_scale = Tensor(&x_scale, DType::f32, {1, 1});
  args.parts[0].weight_scale = Tensor(&weight_scale, DType::f32, {1, 1});
  ASSERT_OK(linear(args, Stream{}));
  EXPECT_EQ(y, 0.5f * 3 * (6 - 2));
}

TEST(Linear, RefusesScalesThatDisagree) {
  const auto refuses = [](const LinearArgs& base, auto&& change, const char* text) {
    LinearArgs args = base;
    change(args);
    EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, text);
  };
  LinearProblem p({"", 2, 144, {{DType::fp8_e4m3, 16}}, false, false, DType::fp8_e4m3}, 1);
  EXPECT_OK(linear(p.args, Stream{}));
  refuses(
      p.args, [](auto& a) { a.x_scale = Tensor(); }, "x_scale is absent, needs scales with fp8 x");
  refuses(
      p.args, [](auto& a) { a.parts[0].weight_scale = Tensor(); },
      "parts[0].weight_scale is absent, needs scales");
  refuses(
      p.args, [](auto& a) { a.x_scaling = Fp8Scaling::block; }, "x_scale is f32[1], needs 2 dimensions");
  refuses(
      p.args, [](auto& a) { a.x_scaling = Fp8Scaling::token; }, "x_scale.shape[0] is 1, needs tokens = 2");
  LinearProblem plain({"", 2, 144, {{DType::f32, 16}}}, 1);
  refuses(
      plain.args, [&](auto& a) { a.parts[0] = p.args.parts[0]; }, "got fp8");
  refuses(
      plain.args, [&](auto& a) { a.x_scale = p.args.x_scale; }, "x_scale is f32[1], needs none");
}

TEST(Linear, BlocksHaveTheValuesOfTheirFormat) {
  std::ifstream file(VIVACE_TEST_DATA "/gguf_blocks.bin", std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  int formats = 0;
  for (size_t at = 0; at < bytes.size(); ++formats) {
    const DType dtype = dtype_from_name(bytes.data() + at);
    SCOPED_TRACE(name_of(dtype));
    ASSERT_TRUE(is_block_format(dtype));
    uint32_t weights;
    std::memcpy(&weights, bytes.data() + at + 8, sizeof weights);
    const char* blocks = bytes.data() + at + 12;
    const int64_t block_bytes = weights / info_of(dtype).block_elements * info_of(dtype).block_bytes;
    std::vector<float> want(weights), got(weights);
    std::memcpy(want.data(), blocks + block_bytes, weights * sizeof(float));
    dequantize_row(dtype, blocks, weights, got.data());
    for (uint32_t i = 0; i < weights; ++i) {
      // d q and m are exact in fp32 up to one rounding each; their sum is rounded once more.
      int16_t q[32];
      float d, m;
      cpu::decode_group(dtype, reinterpret_cast<const uint8_t*>(blocks), i / 32, q, d, m);
      const double allowed = 0x1p-23 * (std::abs(d * q[i % 32]) + std::abs(m));
      EXPECT_LE(std::abs(got[i] - want[i]), allowed) << i;
      EXPECT_LE(std::abs(double{d} * q[i % 32] + m - want[i]), 2 * allowed) << i;
    }
    at += 12 + block_bytes + weights * sizeof(float);
  }
  EXPECT_EQ(formats, 5);
}

TEST(Linear, HandWorked) {
  float x[] = {1, 2, 3, 4, 5, 6}, weight[] = {1, 0, -1, 0.5, 0.5, 0.5}, bias[] = {10, 20}, y[4];
  const LinearArgs args{.x = Tensor(x, DType::f32, {2, 3}),
                        .parts = {{{.weight = Tensor(weight, DType::f32, {2, 3}),
                                    .bias = Tensor(bias, DType::f32, {2}),
                                    .y = Tensor(y, DType::f32, {2, 2})}}}};
  ASSERT_OK(linear(args, Stream{}));
  EXPECT_EQ(y[0], 8);
  EXPECT_EQ(y[1], 23);
  EXPECT_EQ(y[2], 8);
  EXPECT_EQ(y[3], 27.5);
}

/// One token of 64 and one q4_1 row: weights i % 16 * 0.5 + 1.
struct OneRow {
  float x[64] = {}, y = 0;
  BlockQ4_1 blocks[2];
  std::vector<uint8_t> memory;
  LinearArgs args;

  OneRow() {
    for (BlockQ4_1& block : blocks) {
      block.d = f32_to_f16(0.5f);
      block.m = f32_to_f16(1.0f);
      for (int i = 0; i < 16; ++i) block.q[i] = static_cast<uint8_t>(i | i << 4);
    }
    args.x = Tensor(x, DType::f32, {1, 64});
    args.parts[0].weight = Tensor(blocks, DType::q4_1, {1, 64});
    args.parts[0].y = Tensor(&y, DType::f32, {1, 1});
    memory.resize(linear_workspace_bytes(args, Stream{}).value());
    args.workspace = Tensor(memory.data(), DType::u8, {static_cast<int64_t>(memory.size())});
  }
};

TEST(Linear, HandWorkedQ4_1) {
  OneRow p;
  p.x[0] = 127;   // weight 1: the group's scale becomes 1
  p.x[3] = -2;    // weight 2.5
  p.x[31] = 1.4;  // weight 8.5, rounds to 1
  p.x[33] = 254;  // weight 1.5 in a group of scale 2
  p.x[34] = 4;    // weight 2
  ASSERT_OK(linear(p.args, Stream{}));
  EXPECT_EQ(p.y, 127 - 5 + 8.5f + 381 + 8);
}

TEST(Linear, GroupsOfZerosAndTinyNumbersCountAsZero) {
  OneRow p;
  ASSERT_OK(linear(p.args, Stream{}));
  EXPECT_EQ(p.y, 0);
  p.x[5] = 1e-42f;
  p.x[40] = 2;
  ASSERT_OK(linear(p.args, Stream{}));
  EXPECT_EQ(p.y, 2 * 5);
  p.x[40] = 3e38f;  // near the largest number there is
  ASSERT_OK(linear(p.args, Stream{}));
  EXPECT_TRUE(std::isinf(p.y));
  p.x[40] = 1e37f;
  ASSERT_OK(linear(p.args, Stream{}));
  EXPECT_NEAR(p.y, 5e37f, 1e31f);
}

TEST(Linear, NanAndInfinityReachEveryOutputOfTheirTokenAndNoOther) {
  for (const DType weight : {DType::f32, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k}) {
    SCOPED_TRACE(name_of(weight));
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      const LinearCase c{"", 5, 512, {{weight, 9}}};
      LinearProblem clean(c, 4), p(c, 4);
      p.x.as<float>()[2 * 512 + 300] = bad;
      for (const bool exact : {false, true}) {
        p.args.exact = clean.args.exact = exact;
        ASSERT_OK(linear(clean.args, Stream{}));
        ASSERT_OK(linear(p.args, Stream{}));
        for (int64_t t = 0; t < 5; ++t) {
          for (int64_t n = 0; n < 9; ++n) {
            const float y = p.args.parts[0].y.at(t).as<float>()[n];
            if (t == 2) {
              EXPECT_FALSE(std::isfinite(y));
              if (!exact && is_block_format(weight)) {
                EXPECT_TRUE(std::isnan(y));
              }
            } else {
              EXPECT_EQ(y, clean.args.parts[0].y.at(t).as<float>()[n]);
            }
          }
        }
      }
    }
  }
}

TEST(Linear, ExactForbidsQuantisedActivations) {
  LinearProblem p({"", 2, 64, {{DType::q4_1, 3}}}, 1);
  EXPECT_EQ(linear_explain(p.args, Stream{}).row, "cpu.q8");
  EXPECT_GT(*linear_workspace_bytes(p.args, Stream{}), 0);
  p.args.exact = true;
  const Choice choice = linear_explain(p.args, Stream{});
  EXPECT_EQ(choice.row, "cpu.f32");
  ASSERT_FALSE(choice.refused.empty());  // rows of other devices come first
  EXPECT_EQ(choice.refused.back().reason, "needs exact = 0, got 1");
  EXPECT_EQ(*linear_workspace_bytes(p.args, Stream{}), 0);
}

/// A call on a GPU without memory: enough to choose a row for it.
LinearArgs without_memory(DType type, int64_t tokens) {
  const auto on_gpu = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor(nullptr, dtype, shape, Device::cuda);
  };
  LinearArgs args{.x = on_gpu(type, {tokens, 64})};
  args.parts[0].weight = on_gpu(type, {32, 64});
  args.parts[0].y = on_gpu(DType::bf16, {tokens, 32});
  if (type == DType::fp8_e4m3) args.x_scale = args.parts[0].weight_scale = on_gpu(DType::f32, {1});
  return args;
}

std::string reason_of(const std::vector<Refusal>& refused, std::string_view row) {
  for (const Refusal& refusal : refused)
    if (refusal.row == row) return refusal.reason;
  return "not refused";
}

TEST(Linear, CublasltMultipliesFp8FromCapability89) {
  if (kLinearRows[0].device != Device::cuda) GTEST_SKIP() << "this build has no GPU rows";
  const LinearArgs bf16 = without_memory(DType::bf16, 200), fp8 = without_memory(DType::fp8_e4m3, 200);
  const auto chosen = [](const LinearArgs& args, int capability) {
    return choose(kLinear, args, Stream{.device = Device::cuda, .compute_capability = capability})->name;
  };
  std::vector<Refusal> refused;
  EXPECT_EQ(choose(kLinear, fp8, Stream{.device = Device::cuda, .compute_capability = 86}, &refused)->name,
            "cuda.mma");
  EXPECT_EQ(reason_of(refused, "cuda.cublaslt.fp8"), "needs compute_capability >= 89, got 86");
  EXPECT_EQ(chosen(fp8, 89), cublaslt_found() ? "cuda.cublaslt.fp8" : "cuda.mma");
  EXPECT_EQ(chosen(bf16, 80), cublaslt_found() ? "cuda.cublaslt" : "cuda.mma");
  LinearArgs odd = fp8;  // the library wants its scales at multiples of 16 bytes
  odd.x_scale.data = reinterpret_cast<void*>(uintptr_t{20});
  refused.clear();
  EXPECT_EQ(choose(kLinear, odd, Stream{.device = Device::cuda, .compute_capability = 90}, &refused)->name,
            "cuda.mma");
  if (cublaslt_found()) {
    EXPECT_EQ(reason_of(refused, "cuda.cublaslt.fp8"), "needs scale_alignment a multiple of 16, got 4");
  }
  LinearArgs empty = bf16;  // y is the bias, which the library is not asked for
  empty.x.shape[1] = empty.parts[0].weight.shape[1] = 0;
  EXPECT_EQ(chosen(empty, 90), "cuda.mma");
}

// Where other rows need a launch a part, one launch pays for more tokens.
TEST(Linear, DecodeStepsOnHopperAreOneLaunch) {
  if (kLinearRows[0].device != Device::cuda) GTEST_SKIP() << "this build has no GPU rows";
  const auto chosen = [](LinearArgs args, int parts) {
    for (int p = 1; p < parts; ++p) args.parts[p] = args.parts[0];
    args.part_count = parts;
    return choose(kLinear, args, Stream{.device = Device::cuda, .compute_capability = 90})->name;
  };
  for (const DType type : {DType::bf16, DType::fp8_e4m3}) {
    SCOPED_TRACE(name_of(type));
    const std::string_view library = type == DType::bf16 ? "cuda.cublaslt" : "cuda.cublaslt.fp8";
    EXPECT_EQ(chosen(without_memory(type, 32), 1), "sm90.split");
    EXPECT_EQ(chosen(without_memory(type, 96), 3), "sm90.split");
    EXPECT_EQ(chosen(without_memory(type, 33), 1), cublaslt_found() ? library : "sm90.split.128");
    EXPECT_EQ(chosen(without_memory(type, 97), 3), cublaslt_found() ? library : "sm90.split.128");
    EXPECT_EQ(chosen(without_memory(type, 129), 3), cublaslt_found() ? library : "cuda.mma");
    LinearArgs args = without_memory(type, 1);
    args.batch_invariant = true;
    EXPECT_EQ(chosen(args, 1), "cuda.mma");
    args = without_memory(type, 1);
    args.parts[0].weight.shape[0] = args.parts[0].y.shape[1] = 64 * 65536;
    EXPECT_EQ(chosen(args, 1), cublaslt_found() ? library : "cuda.mma");
  }
  LinearArgs blocks = without_memory(DType::fp8_e4m3, 128);
  blocks.x_scaling = Fp8Scaling::block;
  EXPECT_EQ(chosen(blocks, 1), "sm90.split.128");
  blocks = without_memory(DType::fp8_e4m3, 129);
  blocks.x_scaling = Fp8Scaling::block;
  EXPECT_EQ(chosen(blocks, 1), "cuda.mma");
}

TEST(Linear, ACallWithoutAlgorithmIsTheNextRowsOrAnError) {
  if (kLinearRows[0].device != Device::cuda) GTEST_SKIP() << "this build has no GPU rows";
  for (const DType type : {DType::bf16, DType::fp8_e4m3}) {
    SCOPED_TRACE(name_of(type));
    const LinearArgs args = without_memory(type, 0);  // nothing is launched
    Dispatch dispatched;
    const Stream stream{.device = Device::cuda, .compute_capability = 89, .dispatch = &dispatched};
    ASSERT_OK(dispatch(kLinearWithoutAlgorithm, args, stream));
    ASSERT_EQ(dispatched.counts().size(), 1u);
    EXPECT_EQ(dispatched.counts()[0].op, "linear");
    EXPECT_EQ(dispatched.counts()[0].row, "cuda.mma");
    ASSERT_OK(dispatched.prefer("linear=cuda.cublaslt"));
    EXPECT_FAILS(dispatch(kLinearWithoutAlgorithm, args, stream), Code::unsupported,
                 "needs cublaslt_algorithm = 1, got 0");
    EXPECT_EQ(dispatched.counts()[0].calls, 1);
  }
}

TEST(Linear, WhatTheLibraryFailsAtIsNoRow) {
  if (!cublaslt_found() || device::device_count() > 0) GTEST_SKIP() << "needs cuBLASLt and no GPU";
  const LinearArgs args = without_memory(DType::bf16, 64);
  const Choice choice = linear_explain(args, Stream{.device = Device::cuda, .compute_capability = 90});
  EXPECT_EQ(choice.row, "");
  ASSERT_EQ(choice.refused.size(), 1u);
  EXPECT_EQ(choice.refused[0].row, "cuda.cublaslt");
  EXPECT_NE(choice.refused[0].reason.find("cuBLASLt: a handle failed"), std::string::npos)
      << choice.refused[0].reason;
  // Of a GPU that is not here nobody is asked.
  EXPECT_EQ(linear_explain(args, Stream{.device = Device::cuda, .ordinal = -1, .compute_capability = 90}).row,
            "cuda.cublaslt");
}

TEST(Linear, CostCountsWhatMustMove) {
  LinearProblem p({"", 2, 64, {{DType::q4_1, 3, DType::f32}}}, 1);
  EXPECT_EQ(linear_cost(p.args).bytes, 2 * 64 * 4 + 3 * 2 * 20 + 3 * 4 + 2 * 3 * 4);
  EXPECT_EQ(linear_cost(p.args).flops, 2 * 2 * 64 * 3);
}

TEST(Linear, RefusesWhatDisagrees) {
  LinearProblem p({"", 2, 64, {{DType::q4_1, 3, DType::f32}, {DType::f32, 4}}}, 1);
  LinearArgs args = p.args;
  args.parts[1].weight.shape[1] = 63;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument,
               "linear: parts[1].weight.shape[1] is 63, needs k = 64 (from x.shape[1])");
  args = p.args;
  args.parts[0].y.shape[1] = 4;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument,
               "linear: parts[0].y.shape[1] is 4, needs n0 = 3 (from parts[0].weight.shape[0])");
  args = p.args;
  args.parts[0].bias.shape[0] = 2;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "parts[0].bias.shape[0] is 2");
  args = p.args;
  args.part_count = 4;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "part_count is 4, needs 1 to 3");
  args = p.args;
  args.part_count = 3;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "parts[2].weight is absent");
  args = p.args;
  args.parts[0].weight.dtype = DType::i32;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "got i32");
  args = p.args;
  args.workspace.shape[0] -= 1;
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "linear: workspace.shape[0] is ");
  args.workspace = {};
  EXPECT_FAILS(linear(args, Stream{}), Code::invalid_argument, "linear: workspace.shape[0] is 0, needs ");
}

}  // namespace
}  // namespace vivace
