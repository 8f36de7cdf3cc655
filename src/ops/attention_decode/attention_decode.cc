#include "vivace/attention_decode.h"

#include "src/core/dispatch_in_workspace.h"
#include "src/core/error.h"
#include "src/cpu/thread_pool.h"
#include "src/device/runtime.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_decode/form.h"
#include "src/ops/attention_decode/gpu_schedule.h"
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
  using namespace attention_sm90;
  const AttentionArgs& a = args.attention;
  const int64_t rows = unit_rows(args);
  const int64_t box_keys = sm90_box_keys(std::max<int64_t>(1, a.k.shape[3] * info_of(a.k.dtype).block_bytes));
  Facts facts = attention_facts(a);
  facts.add("max_query_tokens", args.max_query_tokens)
      .add("unit_rows", rows)
      .add("unit_values", rows * a.q.shape[2])
      .add("units", a.page_table.shape[0] * a.k.shape[2])
      .add("pages", a.k.shape[0])
      .add("tile_tokens", args.params.tile_tokens)
      .add("tile_remainder", args.params.tile_tokens % box_keys)
      .add("piece_tiles", args.params.piece_tiles)
      .add("ctas", ctas_of(args.params.workers, rows_plan(rows, a.k.shape[3])))
      .add("q_alignment", alignment_of(a.q))
      .add("output_alignment", alignment_of(a.output))
      .add("schedule_alignment", alignment_of(args.schedule));
  return facts;
}

CallForm attention_decode_form(const AttentionDecodeArgs& args, const Stream& stream) {
  const AttentionArgs& a = args.attention;
  const DecodeScheduleParams& p = args.params;
  static_assert(sizeof(AttentionArgs) == 12 * sizeof(Tensor) + 3 * 8 &&
                    sizeof(DecodeScheduleParams) == 7 * 8 &&
                    sizeof(AttentionDecodeArgs) == sizeof(a) + sizeof(p) + 2 * sizeof(Tensor) + 2 * 8,
                "all are here but old_keys_ready, at which no check looks");
  CallForm form;
  form.add(int64_t{stream.ordinal}).add(int64_t{stream.compute_capability});
  for (const Tensor* tensor :
       {&a.q, &a.k, &a.v, &a.page_table, &a.kv_lengths, &a.query_start, &a.output, &a.q_scale, &a.k_scale,
        &a.v_scale, &a.sinks, &a.lse, &args.schedule, &args.workspace}) {
    form.add(*tensor);
  }
  for (double value : {a.softmax_scale, a.soft_cap}) form.add(value);
  for (int64_t value : {a.window, args.max_query_tokens, p.heads_kv, p.tile_tokens, p.workers, p.min_tiles,
                        p.request_cost, p.window, p.piece_tiles}) {
    form.add(value);
  }
  return form;
}

namespace {

/// Checks a call and chooses its row; null where there is nothing to do.
Status look_at(const AttentionDecodeArgs& args, const Stream& stream, const Row<AttentionDecodeArgs>*& row) {
  Checker check(kName, stream);
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
  if (stream.readable()) {
    VIVACE_TRY(check_attention_contents(kName, args.attention, args.max_query_tokens));
    VIVACE_TRY(check_schedule(kName, args.schedule.as<const int32_t>(), args.params,
                              args.attention.kv_lengths, args.attention.query_start));
  }
  return choose_in_workspace(kAttentionDecode, args, stream, row);
}

}  // namespace

Status attention_decode(const AttentionDecodeArgs& args, const Stream& stream) {
  static thread_local KnownCalls<AttentionDecodeArgs> known;
  const bool may_know = known.may_know(stream);
  const CallForm form = may_know ? attention_decode_form(args, stream) : CallForm();
  const Row<AttentionDecodeArgs>* row = may_know ? known.find(form) : nullptr;
  if (row == nullptr) {
    VIVACE_TRY(look_at(args, stream, row));
    if (row == nullptr || stream.check_only) return {};
    if (may_know) known.add(form, *row);
  }
  return run_counted(kAttentionDecode, *row, args, stream, [&] { return row->run(args, stream); });
}

namespace {

/// Queries divide by these extents and parameters.
Status check_divisors(const AttentionDecodeArgs& args, const Stream& stream) {
  const AttentionArgs& a = args.attention;
  Checker check(kName, stream);
  check.that(a.k.rank == 4 && a.k.shape[2] > 0, "k.shape[2]", static_cast<double>(a.k.shape[2]),
             "at least 1 head");
  check.that(a.q.rank == 3 && a.q.shape[2] > 0, "q.shape[2]", static_cast<double>(a.q.shape[2]),
             "at least 1 dimension");
  check_schedule_params(check, args.params);
  return check.status();
}

}  // namespace

Result<int64_t> attention_decode_workspace_bytes(const AttentionDecodeArgs& args, const Stream& stream) {
  VIVACE_TRY(check_divisors(args, stream));
  return workspace_bytes(kAttentionDecode, args, stream);
}

Result<DecodeScheduleParams> attention_decode_schedule_params(const AttentionDecodeArgs& args,
                                                              const Stream& stream) {
  const AttentionArgs& a = args.attention;
  VIVACE_TRY(check_divisors(args, stream));
  DecodeScheduleParams params = args.params;
  params.heads_kv = a.k.shape[2];
  params.workers = cpu::threads_of(stream.threads);
#if VIVACE_CUDA
  if (stream.device == Device::cuda) {
    VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
    params = mma_decode_schedule(params.heads_kv, info->sms);
    if (info->sm90()) {
      AttentionDecodeArgs sm90 = args;
      sm90.params = sm90_decode_schedule(params.heads_kv, unit_rows(args), a.k.shape[3],
                                         a.k.shape[3] * info_of(a.k.dtype).block_bytes, info->sms);
      sm90.params.piece_tiles = args.params.piece_tiles;
      if (attention_decode_explain(sm90, stream).row.starts_with("sm90.")) params = sm90.params;
    }
  }
#endif
  params.window = args.params.window;
  params.piece_tiles = args.params.piece_tiles;
  return params;
}

Cost attention_decode_cost(const AttentionDecodeArgs& args) {
  return attention_cost(args.attention);
}

Choice attention_decode_explain(const AttentionDecodeArgs& args, const Stream& stream) {
  return explain(kAttentionDecode, args, stream);
}

}  // namespace vivace
