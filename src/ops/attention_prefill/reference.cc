#include "src/ops/attention/reference.h"

#include "src/ops/attention_prefill/table.h"

namespace vivace {

Status attention_prefill_reference(const AttentionPrefillArgs& args, const Stream&) {
  attention_reference(args.attention);
  return {};
}

}  // namespace vivace
