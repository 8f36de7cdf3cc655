#if VIVACE_CUDA

#include "src/ops/fused_moe/gpu.h"

#include <algorithm>
#include <type_traits>

#include "src/core/workspace.h"

namespace vivace {

namespace {

constexpr int64_t kMaxSlots =
    32768;  // (token, choice) pairs of a block: bounds the scratch; 170 rows for 192 experts

}  // namespace

Scratch::Scratch(const FusedMoeArgs& args, uint8_t* memory) {
  const int64_t top_k = args.expert_ids.shape[1], experts = expert_count(args);
  block_tokens = std::min(args.x.shape[0], std::max<int64_t>(1, kMaxSlots / std::max<int64_t>(1, top_k)));
  slots = block_tokens * top_k;
  const auto place = [&](auto*& pointer, int64_t count, int64_t size) {
    pointer = nullptr;
    if (count == 0) return;
    if (memory != nullptr)
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + bytes);
    bytes += whole_lines(count * size);
  };
  place(start, experts, 4);
  place(rows, experts, 4);
  place(token_of_row, slots, 4);
  place(row_of_slot, slots, 4);
  const auto place_part = [&](Part& part, int64_t count, int64_t intermediate) {
    const bool fp8_values = args.x.dtype == DType::fp8_e4m3, blocks = fp8_values && has_block_scales(args);
    part.stride = (intermediate + 15) / 16 * 16;
    place(part.hidden, count * part.stride, fp8_values ? 1 : 2);
    place(part.wide, blocks ? count * part.stride : 0, 4);
    place(part.scales, blocks ? count * scale_blocks(args.block_offset + intermediate) : 0, 4);
    place(part.out, count * args.x.shape[1], 2);
  };
  place_part(routed, slots, expert_intermediate(args));
  place_part(shared, args.shared.present() ? block_tokens : 0,
             args.shared.present() ? args.shared.gate.shape[0] : 0);
}

int64_t fused_moe_gpu_workspace_bytes(const FusedMoeArgs& args, const Stream&) {
  return Scratch(args, nullptr).bytes + kWorkspaceSlack;
}

Matrices routed_matrices(const FusedMoeArgs& args) {
  Matrices m;
  const ExpertWeights first = expert_at(args, 0);
  m.gate = first.gate, m.up = first.up, m.down = first.down;
  m.gate_step = args.gate_up.stride[0], m.down_step = args.down.stride[0];
  if (args.x.dtype != DType::fp8_e4m3) return m;
  m.gate_scale = args.gate_up_scale.as<const float>();
  m.up_scale = m.gate_scale + args.gate_up_scale.stride[1];
  m.down_scale = args.down_scale.as<const float>();
  m.gate_scale_step = args.gate_up_scale.stride[0], m.down_scale_step = args.down_scale.stride[0];
  if (has_block_scales(args)) {
    m.gate_scale_stride = args.gate_up_scale.stride[2], m.down_scale_stride = args.down_scale.stride[1];
  } else {
    m.act_scale = args.act_scale.as<const float>();
    m.act_scale_step = args.act_scale.shape[0] > 1 ? args.act_scale.stride[0] : 0;
  }
  return m;
}

Matrices shared_matrices(const FusedMoeArgs& args) {
  const ExpertWeights& s = args.shared;
  Matrices m;
  m.gate = s.gate, m.up = s.up, m.down = s.down;
  if (args.x.dtype != DType::fp8_e4m3) return m;
  m.gate_scale = s.gate_scale.as<const float>(), m.up_scale = s.up_scale.as<const float>();
  m.down_scale = s.down_scale.as<const float>();
  if (has_block_scales(args)) {
    // The products take one stride for gate and up: dense scales of one shape have it.
    m.gate_scale_stride = s.gate_scale.stride[0], m.down_scale_stride = s.down_scale.stride[0];
  } else {
    m.act_scale = s.act_scale.as<const float>();
  }
  return m;
}

}  // namespace vivace

#endif  // VIVACE_CUDA
