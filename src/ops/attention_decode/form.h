#pragma once

#include "src/core/known_calls.h"
#include "vivace/attention_decode.h"

namespace vivace {

/// All of a call that its checks, its facts and the workspaces of its rows look at.
CallForm attention_decode_form(const AttentionDecodeArgs& args, const Stream& stream);

}  // namespace vivace
