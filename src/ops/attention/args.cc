#include "src/ops/attention/args.h"

namespace vivace {

void check_query_start(Checker& check, const Tensor& query_start, int64_t requests) {
  if (requests == 0) return;  // may be a null pointer, as everything else of an empty batch
  check.tensor("query_start", query_start, {"requests + 1"})
      .dtype("query_start", query_start, dtypes_mask(DType::i32))
      .that(query_start.shape[0] == requests + 1, "query_start.shape[0]",
            static_cast<double>(query_start.shape[0]), "requests + 1");
}

void check_fp8_scales(Checker& check, const Tensor& q, const Tensor& k, const Tensor& q_scale,
                      const Tensor& k_scale, const Tensor& v_scale) {
  const auto absent = [&](const Tensor& scale, std::string_view name, std::string_view needs) {
    check.that(!scale.present(), name, static_cast<double>(scale.shape[0]), needs);
  };
  if (q.dtype == DType::fp8_e4m3) {
    check.tensor("q_scale", q_scale, {"tokens", "heads_q"})
        .dtype("q_scale", q_scale, dtypes_mask(DType::f32));
  } else {
    absent(q_scale, "q_scale.shape[0]", "no q_scale, because q is not fp8");
  }
  if (k.dtype != DType::fp8_e4m3) {
    absent(k_scale, "k_scale.shape[0]", "no k_scale, because k is not fp8");
    absent(v_scale, "v_scale.shape[0]", "no v_scale, because v is not fp8");
    return;
  }
  if (k_scale.rank == 3) {
    check.tensor("k_scale", k_scale, {"pages", "page_tokens", "heads_kv"});
  } else {
    check.tensor("k_scale", k_scale, {"1"});
  }
  if (v_scale.rank == 1 && v_scale.shape[0] == 1) {
    check.tensor("v_scale", v_scale, {"1"});
  } else {
    check.tensor("v_scale", v_scale, {"heads_kv"});
  }
  check.dtype("k_scale", k_scale, dtypes_mask(DType::f32)).dtype("v_scale", v_scale, dtypes_mask(DType::f32));
}

void check_attention(Checker& check, const AttentionArgs& args) {
  check.tensor("q", args.q, {"tokens", "heads_q", "head_dim"})
      .tensor("k", args.k, {"pages", "page_tokens", "heads_kv", "head_dim"})
      .tensor("v", args.v, {"pages", "page_tokens", "heads_kv", "head_dim"})
      .tensor("page_table", args.page_table, {"requests", "max_pages"})
      .tensor("kv_lengths", args.kv_lengths, {"requests"})
      .tensor("output", args.output, {"tokens", "heads_q", "head_dim"})
      .optional("sinks", args.sinks, {"heads_q"})
      .optional("lse", args.lse, {"tokens", "heads_q"})
      .dtype("q", args.q, dtypes_mask(DType::f32, DType::bf16, DType::fp8_e4m3))
      .dtype("k", args.k, dtypes_mask(DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3))
      .dtype("v", args.v, dtypes_mask(args.k.dtype))
      .dtype("page_table", args.page_table, dtypes_mask(DType::i32))
      .dtype("kv_lengths", args.kv_lengths, dtypes_mask(DType::i32))
      .dtype(
          "output", args.output,
          args.q.dtype == DType::fp8_e4m3 ? dtypes_mask(DType::f32, DType::bf16) : dtypes_mask(args.q.dtype))
      .dtype("sinks", args.sinks, dtypes_mask(DType::f32))
      .dtype("lse", args.lse, dtypes_mask(DType::f32))
      .written("output", args.output)
      .written("lse", args.lse);
  check_fp8_scales(check, args.q, args.k, args.q_scale, args.k_scale, args.v_scale);
  const int64_t requests = check["requests"], heads_q = check["heads_q"], heads_kv = check["heads_kv"];
  check_query_start(check, args.query_start, requests);
  check.that(heads_kv > 0 && heads_q % heads_kv == 0, "heads_q", static_cast<double>(heads_q),
             "a multiple of heads_kv (k.shape[2])");
  check.that(heads_q > 0, "heads_q", static_cast<double>(heads_q), "at least 1");
  const int64_t head_dim = check["head_dim"];
  check.that(head_dim >= 1, "head_dim", static_cast<double>(head_dim), "at least 1");
  check.that(check["page_tokens"] >= 1, "page_tokens", static_cast<double>(check["page_tokens"]),
             "at least 1");
  check.that(std::isfinite(args.softmax_scale) && args.softmax_scale >= 0, "softmax_scale",
             args.softmax_scale, "a finite number >= 0");
  check.that(std::isfinite(args.soft_cap) && args.soft_cap >= 0, "soft_cap", args.soft_cap,
             "a finite number >= 0");
  check.that(args.window >= 0, "window", static_cast<double>(args.window), "at least 0");
}

Status check_attention_contents(std::string_view op, const AttentionArgs& args, int64_t max_query_tokens) {
  const int64_t requests = args.page_table.shape[0], tokens = args.q.shape[0];
  const int64_t page_tokens = args.k.shape[1], max_pages = args.page_table.shape[1], pages = args.k.shape[0];
  const int32_t* start = args.query_start.as<const int32_t>();
  if (start[0] < 0) return invalid_argument("{}: query_start[0] is {}, needs at least 0", op, start[0]);
  for (int64_t b = 0; b < requests; ++b) {
    const RequestRange range = request_range(args, b);
    if (range.rows < 0 || range.row_begin + range.rows > tokens) {
      return invalid_argument("{}: query_start[{}] is {}, needs {} .. {} (tokens)", op, b + 1, start[b + 1],
                              start[b], tokens);
    }
    if (max_query_tokens > 0 && range.rows > max_query_tokens) {
      return invalid_argument("{}: request {} has {} query tokens, needs at most max_query_tokens = {}", op,
                              b, range.rows, max_query_tokens);
    }
    if (range.keys < 0 || range.keys > max_pages * page_tokens) {
      return invalid_argument("{}: kv_lengths[{}] is {}, needs 0 .. {} (max_pages * page_tokens)", op, b,
                              range.keys, max_pages * page_tokens);
    }
    if (range.rows == 0 || range.keys == 0) continue;
    const int32_t* table = args.page_table.as<const int32_t>() + b * args.page_table.stride[0];
    const int64_t last = (range.keys - 1) / page_tokens;
    for (int64_t i = range.first_key(0, args.window) / page_tokens; i <= last; ++i) {
      if (table[i] < 0 || table[i] >= pages) {
        return invalid_argument("{}: page_table[{}, {}] is {}, needs 0 .. {} (pages - 1)", op, b, i, table[i],
                                pages - 1);
      }
    }
  }
  return {};
}

Facts attention_facts(const AttentionArgs& args) {
  Facts facts;
  facts.add("head_dim", args.q.shape[2])
      .add("heads_q", args.q.shape[1])
      .add("heads_kv", args.k.shape[2])
      .add("group", args.k.shape[2] > 0 ? args.q.shape[1] / args.k.shape[2] : 0)
      .add("page_tokens", args.k.shape[1])
      .add("q", args.q.dtype)
      .add("kv", args.k.dtype)
      .add("k_alignment", alignment_of(args.k))
      .add("v_alignment", alignment_of(args.v));
  return facts;
}

Cost attention_cost(const AttentionArgs& args) {
  const int64_t keys = args.page_table.elements() * args.k.shape[1];
  const int64_t per_key = 2 * args.k.shape[2] * args.k.shape[3] * info_of(args.k.dtype).block_bytes;
  const int64_t scales = args.k_scale.rank == 3 ? keys * args.k.shape[2] * 4 : 0;
  const int64_t requests = args.page_table.shape[0];
  const int64_t rows = requests > 0 ? args.q.shape[0] * args.q.shape[1] * keys / requests : 0;
  return {args.q.bytes() + args.q_scale.bytes() + args.output.bytes() + args.lse.bytes() + keys * per_key +
              scales,
          4 * rows * args.q.shape[2]};
}

}  // namespace vivace
