#include "vivace/attention_prefill.h"

#include "src/ops/attention/args.h"
#include "src/ops/attention_prefill/table.h"

namespace vivace {

Facts attention_prefill_facts(const AttentionPrefillArgs& args) {
  const AttentionArgs& a = args.attention;
  Facts facts = attention_facts(a);
  facts.add("pages", a.k.shape[0])
      .add("split_tokens", args.split_tokens)
      .add("key_scales", a.k_scale.rank == 3 ? a.k_scale.elements() : 0)
      .add("output", a.output.dtype)
      .add("q_alignment", alignment_of(a.q))
      .add("output_alignment", alignment_of(a.output));
  return facts;
}

Status attention_prefill(const AttentionPrefillArgs& args, const Stream& stream) {
  Checker check("attention_prefill", stream);
  check_attention(check, args.attention);
  check.that(args.max_query_tokens >= 0, "max_query_tokens", static_cast<double>(args.max_query_tokens),
             "at least 0");
  check.that(args.split_tokens >= 0, "split_tokens", static_cast<double>(args.split_tokens), "at least 0");
  VIVACE_TRY(check.status());
  if (check["requests"] == 0 || check["tokens"] == 0) return {};
  if (stream.readable()) {
    VIVACE_TRY(check_attention_contents("attention_prefill", args.attention, args.max_query_tokens));
  }
  return dispatch(kAttentionPrefill, args, stream);
}

Cost attention_prefill_cost(const AttentionPrefillArgs& args) {
  return attention_cost(args.attention);
}

Choice attention_prefill_explain(const AttentionPrefillArgs& args, const Stream& stream) {
  return explain(kAttentionPrefill, args, stream);
}

}  // namespace vivace
