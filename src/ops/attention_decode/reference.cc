#include "src/ops/attention/reference.h"

#include "src/ops/attention_decode/table.h"

namespace vivace {

Status attention_decode_reference(const AttentionDecodeArgs& args, const Stream&) {
  attention_reference(args.attention);
  return {};
}

}  // namespace vivace
