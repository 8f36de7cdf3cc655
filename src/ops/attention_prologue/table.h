#pragma once

#include "src/core/dispatch.h"
#include "vivace/attention_prologue.h"

namespace vivace {

Status attention_prologue_reference(const AttentionPrologueArgs& args, const Stream& stream);

Status attention_prologue_cpu(const AttentionPrologueArgs& args, const Stream& stream);
Status attention_prologue_cuda(const AttentionPrologueArgs& args, const Stream& stream);

Facts attention_prologue_facts(const AttentionPrologueArgs& args);

inline constexpr Need kAttentionPrologueCudaNeeds[] = {{"compute_capability", Need::at_least, 80}};

inline constexpr Row<AttentionPrologueArgs> kAttentionPrologueRows[] = {
#if VIVACE_CUDA
    {"cuda.head", Device::cuda, kAttentionPrologueCudaNeeds, attention_prologue_cuda,
     "a warp for several heads of a token, any strides and types"},
#endif
    {"cpu.simd",
     Device::cpu,
     {},
     attention_prologue_cpu,
     "a head stays in the first-level cache; tokens over threads"},
    {"reference", Device::cpu, {}, attention_prologue_reference, "float64, straight from the formula"},
};

inline constexpr Operator<AttentionPrologueArgs> kAttentionPrologue = {
    "attention_prologue", "splits qkv, normalises and rotates Q and K, writes K and V into pages",
    attention_prologue_facts, attention_prologue_cost, kAttentionPrologueRows};

}  // namespace vivace
