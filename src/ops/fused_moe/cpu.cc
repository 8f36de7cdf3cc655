// routed experts         tokens grouped by expert, fp32 arithmetic, experts and columns over threads
//
// Two numbers for a token that visits k experts of width I
//   bytes  3 k I H times the weight's size   once per expert and block of tokens, whatever the number of tokens
//   flops  6 k I H                           a decode step is bound by the weights, a prompt by arithmetic
//
// A block of tokens has at most kMaxSlots (token, choice) pairs; they are sorted by expert without moving x. Three loops
// follow: gate, up and SwiGLU into `hidden`; down into `partial`; the weighted sum of a token's partials in order of choice.
// A product depends on its row of x and its weight row alone, so neither grouping nor blocks change a bit.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/fused_moe/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/core/number.h"
#include "src/core/workspace.h"
#include "src/cpu/math-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/linear/cpu_gemm.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

/// gate = what `swiglu` makes of gate and up.
void gate_by_swiglu(const SwiGlu& swiglu, float* gate, const float* up, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto alpha = hn::Set(d, static_cast<float>(swiglu.alpha)),
             beta = hn::Set(d, static_cast<float>(swiglu.beta));
  const auto one = hn::Set(d, 1.0f), minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto most = hn::Set(d, static_cast<float>(swiglu.limit)), least = hn::Neg(most);
  const auto gated = [&](const float* g, const float* u) {  // a comparison with NaN is false: it stays
    const auto all_of_g = hn::LoadU(d, g), all_of_u = hn::LoadU(d, u);
    const auto below = hn::IfThenElse(hn::Gt(all_of_g, most), most, all_of_g);
    const auto between = hn::IfThenElse(hn::Gt(all_of_u, most), most,
                                        hn::IfThenElse(hn::Lt(all_of_u, least), least, all_of_u));
    const auto value = hn::Div(below, hn::Add(one, exp(d, hn::Neg(hn::Mul(below, alpha)))));
    return hn::Mul(hn::IfThenZeroElse(hn::Eq(below, minus_infinity), value), hn::Add(between, beta));
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(gated(gate + i, up + i), d, gate + i);
  if (i == count) return;
  float g[hn::MaxLanes(d)] = {}, u[hn::MaxLanes(d)] = {};
  std::copy(gate + i, gate + count, g);
  std::copy(up + i, up + count, u);
  hn::StoreU(gated(g, u), d, g);
  std::copy(g, g + (count - i), gate + i);
}

/// y += factor * x.
void add_scaled(float* y, const float* x, float factor, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), f, hn::LoadU(d, y + i)), d, y + i);
  }
  for (; i < count; ++i) y[i] += factor * x[i];
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

namespace {

constexpr int64_t kMaxSlots = 4096;  // of a block of tokens: bounds the scratch, leaves an expert enough rows
constexpr int64_t kColumns = 64;     // of a task: a few hundred kilobytes of weights, read once
constexpr int64_t kRows = 64;        // of a product inside a task
static_assert(kColumns % cpu::kPanelRows == 0);

/// The scratch of one block of tokens. Slot s = token * top_k + choice; pairs with work are rows, sorted by expert.
struct Scratch {
  int64_t block_tokens, slots;
  int32_t* first;         ///< [experts + 1] first row of each expert
  int32_t* active;        ///< [experts] those with rows
  int32_t* row_of_slot;   ///< [slots] -1: no work
  int32_t* token_of_row;  ///< [slots]
  float* hidden;          ///< [slots, intermediate]
  float* partial;         ///< [slots, hidden]
  float* shared_hidden;   ///< [block_tokens, shared intermediate]
  float* shared_partial;  ///< [block_tokens, hidden]
  float* x;               ///< [block_tokens, hidden] fp8 activations as fp32
  int64_t bytes;

