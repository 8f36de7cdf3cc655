#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "src/ops/fused_moe/table.h"
#include "src/ops/problem.h"
#include "vivace/fused_moe.h"

namespace vivace {

enum class MoeRouting {
  distinct,  ///< a token's experts differ
  half,      ///< they differ, and half of the experts, a drawn one, have no row
  zipf,      ///< they differ, and the r-th most popular has a weight of 1 / r
  any,       ///< with repetitions, ids -1 and ids past the experts
  one,       ///< every choice of every token is expert 0
  none,      ///< no choice has work
};

/// What the ids of a case are.
enum class MoeIds {
  here,   ///< 0 is the first expert
  slice,  ///< kFirstExpert is; those before and behind are elsewhere
  map,    ///< any of twice as many and one, by an expert_map
};
inline constexpr int32_t kFirstExpert = 5;

struct FusedMoeCase {
  const char* name;
  int64_t tokens, hidden, intermediate, experts, top_k;
  DType weight = DType::f32;
  MoeRouting routing = MoeRouting::distinct;
  int64_t shared = 0;      ///< intermediate of the shared expert; 0: none
  bool separate = false;   ///< experts given one by one
  int64_t row_stride = 0;  ///< of x and y; 0: contiguous
  DType x = DType::f32;
  bool blocks = false;  ///< fp8: scales of blocks of 128, not one per expert
  int64_t block_offset = 0;
  DType y = DType::none;  ///< none: x's
  MoeIds are = MoeIds::here;
  SwiGlu swiglu = {};
};

inline constexpr FusedMoeCase kFusedMoeTestCases[] = {
    {"no tokens", 0, 32, 16, 4, 2},
    {"one of each", 1, 1, 1, 1, 1},
    {"no choices", 3, 16, 8, 4, 0, DType::f32, MoeRouting::distinct, 24},
    {"no experts", 3, 16, 8, 0, 2, DType::f32, MoeRouting::none, 24},
    {"all remote", 5, 32, 16, 4, 2, DType::f32, MoeRouting::none},
    {"all remote, shared", 5, 32, 16, 4, 2, DType::bf16, MoeRouting::none, 40},
    {"decode", 1, 96, 72, 12, 3, DType::bf16},
    {"odd sizes", 7, 37, 19, 5, 2, DType::f32, MoeRouting::any, 23},
    {"f16", 9, 64, 130, 8, 4, DType::f16},
    {"bf16, one by one, shared", 33, 128, 64, 16, 4, DType::bf16, MoeRouting::any, 96, true},
    {"one token, one expert k times", 1, 64, 32, 4, 4, DType::f32, MoeRouting::one},
    {"many tokens, one expert k times", 150, 64, 32, 4, 4, DType::f32, MoeRouting::one},
    {"strided rows", 6, 40, 24, 4, 2, DType::f32, MoeRouting::distinct, 16, false, 64},
    {"more experts than tokens", 4, 16, 8, 768, 12, DType::bf16, MoeRouting::any},
    {"more pairs than a block", 600, 24, 16, 16, 8, DType::f32, MoeRouting::any, 8},
    {"bf16 activations", 3, 64, 32, 4, 2, DType::bf16, MoeRouting::distinct, 16, false, 0, DType::bf16},
    // clang-format off
    {"bf16 activations, one token", 1, 256, 40, 6, 3, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16},
    {"bf16 activations, strided", 21, 72, 24, 4, 2, DType::bf16, MoeRouting::any, 8, false, 80, DType::bf16},
    {"bf16 activations, wider than a tile", 11, 200, 136, 6, 2, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16},
    {"bf16 activations, more experts than threads", 40, 40, 24, 300, 2, DType::bf16, MoeRouting::any, 0, false, 0,
     DType::bf16},
    {"bf16 activations, dozens of rows", 150, 136, 72, 4, 2, DType::bf16, MoeRouting::any, 40, false, 0, DType::bf16},
    {"bf16 activations, hundreds of rows", 1600, 32, 256, 8, 2, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16},
    {"bf16 activations, one expert", 70, 64, 32, 4, 2, DType::bf16, MoeRouting::one, 0, false, 0, DType::bf16},
    {"bf16 activations, no work", 5, 64, 32, 4, 2, DType::bf16, MoeRouting::none, 0, false, 0, DType::bf16},
    {"bf16 activations, no experts", 3, 64, 32, 0, 2, DType::bf16, MoeRouting::none, 24, false, 0, DType::bf16},
    {"fp8", 7, 64, 48, 4, 2, DType::fp8_e4m3, MoeRouting::any, 32, false, 0, DType::fp8_e4m3},
    {"fp8, odd sizes", 3, 37, 19, 4, 2, DType::fp8_e4m3, MoeRouting::any, 5, false, 0, DType::fp8_e4m3},
    {"fp8, dozens of rows, bf16 out", 130, 144, 80, 3, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8, one by one", 9, 64, 32, 4, 2, DType::fp8_e4m3, MoeRouting::any, 16, true, 0, DType::fp8_e4m3},
    {"fp8 blocks", 7, 272, 160, 4, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 0, DType::fp8_e4m3, true},
    {"fp8 blocks, slice of 192 from 64", 33, 256, 192, 4, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, true, 64},
    {"fp8 blocks, shared slice from 80", 150, 144, 64, 2, 2, DType::fp8_e4m3, MoeRouting::any, 96, false, 0,
     DType::fp8_e4m3, true, 80, DType::bf16},
    {"fp8 blocks, shared slice from 80, few tokens", 50, 144, 64, 2, 2, DType::fp8_e4m3, MoeRouting::any, 96, false, 0,
     DType::fp8_e4m3, true, 80, DType::bf16},
    {"fp8, decode, few rows an expert", 16, 400, 208, 32, 4, DType::fp8_e4m3, MoeRouting::distinct, 64, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8, decode, some rows an expert", 40, 272, 192, 16, 4, DType::fp8_e4m3, MoeRouting::any, 32, false, 288,
     DType::fp8_e4m3},
    {"fp8, decode, one expert has all", 100, 144, 64, 24, 2, DType::fp8_e4m3, MoeRouting::one, 16, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8 blocks, decode, slice from 48", 16, 400, 208, 32, 4, DType::fp8_e4m3, MoeRouting::distinct, 64, false, 0,
     DType::fp8_e4m3, true, 48, DType::bf16},
    {"fp8 blocks, decode, some rows an expert", 40, 272, 192, 16, 4, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, true, 64},
    {"bf16 activations, decode, most experts and choices", 24, 96, 48, 1024, 32, DType::bf16, MoeRouting::any, 32, false,
     0, DType::bf16},
    {"bf16 activations, decode, one token", 1, 2064, 80, 12, 6, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16},
    {"bf16 activations, decode, some rows an expert", 50, 208, 112, 8, 1, DType::bf16, MoeRouting::any, 16, false, 0,
     DType::bf16},
    {"fp8, hundreds of rows", 280, 272, 80, 2, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 288, DType::fp8_e4m3, false,
     0, DType::bf16},
    {"fp8 blocks, hundreds of rows, slice from 64", 280, 144, 192, 2, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 288,
     DType::fp8_e4m3, true, 64, DType::bf16},
    // More tiles than an H200 has SMs, or they would be halved: rows of x where they are, or in order.
    {"fp8, tiles of up to 256 rows", 900, 80, 304, 24, 2, DType::fp8_e4m3, MoeRouting::zipf, 0, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8 blocks, rows in order, slice from 64", 300, 80, 1088, 4, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"bf16 activations, tiles of up to 256 rows", 900, 40, 304, 24, 2, DType::bf16, MoeRouting::zipf, 0, false, 0,
     DType::bf16},
    {"fp8, low tiles of three warp groups", 100, 144, 368, 24, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8 blocks, low tiles of three warp groups", 100, 144, 368, 24, 2, DType::fp8_e4m3, MoeRouting::zipf, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"bf16 activations, low tiles of three warp groups", 100, 72, 368, 24, 2, DType::bf16, MoeRouting::any, 0, false, 0,
     DType::bf16},
    // Hundreds of rows an expert, by pairs of CTAs. Blocks of scales are made between the products, or by a launch of its own.
    {"fp8, pairs of CTAs", 400, 144, 392, 4, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 160, DType::fp8_e4m3, false, 0,
     DType::bf16},
    {"fp8 blocks, pairs of CTAs, gpt-oss's gate", 400, 272, 392, 4, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 288,
     DType::fp8_e4m3, true, 0, DType::bf16, MoeIds::here, {1.702, 1, 1}},
    {"fp8 blocks, down by pairs of CTAs, slice from 64", 200, 784, 272, 4, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"a slice of the experts", 9, 64, 40, 6, 3, DType::f32, MoeRouting::any, 16, false, 0, DType::f32, false, 0,
     DType::none, MoeIds::slice},
    {"a map of the experts", 9, 64, 40, 6, 3, DType::bf16, MoeRouting::any, 0, true, 0, DType::f32, false, 0, DType::none,
     MoeIds::map, {1.702, 1, 1}},
    {"gpt-oss's gate", 7, 64, 40, 6, 3, DType::f32, MoeRouting::distinct, 16, false, 0, DType::f32, false, 0, DType::none,
     MoeIds::here, {1.702, 1, 1}},
    {"bf16 activations, decode, a slice, gpt-oss's gate", 24, 96, 48, 32, 4, DType::bf16, MoeRouting::any, 32, false, 0,
     DType::bf16, false, 0, DType::none, MoeIds::slice, {1.702, 1, 1}},
    {"fp8, decode, a map, a limit", 16, 400, 208, 32, 4, DType::fp8_e4m3, MoeRouting::any, 64, false, 0, DType::fp8_e4m3,
     false, 0, DType::bf16, MoeIds::map, {1, 1.5, 0}},
    {"fp8 blocks, decode, a slice, gpt-oss's gate", 16, 400, 208, 32, 4, DType::fp8_e4m3, MoeRouting::any, 64, false, 0,
     DType::fp8_e4m3, true, 48, DType::bf16, MoeIds::slice, {1.702, 1, 1}},
    {"bf16 activations, hundreds of rows, a map, a limit", 400, 72, 64, 4, 3, DType::bf16, MoeRouting::any, 40, false, 80,
     DType::bf16, false, 0, DType::none, MoeIds::map, {1, 1.5, 0}},
    {"fp8, hundreds of rows, a slice, gpt-oss's gate", 280, 144, 80, 2, 3, DType::fp8_e4m3, MoeRouting::any, 48, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16, MoeIds::slice, {1.702, 1, 1}},
    {"fp8 blocks, hundreds of rows, a map, gpt-oss's gate", 280, 144, 192, 2, 3, DType::fp8_e4m3, MoeRouting::any, 48,
     false, 0, DType::fp8_e4m3, true, 64, DType::bf16, MoeIds::map, {1.702, 1, 1}},
    // Skewed: the number of rows that an expert has in the mean chooses a row and its tiles, whatever it has in truth.
    {"half of the experts", 30, 64, 32, 11, 3, DType::bf16, MoeRouting::half, 24},
    {"Zipf", 60, 64, 32, 16, 4, DType::bf16, MoeRouting::zipf},
    {"fp8, decode, half of the experts", 24, 144, 64, 24, 4, DType::fp8_e4m3, MoeRouting::half, 0, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8, decode, Zipf", 64, 144, 64, 32, 4, DType::fp8_e4m3, MoeRouting::zipf, 16, false, 0, DType::fp8_e4m3},
    {"fp8 blocks, decode, half of the experts", 40, 144, 64, 16, 2, DType::fp8_e4m3, MoeRouting::half, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"fp8 blocks, decode, Zipf, slice from 48", 16, 272, 208, 32, 4, DType::fp8_e4m3, MoeRouting::zipf, 64, false, 0,
     DType::fp8_e4m3, true, 48},
    {"fp8 blocks, decode, one expert has all", 32, 144, 192, 24, 4, DType::fp8_e4m3, MoeRouting::one, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"bf16 activations, decode, half of the experts", 40, 96, 48, 16, 2, DType::bf16, MoeRouting::half, 32, false, 0,
     DType::bf16},
    {"bf16 activations, decode, Zipf", 48, 96, 48, 32, 4, DType::bf16, MoeRouting::zipf, 0, false, 0, DType::bf16},
    {"bf16 activations, decode, one expert has all", 20, 96, 48, 24, 4, DType::bf16, MoeRouting::one, 0, false, 0,
     DType::bf16},
    {"fp8, half of the experts", 150, 144, 80, 12, 2, DType::fp8_e4m3, MoeRouting::half, 0, false, 0, DType::fp8_e4m3},
    {"fp8, Zipf", 200, 144, 48, 16, 4, DType::fp8_e4m3, MoeRouting::zipf, 0, false, 0, DType::fp8_e4m3, false, 0,
     DType::bf16},
    {"fp8, one expert of many has all", 100, 144, 192, 16, 2, DType::fp8_e4m3, MoeRouting::one, 16, false, 0,
     DType::fp8_e4m3},
    {"fp8, one expert of few has all", 100, 144, 192, 4, 2, DType::fp8_e4m3, MoeRouting::one, 0, false, 0,
     DType::fp8_e4m3, false, 0, DType::bf16},
    {"fp8 blocks, half of the experts, slice from 64", 140, 144, 192, 5, 2, DType::fp8_e4m3, MoeRouting::half, 0, false, 0,
     DType::fp8_e4m3, true, 64},
    {"fp8 blocks, Zipf", 140, 144, 80, 16, 2, DType::fp8_e4m3, MoeRouting::zipf, 0, false, 0, DType::fp8_e4m3, true, 0,
     DType::bf16},
    {"fp8 blocks, one expert of many has all", 100, 144, 192, 16, 2, DType::fp8_e4m3, MoeRouting::one, 0, false, 0,
     DType::fp8_e4m3, true, 64, DType::bf16},
    {"bf16 activations, half of the experts", 260, 72, 40, 9, 2, DType::bf16, MoeRouting::half, 24, false, 0, DType::bf16},
    {"bf16 activations, Zipf", 260, 72, 40, 12, 4, DType::bf16, MoeRouting::zipf, 0, false, 0, DType::bf16},
    {"bf16 activations, one expert of many has all", 150, 72, 40, 16, 2, DType::bf16, MoeRouting::one, 0, false, 0,
     DType::bf16},
    {"fp8 blocks, odd sizes", 3, 133, 150, 4, 2, DType::fp8_e4m3, MoeRouting::any, 5, true, 0, DType::fp8_e4m3, true,
     17},
    // clang-format on
};

inline constexpr FusedMoeCase kFusedMoeServingCases[] = {
    {"Qwen3-30B decode 1, 32 of 128 experts", 1, 2048, 768, 32, 8, DType::bf16},
    {"Qwen3-30B decode 8, 32 of 128 experts", 8, 2048, 768, 32, 8, DType::bf16},
    {"Qwen3-30B prefill 128, 32 of 128 experts", 128, 2048, 768, 32, 8, DType::bf16},
    {"Hy3 tp8 decode 64, 24 of 192 experts, fp8", 64, 4096, 192, 24, 8, DType::fp8_e4m3, MoeRouting::distinct,
     0, false, 0, DType::fp8_e4m3},
};

inline std::span<const FusedMoeCase> fused_moe_cases(CaseSize size) {
  if (size == CaseSize::test) return kFusedMoeTestCases;
  return kFusedMoeServingCases;
}

/// A case with its memory: random inputs, poisoned outputs. Matrices are scaled by 1 / sqrt(columns), so values
/// stay near 1.
struct FusedMoeProblem {
  Guarded x, gate_up, down, shared_gate, shared_up, shared_down, ids, map, weights, y, workspace;
  Guarded x_scale, gate_up_scale, down_scale, act_scale, shared_scale[4];
  std::vector<ExpertWeights> experts;
  FusedMoeArgs args;

  FusedMoeProblem(const FusedMoeCase& c, uint32_t seed, const Stream& stream = {}) {
    std::mt19937 rng(seed);
    const bool fp8 = c.weight == DType::fp8_e4m3;
    // fp8 values are spread over the type's range and brought back by their scales.
    constexpr double kSpread = 60;
    const auto matrix = [&](std::vector<int64_t> shape) {
      Guarded m(c.weight, shape);
      m.random(rng, fp8 ? kSpread : 1 / std::sqrt(static_cast<double>(shape.back())));
      return m;
    };
    const auto scales = [&](std::vector<int64_t> shape, double mean) {
      Guarded m(DType::f32, shape);
      m.random(rng, 0.2 * mean, mean);
      return m;
    };
    const auto weight_scale = [&](int64_t columns) {
      return 1 / (kSpread * std::sqrt(static_cast<double>(columns)));
    };
    x = Guarded(c.x, {c.tokens, c.hidden}, c.row_stride);
    x.random(rng, fp8 ? kSpread : 1);
    y = Guarded(c.y == DType::none ? (fp8 ? DType::f32 : c.x) : c.y, {c.tokens, c.hidden}, c.row_stride);
    gate_up = matrix({c.experts, 2 * c.intermediate, c.hidden});
    down = matrix({c.experts, c.hidden, c.intermediate});
    ids = Guarded(DType::i32, {c.tokens, c.top_k});
    weights = Guarded(DType::f32, {c.tokens, c.top_k});
    weights.random(rng, 0.3, 0.5);
    route(c, rng);
    args = {.x = x,
            .gate_up = gate_up,
            .down = down,
            .expert_ids = ids,
            .expert_weights = weights,
            .swiglu = c.swiglu,
            .y = y};
    number(c, rng);
    if (c.shared > 0) {
      shared_gate = matrix({c.shared, c.hidden});
      shared_up = matrix({c.shared, c.hidden});
      shared_down = matrix({c.hidden, c.shared});
      args.shared = {shared_gate, shared_up, shared_down};
    }
    if (fp8) {
      constexpr double kActScale = 0.02;  // values between the products reach about 5
      const int64_t rows = scale_blocks(c.block_offset + c.intermediate), columns = scale_blocks(c.hidden);
      const int64_t shared_rows = scale_blocks(c.block_offset + c.shared);
      args.block_offset = c.block_offset;
      const auto keep = [&](Guarded& owner, Guarded made) -> const Tensor& {
        owner = std::move(made);
        return owner;
      };
      const double up = weight_scale(c.hidden), down_by = weight_scale(c.intermediate),
                   shared_by = weight_scale(c.shared);
      if (c.blocks) {
        args.x_scale = keep(x_scale, scales({c.tokens, columns}, 1 / kSpread));
        args.gate_up_scale = keep(gate_up_scale, scales({c.experts, 2, rows, columns}, up));
        args.down_scale = keep(down_scale, scales({c.experts, columns, rows}, down_by));
      } else {
        args.x_scale = keep(x_scale, scales({1}, 1 / kSpread));
        args.gate_up_scale = keep(gate_up_scale, scales({c.experts, 2}, up));
        args.down_scale = keep(down_scale, scales({c.experts}, down_by));
        args.act_scale = keep(act_scale, scales({c.experts}, kActScale));
      }
      if (c.shared > 0) {
        const std::vector<int64_t> up_shape =
            c.blocks ? std::vector{shared_rows, columns} : std::vector<int64_t>{1};
        const std::vector<int64_t> down_shape =
            c.blocks ? std::vector{columns, shared_rows} : std::vector<int64_t>{1};
        args.shared.gate_scale = keep(shared_scale[0], scales(up_shape, up));
        args.shared.up_scale = keep(shared_scale[1], scales(up_shape, up));
        args.shared.down_scale = keep(shared_scale[2], scales(down_shape, shared_by));
        if (!c.blocks) args.shared.act_scale = keep(shared_scale[3], scales({1}, kActScale));
      }
    }
    if (c.separate) {
      for (int64_t e = 0; e < c.experts; ++e) {
        experts.push_back(expert_at(args, e));
      }
      args.gate_up = args.down = args.gate_up_scale = args.down_scale = args.act_scale = Tensor();
      args.experts = experts;
    }
    take_workspace(stream);
  }

  /// Scratch for these arguments on this stream.
  void take_workspace(const Stream& stream) {
    const Result<int64_t> bytes = fused_moe_workspace_bytes(args, stream);
    workspace = Guarded(DType::u8, {bytes.ok() ? *bytes : 0});
    args.workspace = workspace;
  }

  /// What benchmarks of many calls must spread over: unvisited experts too.
  int64_t footprint_bytes() const { return gate_up.bytes() + down.bytes() + x.bytes() + y.bytes(); }

 private:
  /// Ids of experts here become those of a slice or of a map; the others stay without work.
  void number(const FusedMoeCase& c, std::mt19937& rng) {
    if (c.are == MoeIds::here) return;
    const auto experts = static_cast<int32_t>(c.experts);
    std::vector<int32_t> elsewhere, id_of(c.experts);
    if (c.are == MoeIds::slice) {
      args.first_expert = kFirstExpert;
      for (int32_t e = 0; e < experts; ++e) id_of[e] = kFirstExpert + e;
      elsewhere = {0, kFirstExpert - 1, kFirstExpert + experts, INT32_MAX, -1, INT32_MIN};
    } else {
      map = Guarded(DType::i32, {2 * c.experts + 1});
      std::vector<int32_t> all(2 * c.experts + 1);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
      std::shuffle(all.begin(), all.end(), rng);
      constexpr int32_t kNowhere[] = {-1, INT32_MIN};
      for (size_t i = 0; i < all.size(); ++i) {
        const bool is_here = i < id_of.size();
        if (is_here) id_of[i] = all[i];
        map.as<int32_t>()[all[i]] = is_here ? static_cast<int32_t>(i) : kNowhere[i % 2];
      }
      elsewhere = {all.back(), static_cast<int32_t>(all.size()), INT32_MAX, -1, INT32_MIN};
      args.expert_map = map;
    }
    for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
      int32_t& id = ids.as<int32_t>()[i];
      id = id >= 0 && id < experts ? id_of[id] : elsewhere[i % elsewhere.size()];
    }
  }
  void route(const FusedMoeCase& c, std::mt19937& rng) {
    std::vector<int32_t> all(static_cast<size_t>(c.experts));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
    std::vector<int32_t> rank = all;
    if (c.routing == MoeRouting::half || c.routing == MoeRouting::zipf)
      std::shuffle(rank.begin(), rank.end(), rng);
    std::vector<double> arrival(all.size());
    constexpr int32_t kNoWork[] = {-1, INT32_MIN, INT32_MAX};
    for (int64_t t = 0; t < c.tokens; ++t) {
      std::shuffle(all.begin(), all.end(), rng);
      int64_t choices = c.experts;
      if (c.routing == MoeRouting::half) {
        choices -= c.experts / 2;
        std::ranges::partition(all, [&](int32_t e) { return rank[e] < choices; });
      } else if (c.routing == MoeRouting::zipf) {
        // Who comes first when each comes at a rate of its weight: draws without repetition.
        for (const int32_t e : all) arrival[e] = -std::log((rng() + 1.0) * 0x1p-32) * (rank[e] + 1);
        std::ranges::sort(all, {}, [&](int32_t e) { return arrival[e]; });
      }
      for (int64_t j = 0; j < c.top_k; ++j) {
        int32_t& id = ids.as<int32_t>()[t * c.top_k + j];
        switch (c.routing) {
          case MoeRouting::distinct:
          case MoeRouting::half:
          case MoeRouting::zipf:
            id = all[j % choices];
            break;
          case MoeRouting::any:
            id = static_cast<int32_t>(rng() % (c.experts + 2)) - 1;
            break;
          case MoeRouting::one:
            id = 0;
            break;
          case MoeRouting::none:
            id = j % 4 == 3 ? static_cast<int32_t>(c.experts) : kNoWork[j % 4];
            break;
        }
      }
    }
  }
};

}  // namespace vivace
