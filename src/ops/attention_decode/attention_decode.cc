#include "vivace/attention_decode.h"

#include "src/core/error.h"
#include "src/core/workspace.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_decode/table.h"
#include "src/ops/decode_schedule/view.h"

namespace vivace {

namespace {

constexpr std::string_view kName = "attention_decode";

/// Everything but the workspace's size, which the query is for.
Status check_decode(const AttentionDecodeArgs& args, Checker& check) {
  check_attention(check, args.attention);
  check.that(args.max_query_tokens >= 1 && args.max_query_tokens <= 8, "max_query_tokens",
             static_cast<double>(args.max_query_tokens), "1 to 8");
  check_schedule_params(check, args.params);
  check.that(args.params.heads_kv == check["heads_kv"], "params.heads_kv",
             static_cast<double>(args.params.heads_kv), "heads_kv (k.shape[2])");
  check.that(args.params.window == args.attention.window, "params.window",
             static_cast<double>(args.params.window), "the window of the attention");
  return check.status();
}

}  // namespace

Facts attention_decode_facts(const AttentionDecodeArgs& args) {
  return attention_facts(args.attention)
      .add("max_query_tokens", args.max_query_tokens)
      .add("tile_tokens", args.params.tile_tokens)
      .add("piece_tiles", args.params.piece_tiles);
}

Status attention_decode(const AttentionDecodeArgs& args, const Stream& stream) {
  Checker check(kName, stream.device);
  VIVACE_TRY(check_decode(args, check));
  const int64_t requests = check["requests"];
  if (requests == 0 || check["tokens"] == 0) return {};
  check.tensor("schedule", args.schedule, {"schedule"})
      .dtype("schedule", args.schedule, dtypes_mask(DType::i32));
  VIVACE_TRY(check.status());
  const int64_t ints = decode_schedule_ints(requests, args.params.workers);
  if (args.schedule.shape[0] < ints) {
    return invalid_argument("{}: schedule.shape[0] is {}, needs decode_schedule_ints({}, {}) = {}", kName,
                            args.schedule.shape[0], requests, args.params.workers, ints);
  }
  VIVACE_TRY_ASSIGN(const int64_t needed, attention_decode_workspace_bytes(args, stream));
  VIVACE_TRY(check_workspace(kName, args.workspace, needed, stream.device));
  if (stream.device == Device::cpu) {
    VIVACE_TRY(check_attention_contents(kName, args.attention, args.max_query_tokens));
    VIVACE_TRY(check_schedule(kName, args.schedule.as<const int32_t>(), args.params,
                              args.attention.kv_lengths, args.attention.query_start));
  }
  return dispatch(kAttentionDecode, args, stream);
}

Result<int64_t> attention_decode_workspace_bytes(const AttentionDecodeArgs& args, const Stream& stream) {
  return workspace_bytes(kAttentionDecode, args, stream);
}

Cost attention_decode_cost(const AttentionDecodeArgs& args) {
  return attention_cost(args.attention);
}

Choice attention_decode_explain(const AttentionDecodeArgs& args, const Stream& stream) {
  return explain(kAttentionDecode, args, stream);
}

}  // namespace vivace
