#pragma once

#include "src/core/dispatch.h"
#include "vivace/decode_schedule.h"

namespace vivace {

Status decode_schedule_reference(const DecodeScheduleArgs& args, const Stream& stream);
Status decode_schedule_cpu(const DecodeScheduleArgs& args, const Stream& stream);
Status decode_schedule_cuda(const DecodeScheduleArgs& args, const Stream& stream);

Facts decode_schedule_facts(const DecodeScheduleArgs& args);

inline constexpr Need kDecodeScheduleCudaNeeds[] = {{"compute_capability", Need::at_least, 80}};

inline constexpr Row<DecodeScheduleArgs> kDecodeScheduleRows[] = {
#if VIVACE_CUDA
    {"cuda.scan", Device::cuda, kDecodeScheduleCudaNeeds, decode_schedule_cuda,
     "every block: prefix sum; then a bisection per worker"},
#endif
    {"cpu.scan", Device::cpu, {}, decode_schedule_cpu, "prefix sum, then a binary search per worker"},
    {"reference", Device::cpu, {}, decode_schedule_reference, "deals out tile by tile, as the rule is told"},
};

inline constexpr Operator<DecodeScheduleArgs> kDecodeSchedule = {
    "decode_schedule", "packs the key tiles of all requests and heads evenly over workers",
    decode_schedule_facts, decode_schedule_cost, kDecodeScheduleRows};

}  // namespace vivace
