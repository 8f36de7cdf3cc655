#pragma once

#include "src/ops/attention/args.h"

namespace vivace {

/// AttentionArgs' formula in float64, a row at a time.
void attention_reference(const AttentionArgs& args);

}  // namespace vivace
