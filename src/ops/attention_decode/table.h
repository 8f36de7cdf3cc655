#pragma once

#include "src/core/dispatch.h"
#include "vivace/attention_decode.h"

namespace vivace {

Status attention_decode_reference(const AttentionDecodeArgs& args, const Stream& stream);

Facts attention_decode_facts(const AttentionDecodeArgs& args);

inline constexpr Row<AttentionDecodeArgs> kAttentionDecodeRows[] = {
    {"reference",
     Device::cpu,
     {},
     attention_decode_reference,
     "float64, straight from the formula; needs no schedule"},
};

inline constexpr Operator<AttentionDecodeArgs> kAttentionDecode = {
    "attention_decode", "attention of a decode step over the paged cache, by a balanced schedule",
    attention_decode_facts, kAttentionDecodeRows};

}  // namespace vivace
