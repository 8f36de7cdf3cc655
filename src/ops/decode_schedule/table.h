#pragma once

#include "src/core/dispatch.h"
#include "vivace/decode_schedule.h"

namespace vivace {

Status decode_schedule_reference(const DecodeScheduleArgs& args, const Stream& stream);
Status decode_schedule_cpu(const DecodeScheduleArgs& args, const Stream& stream);

Facts decode_schedule_facts(const DecodeScheduleArgs& args);

inline constexpr Row<DecodeScheduleArgs> kDecodeScheduleRows[] = {
    {"cpu.scan", Device::cpu, {}, decode_schedule_cpu, "prefix sum, then a binary search per worker"},
    {"reference", Device::cpu, {}, decode_schedule_reference, "deals out tile by tile, as the rule is told"},
};

inline constexpr Operator<DecodeScheduleArgs> kDecodeSchedule = {
    "decode_schedule", "packs the key tiles of all requests and heads evenly over workers",
    decode_schedule_facts, kDecodeScheduleRows};

}  // namespace vivace