  Scratch(const FusedMoeArgs& args, uint8_t* memory) {
    const int64_t top_k = args.expert_ids.shape[1], experts = expert_count(args),
                  hidden_size = args.x.shape[1];
    block_tokens = std::min(args.x.shape[0], std::max<int64_t>(1, kMaxSlots / std::max<int64_t>(1, top_k)));
    slots = block_tokens * top_k;
    bytes = 0;
    const auto place = [&](auto*& pointer, int64_t count) {
      using T = std::remove_reference_t<decltype(*pointer)>;
      pointer = memory ? reinterpret_cast<T*>(memory + bytes) : nullptr;
      bytes += whole_lines(count * int64_t{sizeof(T)});
    };
    place(first, experts + 1);
    place(active, experts);
    place(row_of_slot, slots);
    place(token_of_row, slots);
    place(hidden, slots * expert_intermediate(args));
    place(partial, slots * hidden_size);
    const bool shared = args.shared.present();
    place(shared_hidden, shared ? block_tokens * args.shared.gate.shape[0] : 0);
    place(shared_partial, shared ? block_tokens * hidden_size : 0);
    place(x, is_fp8(args) ? block_tokens * hidden_size : 0);
  }
};

/// Sorts the block's pairs by expert, stable in slots; returns how many experts have rows.
int64_t group_by_expert(const FusedMoeArgs& args, int64_t t0, int64_t tokens, const Scratch& s) {
  const int64_t experts = expert_count(args), top_k = args.expert_ids.shape[1];
  const LocalExperts local = local_experts(args);
  std::fill(s.first, s.first + experts + 1, 0);
  const auto each_slot = [&](auto&& body) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* ids = args.expert_ids.at(t0 + t).as<const int32_t>();
      for (int64_t j = 0; j < top_k; ++j) body(t * top_k + j, local.of(ids[j]));
    }
  };
  each_slot([&](int64_t, int32_t expert) {
    if (expert >= 0) ++s.first[expert + 1];
  });
  int64_t active = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (s.first[e + 1] > 0) s.active[active++] = static_cast<int32_t>(e);
    s.first[e + 1] += s.first[e];
  }
  each_slot([&](int64_t slot, int32_t expert) {
    s.row_of_slot[slot] = expert >= 0 ? s.first[expert]++ : -1;
    if (s.row_of_slot[slot] >= 0) s.token_of_row[s.row_of_slot[slot]] = static_cast<int32_t>(slot / top_k);
  });
  // The cursors have moved to the ends: each is the next expert's start.
  for (int64_t e = experts; e > 0; --e) s.first[e] = s.first[e - 1];
  s.first[0] = 0;
  return active;
}

/// One expert's share of the block: `rows` rows of x, through `index` or in order.
struct Group {
  const FusedMoeArgs* args;
  const ExpertWeights* weights;
  cpu::XRows x;
  int64_t rows;
  float* hidden;   ///< [rows, intermediate]
  float* partial;  ///< [rows, hidden]
};

/// Columns [n0, n1) of the group's intermediate.
void gate_and_up(const Group& g, int64_t n0, int64_t n1) {
  const int64_t intermediate = g.weights->gate.shape[0], columns = n1 - n0;
  float gate[kRows * kColumns], up[kRows * kColumns];
  for (int64_t r = 0; r < g.rows; r += kRows) {
    const int64_t count = std::min(kRows, g.rows - r);
    cpu::XRows x = g.x;
    if (x.index != nullptr) {
      x.index += r;
    } else {
      x.base += r * x.stride;
    }
    cpu::gemm_f32(x, count, g.weights->gate, n0, n1, {}, {gate, columns},
                  up_scales(*g.args, g.weights->gate_scale));
    cpu::gemm_f32(x, count, g.weights->up, n0, n1, {}, {up, columns},
                  up_scales(*g.args, g.weights->up_scale));
    VIVACE_SIMD(gate_by_swiglu)(g.args->swiglu, gate, up, count * columns);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(gate + i * columns, columns, g.hidden + (r + i) * intermediate + n0);
    }
  }
}

/// Columns [n0, n1) of the group's output.
void down(const Group& g, int64_t n0, int64_t n1) {
  const int64_t intermediate = g.weights->gate.shape[0], hidden = g.weights->down.shape[0];
  for (int64_t r = 0; r < g.rows; r += kRows) {
    const int64_t count = std::min(kRows, g.rows - r);
    cpu::gemm_f32({g.hidden + r * intermediate, intermediate}, count, g.weights->down, n0, n1, {},
                  {g.partial + r * hidden + n0, hidden}, down_scales(*g.args, g.weights->down_scale));
  }
}

