#pragma once

#include <span>

#include "src/core/number.h"
#include "src/ops/linear/fp8_scales.h"
#include "src/ops/problem.h"
#include "vivace/linear.h"

namespace vivace {

struct LinearCasePart {
  DType weight = DType::none;
  int64_t n = 0;
  DType bias = DType::none;
};

struct LinearCase {
  const char* name;
  int64_t tokens, k;
  LinearCasePart parts[LinearArgs::kMaxParts];
  bool exact = false;
  bool strided = false;  ///< x, y and weights have longer rows than they use; parts share one y buffer
  DType x = DType::f32, y = DType::f32;
  Fp8Scaling scaling = Fp8Scaling::tensor;  ///< of fp8 x
};

inline constexpr LinearCase kLinearTestCases[] = {
    {"no tokens", 0, 64, {{DType::q4_1, 3}}},
    {"no outputs", 2, 32, {{DType::f32, 0}, {DType::q8_0, 5}}},
    {"k is 0", 2, 0, {{DType::f32, 3, DType::f32}}},
    {"one of each", 1, 1, {{DType::f32, 1}}},
    {"odd k", 3, 37, {{DType::bf16, 5, DType::bf16}, {DType::f16, 3, DType::f16}}},
    {"f32", 7, 576, {{DType::f32, 100, DType::f32}}},
    {"f32, k over one stretch", 5, 1536, {{DType::f32, 9}}},
    {"bf16", 8, 256, {{DType::bf16, 33}}},
    {"f16", 9, 2500, {{DType::f16, 6}}},
    {"q4_0", 1, 32, {{DType::q4_0, 1}}},
    {"q4_0, eight tokens", 8, 576, {{DType::q4_0, 100, DType::f32}}},
    {"q4_1", 1, 576, {{DType::q4_1, 100}}},
    {"q4_1, three tokens", 3, 64, {{DType::q4_1, 3, DType::bf16}}},
    {"q4_1, long k", 5, 4160, {{DType::q4_1, 17}}},
    {"q8_0", 2, 576, {{DType::q8_0, 100}}},
    {"q8_0, long k", 7, 1536, {{DType::q8_0, 9, DType::f32}}},
    {"q4_k", 1, 256, {{DType::q4_k, 3}}},
    {"q4_k, long k", 9, 2560, {{DType::q4_k, 20}}},
    {"q6_k", 1, 256, {{DType::q6_k, 1}}},
    {"q6_k, long k", 3, 1536, {{DType::q6_k, 11}}},
    {"many tokens", 133, 64, {{DType::q4_1, 40}}},
    {"qkv", 33, 576, {{DType::q4_1, 100}, {DType::q4_1, 24}, {DType::q4_1, 24}}, false, true},
    {"mixed parts", 5, 256, {{DType::q4_k, 9}, {DType::q6_k, 8}, {DType::bf16, 7, DType::f32}}, false, true},
    {"exact q4_0", 3, 64, {{DType::q4_0, 5}}, true},
    {"exact q4_1", 5, 1536, {{DType::q4_1, 10, DType::f16}}, true},
    {"exact q8_0", 1, 576, {{DType::q8_0, 7}}, true},
    {"exact k-quants", 2, 1280, {{DType::q4_k, 4}, {DType::q6_k, 5}}, true, true},
    // clang-format off
    {"bf16 x, one token", 1, 1032, {{DType::bf16, 40}}, false, false, DType::bf16, DType::bf16},
    {"bf16 x, f32 y", 9, 256, {{DType::bf16, 33, DType::f32}}, false, false, DType::bf16},
    {"bf16 x, k is 0", 2, 0, {{DType::bf16, 3, DType::bf16}}, false, false, DType::bf16, DType::bf16},
    {"bf16 x, qkv", 5, 264, {{DType::bf16, 40, DType::bf16}, {DType::bf16, 23}, {DType::bf16, 16, DType::f32}}, false,
     true, DType::bf16, DType::bf16},
    {"bf16 x, odd k", 3, 37, {{DType::bf16, 5}}, false, false, DType::bf16, DType::bf16},
    {"bf16 x, 100 tokens", 100, 136, {{DType::bf16, 200}}, false, false, DType::bf16},
    {"bf16 x, large tiles", 129, 72, {{DType::bf16, 6280, DType::bf16}}, false, false, DType::bf16, DType::bf16},
    {"fp8", 7, 272, {{DType::fp8_e4m3, 48, DType::bf16}}, false, false, DType::fp8_e4m3},
    {"fp8, odd k", 3, 37, {{DType::fp8_e4m3, 5}, {DType::fp8_e4m3, 4}}, false, false, DType::fp8_e4m3},
    {"fp8, bf16 y", 130, 144, {{DType::fp8_e4m3, 80}}, false, false, DType::fp8_e4m3, DType::bf16},
    {"fp8, large tiles", 129, 144, {{DType::fp8_e4m3, 6280}}, false, false, DType::fp8_e4m3, DType::bf16},
    {"fp8, per token", 20, 272, {{DType::fp8_e4m3, 48}, {DType::fp8_e4m3, 17}}, false, true, DType::fp8_e4m3,
     DType::f32, Fp8Scaling::token},
    {"fp8, blocks", 7, 272, {{DType::fp8_e4m3, 200}, {DType::fp8_e4m3, 130, DType::f32}}, false, false,
     DType::fp8_e4m3, DType::f32, Fp8Scaling::block},
    {"fp8, blocks, odd k", 3, 133, {{DType::fp8_e4m3, 150}}, false, false, DType::fp8_e4m3, DType::f32,
     Fp8Scaling::block},
    {"fp8, blocks, a cluster of 2", 64, 2064, {{DType::fp8_e4m3, 1288, DType::bf16}}, false, false, DType::fp8_e4m3,
     DType::bf16, Fp8Scaling::block},
    {"fp8, blocks, a cluster of 8", 20, 4400, {{DType::fp8_e4m3, 200}, {DType::fp8_e4m3, 24}}, false, true,
     DType::fp8_e4m3, DType::bf16, Fp8Scaling::block},
    {"fp8, blocks, k of a whole cluster", 33, 16384, {{DType::fp8_e4m3, 40}}, false, false, DType::fp8_e4m3, DType::f32,
     Fp8Scaling::block},
    {"fp8, blocks, k past a cluster", 5, 16400, {{DType::fp8_e4m3, 24}}, false, false, DType::fp8_e4m3, DType::f32,
     Fp8Scaling::block},
    {"fp8, qkv of 40 tokens, k shared by 8", 40, 4400, {{DType::fp8_e4m3, 200, DType::bf16}, {DType::fp8_e4m3, 24}, {DType::fp8_e4m3, 65}},
     false, true, DType::fp8_e4m3, DType::bf16},
    {"fp8, 100 tokens, k past the stages", 100, 8208, {{DType::fp8_e4m3, 130}}, false, false, DType::fp8_e4m3, DType::f32,
     Fp8Scaling::token},
    {"fp8, blocks, 100 tokens, k past the stages", 100, 8208, {{DType::fp8_e4m3, 130}, {DType::fp8_e4m3, 64}}, false, true,
     DType::fp8_e4m3, DType::bf16, Fp8Scaling::block},
    {"bf16 x, 33 tokens, 161 tiles", 33, 136, {{DType::bf16, 10250, DType::bf16}}, false, true, DType::bf16, DType::bf16},
    {"bf16 x, qkv of 17 tokens, k past the stages", 17, 9000, {{DType::bf16, 70}, {DType::bf16, 8}, {DType::bf16, 33, DType::f32}},
     false, true, DType::bf16, DType::bf16},
    {"bf16 x, a part without outputs", 9, 264, {{DType::bf16, 40}, {DType::bf16, 0}, {DType::bf16, 23}}, false, false,
     DType::bf16, DType::bf16},
    {"bf16 x, 128 tokens", 128, 4104, {{DType::bf16, 100}}, false, false, DType::bf16, DType::f32},
    {"fp8, blocks, large tiles", 129, 144, {{DType::fp8_e4m3, 6280}}, false, false, DType::fp8_e4m3, DType::bf16,
     Fp8Scaling::block},
    // clang-format on
};

// The layers of SmolLM2-135M (Q4_1, vocabulary table Q8_0), decoding 1 and 8 requests and prefilling.
#define VIVACE_SMOLLM2_LAYERS(step, tokens)                                                         \
  {"SmolLM2 qkv " step, tokens, 576, {{DType::q4_1, 576}, {DType::q4_1, 192}, {DType::q4_1, 192}}}, \
      {"SmolLM2 o " step, tokens, 576, {{DType::q4_1, 576}}},                                       \
      {"SmolLM2 gate-up " step, tokens, 576, {{DType::q4_1, 1536}, {DType::q4_1, 1536}}}, {         \
    "SmolLM2 down " step, tokens, 1536, {                                                           \
      { DType::q4_1, 576 }                                                                          \
    }                                                                                               \
  }

inline constexpr LinearCase kLinearServingCases[] = {
    VIVACE_SMOLLM2_LAYERS("x1", 1),
    VIVACE_SMOLLM2_LAYERS("x8", 8),
    VIVACE_SMOLLM2_LAYERS("x512", 512),
    {"SmolLM2 vocabulary x1", 1, 576, {{DType::q8_0, 49152}}},
    {"SmolLM2 vocabulary x8", 8, 576, {{DType::q8_0, 49152}}},
    {"q4_0 x1", 1, 2048, {{DType::q4_0, 8192}}},
    {"q4_k x1", 1, 2048, {{DType::q4_k, 8192}}},
    {"q6_k x1", 1, 2048, {{DType::q6_k, 8192}}},
    {"q4_k x8", 8, 2048, {{DType::q4_k, 2048}}},
    {"q6_k x8", 8, 2048, {{DType::q6_k, 2048}}},
    {"bf16 x1", 1, 2048, {{DType::bf16, 4096}}},
    {"bf16 x512", 512, 2048, {{DType::bf16, 2048}}},
    {"f32 x512", 512, 576, {{DType::f32, 1536}}},
    {"exact q4_1 x1", 1, 576, {{DType::q4_1, 1536}, {DType::q4_1, 1536}}, true},
    {"exact q4_1 x512", 512, 576, {{DType::q4_1, 1536}, {DType::q4_1, 1536}}, true},
    {"fp8 x8", 8, 2048, {{DType::fp8_e4m3, 2048}}, false, false, DType::fp8_e4m3},
};
#undef VIVACE_SMOLLM2_LAYERS

inline std::span<const LinearCase> linear_cases(CaseSize size) {
  if (size == CaseSize::test) return kLinearTestCases;
  return kLinearServingCases;
}

/// A weight matrix of any type with weights of about `deviation`: normal numbers for plain types, random bits
/// with sensible scales for block formats.
inline Guarded random_weight(DType dtype, int64_t n, int64_t k, std::mt19937& rng, int64_t row_stride = 0,
                             double deviation = 0.1) {
  Guarded weight(dtype, {n, k}, row_stride);
  if (!is_block_format(dtype)) return std::move(weight.random(rng, deviation));
  auto* bytes = weight.as<uint8_t>();
  const int64_t block_bytes = info_of(dtype).block_bytes;
  std::uniform_int_distribution<int> byte(0, 255);
  std::uniform_real_distribution<float> spread(0.5f, 1.5f);
  for (int64_t i = 0; i < weight.bytes(); ++i) bytes[i] = static_cast<uint8_t>(byte(rng));
  const auto put = [&](uint8_t* at, double value) {
    const uint16_t half = f32_to_f16(static_cast<float>(value * deviation) * spread(rng));
    std::memcpy(at, &half, 2);
  };
  for (uint8_t* block = bytes; block < bytes + weight.bytes(); block += block_bytes) {
    switch (dtype) {  // d (and the min) so that the integers' spread becomes `deviation`
      case DType::q4_0:
        put(block, 1 / 4.6);
        break;
      case DType::q4_1:
        put(block, 1 / 4.6);
        put(block + 2, -7.5 / 4.6);
        break;
      case DType::q8_0:
        put(block, 1 / 74.0);
        break;
      case DType::q4_k:
        put(block, 1 / 160.0);
        put(block + 2, 7.5 / 160);
        break;
      default:
        put(block + 208, 1 / 1400.0);
    }
  }
  return weight;
}

/// A case with its memory: random inputs, poisoned outputs.
struct LinearProblem {
  Guarded x, y[LinearArgs::kMaxParts], weight[LinearArgs::kMaxParts], bias[LinearArgs::kMaxParts], workspace;
  Guarded x_scale, weight_scale[LinearArgs::kMaxParts];
  LinearArgs args;

