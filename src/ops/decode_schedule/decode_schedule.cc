#include "vivace/decode_schedule.h"

#include "src/core/checks.h"
#include "src/ops/attention/args.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/decode_schedule/view.h"

namespace vivace {

Facts decode_schedule_facts(const DecodeScheduleArgs& args) {
  Facts facts;
  facts.add("requests", args.kv_lengths.shape[0])
      .add("heads_kv", args.params.heads_kv)
      .add("workers", args.params.workers)
      .add("piece_tiles", args.params.piece_tiles);
  return facts;
}

Status decode_schedule(const DecodeScheduleArgs& args, const Stream& stream) {
  Checker check("decode_schedule", stream);
  check.tensor("kv_lengths", args.kv_lengths, {"requests"})
      .dtype("kv_lengths", args.kv_lengths, dtypes_mask(DType::i32))
      .tensor("schedule", args.schedule, {"schedule"})
      .dtype("schedule", args.schedule, dtypes_mask(DType::i32));
  const int64_t requests = check["requests"];
  check_query_start(check, args.query_start, requests);
  check_schedule_params(check, args.params);
  VIVACE_TRY(check.status());
  const int64_t ints = decode_schedule_ints(requests, args.params.workers);
  if (args.schedule.shape[0] < ints) {
    return invalid_argument(
        "decode_schedule: schedule.shape[0] is {}, needs decode_schedule_ints({}, {}) = {}",
        args.schedule.shape[0], requests, args.params.workers, ints);
  }
  return dispatch(kDecodeSchedule, args, stream);
}

Cost decode_schedule_cost(const DecodeScheduleArgs& args) {
  const int64_t requests = args.kv_lengths.shape[0];
  return {8 * requests + 4 * decode_schedule_ints(requests, args.params.workers), 0};
}

Choice decode_schedule_explain(const DecodeScheduleArgs& args, const Stream& stream) {
  return explain(kDecodeSchedule, args, stream);
}

}  // namespace vivace