/// Row `r` of the group's intermediate becomes what fp8 keeps of it.
void requantise(const Group& g, int64_t r) {
  const int64_t intermediate = g.weights->gate.shape[0];
  float* h = g.hidden + r * intermediate;
  const auto round = [&](int64_t begin, int64_t end, float scale) {
    for (int64_t i = begin; i < end; ++i) h[i] = fp8_to_f32(f32_to_fp8(h[i] / scale)) * scale;
  };
  if (!has_block_scales(*g.args)) return round(0, intermediate, *g.weights->act_scale.as<const float>());
  for (int64_t begin = 0; begin < intermediate;) {
    const int64_t end =
        std::min(intermediate, (begin + g.args->block_offset) / kFp8ScaleBlock * kFp8ScaleBlock +
                                   kFp8ScaleBlock - g.args->block_offset);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (!(std::abs(h[i]) <= largest)) largest = std::abs(h[i]);  // a NaN stays
      if (std::isnan(largest)) break;
    }
    round(begin, end, made_scale(largest));
    begin = end;
  }
}

void run_block(const FusedMoeArgs& args, int64_t t0, int64_t tokens, const Scratch& s, const Stream& stream) {
  const int64_t hidden = args.x.shape[1], intermediate = expert_intermediate(args);
  const int64_t top_k = args.expert_ids.shape[1];
  const int64_t active = group_by_expert(args, t0, tokens, s);
  const bool shared = args.shared.present();
  cpu::XRows x{args.x.rows(t0, tokens).as<const float>(), args.x.stride[0]};
  if (is_fp8(args)) {
    const Fp8Scales scales = activation_scales(args.x_scale);
    cpu::parallel_for(stream.threads, tokens, [&](int64_t t, int) {
      cpu::row_as_f32(args.x.dtype, args.x.at(t0 + t).data, hidden, scales, t0 + t, s.x + t * hidden);
    });
    x = {s.x, hidden};
  }

  const auto with_group = [&](int64_t a, auto&& body) {
    if (a == active) {
      body(Group{&args, &args.shared, x, tokens, s.shared_hidden, s.shared_partial});
      return;
    }
    const int32_t e = s.active[a];
    const int64_t row = s.first[e];
    const ExpertWeights weights = expert_at(args, e);
    body(Group{&args,
               &weights,
               {x.base, x.stride, s.token_of_row + row},
               s.first[e + 1] - row,
               s.hidden + row * intermediate,
               s.partial + row * hidden});
  };
  // Tasks [0, active * pieces) are routed experts, the rest the shared one, which may be of another width.
  const auto over_columns = [&](int64_t width, int64_t shared_width, auto&& body) {
    const int64_t pieces = (width + kColumns - 1) / kColumns, routed = active * pieces;
    const int64_t extra = shared ? (shared_width + kColumns - 1) / kColumns : 0;
    cpu::parallel_for(stream.threads, routed + extra, [&](int64_t task, int) {
      const bool is_shared = task >= routed;
      const int64_t n0 = (is_shared ? task - routed : task % pieces) * kColumns;
      const int64_t n1 = std::min(n0 + kColumns, is_shared ? shared_width : width);
      with_group(is_shared ? active : task / pieces, [&](const Group& g) { body(g, n0, n1); });
    });
  };
  over_columns(intermediate, shared ? args.shared.gate.shape[0] : 0, gate_and_up);
  if (is_fp8(args)) {
    // A made scale needs all columns of its block.
    cpu::parallel_for(stream.threads, active + (shared ? 1 : 0), [&](int64_t a, int) {
      with_group(a, [&](const Group& g) {
        for (int64_t r = 0; r < g.rows; ++r) requantise(g, r);
      });
    });
  }
  over_columns(hidden, hidden, down);

  const auto add = VIVACE_SIMD(add_scaled);
  cpu::parallel_for(stream.threads, tokens, [&](int64_t t, int) {
    float* y = args.y.at(t0 + t).as<float>();
    const float* weights = args.expert_weights.at(t0 + t).as<const float>();
    std::fill(y, y + hidden, 0.0f);
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t row = s.row_of_slot[t * top_k + j];
      if (row >= 0) add(y, s.partial + row * hidden, weights[j], hidden);
    }
    if (shared) add(y, s.shared_partial + t * hidden, 1.0f, hidden);
  });
}

}  // namespace

int64_t fused_moe_cpu_workspace_bytes(const FusedMoeArgs& args, const Stream&) {
  return Scratch(args, nullptr).bytes + kWorkspaceSlack;
}

Status fused_moe_cpu(const FusedMoeArgs& args, const Stream& stream) {
  const Scratch scratch(args, first_line(args.workspace));
  const int64_t tokens = args.x.shape[0];
  for (int64_t t = 0; t < tokens; t += scratch.block_tokens) {
    run_block(args, t, std::min(scratch.block_tokens, tokens - t), scratch, stream);
  }
  return {};
}

}  // namespace vivace
#endif