  LinearProblem(const LinearCase& c, uint32_t seed, const Stream& stream = {}) {
    std::mt19937 rng(seed);
    // fp8 values are spread over the type's range and brought back by their scales.
    constexpr double kSpread = 60;
    const bool fp8 = c.x == DType::fp8_e4m3;
    const auto scales = [&](std::vector<int64_t> shape, double mean) {
      return std::move(Guarded(DType::f32, shape).random(rng, 0.2 * mean, mean));
    };
    x = Guarded(c.x, {c.tokens, c.k}, c.strided ? c.k + 16 : 0);
    x.random(rng, fp8 ? kSpread : 1);
    args = {.x = x, .part_count = 0, .exact = c.exact};
    if (fp8) {
      args.x_scaling = c.scaling;
      x_scale = c.scaling == Fp8Scaling::tensor  ? scales({1}, 1 / kSpread)
                : c.scaling == Fp8Scaling::token ? scales({c.tokens}, 1 / kSpread)
                                                 : scales({c.tokens, scale_blocks(c.k)}, 1 / kSpread);
      args.x_scale = x_scale;
    }
    int64_t width = 0, column = 0;
    for (const LinearCasePart& part : c.parts) width += part.n;
    for (const LinearCasePart& part : c.parts) {
      if (part.weight == DType::none) break;
      const int p = args.part_count++;
      weight[p] =
          random_weight(part.weight, part.n, c.k, rng, c.strided ? c.k + 256 : 0, fp8 ? kSpread : 0.1);
      if (part.bias != DType::none) bias[p] = std::move(Guarded(part.bias, {part.n}).random(rng));
      args.parts[p].weight = weight[p];
      args.parts[p].bias = bias[p];
      if (fp8) {
        weight_scale[p] = c.scaling == Fp8Scaling::block
                              ? scales({scale_blocks(part.n), scale_blocks(c.k)}, 0.1 / kSpread)
                              : scales({1}, 0.1 / kSpread);
        args.parts[p].weight_scale = weight_scale[p];
      }
      if (c.strided) {
        if (p == 0) y[0] = Guarded(c.y, {c.tokens, width}, width + 5);
        args.parts[p].y = y[0];
        args.parts[p].y.data = y[0].as<uint8_t>() + column * info_of(c.y).block_bytes;
        args.parts[p].y.shape[1] = part.n;
        column += part.n;
      } else {
        y[p] = Guarded(c.y, {c.tokens, part.n});
        args.parts[p].y = y[p];
      }
    }
    if (const Result<int64_t> bytes = linear_workspace_bytes(args, stream); bytes.ok() && *bytes > 0) {
      workspace = Guarded(DType::u8, {*bytes});
      args.workspace = workspace;
    }
  }
  bool canaries_intact() const {
    for (const Guarded& part : y)
      if (part.tensor().present() && !part.canaries_intact()) return false;
    return !workspace.tensor().present() || workspace.canaries_intact();
  }
};

}  // namespace vivace
