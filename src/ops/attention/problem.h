#pragma once

#include <algorithm>
#include <numeric>
#include <span>

#include "src/ops/attention/args.h"
#include "src/ops/problem.h"

namespace vivace {

/// A request of a case: keys in the cache, and how many of its last tokens are queries.
struct AttentionRequest {
  int64_t keys, rows;
};

/// How k and v lie in memory; all are views of the same logical shape.
enum class KvLayout {
  token_head,   ///< [page, token, head, dim], K and V apart
  head_token,   ///< [page, head, token, dim]
  interleaved,  ///< [page, {K, V}, token, head, dim] in one buffer
};

struct AttentionCase {
  const char* name;
  std::vector<AttentionRequest> requests;
  int64_t heads_q = 9, heads_kv = 3, head_dim = 64, page_tokens = 16;
  DType q = DType::f32, kv = DType::f32;
  int64_t window = 0;
  double soft_cap = 0, softmax_scale = 0;
  bool sinks = false, lse = true;
  KvLayout layout = KvLayout::token_head;
  int64_t q_row_stride = 0;  ///< elements between tokens of q and output; 0: contiguous
  double score_deviation = 1;
  bool scale_per_key = false;   ///< with an fp8 cache: K has a scale per key and head instead of one
  bool scale_per_head = false;  ///< with an fp8 cache: V has a scale per head instead of one
  DType output = DType::none;   ///< none: that of q, and bf16 with an fp8 q
};

/// The cases, and each of those in fp32 once more in bf16, which is what a GPU takes.
template <class Case>
std::vector<Case> with_bf16(std::vector<Case> cases) {
  for (size_t i = 0, count = cases.size(); i < count; ++i) {
    if (cases[i].attention.q != DType::f32) continue;
    Case copy = cases[i];
    copy.attention.q = copy.attention.kv = DType::bf16;
    cases.push_back(copy);
  }
  return cases;
}

/// A case with its memory. Pages are handed out in shuffled order, the last page of the pool in use. Everything
/// that no query may read is poisoned: slots past a length, unused pages, and page-table entries past a
/// request's last page or wholly before its window, which name a page that does not exist.
struct AttentionProblem {
  Guarded q, kv, k_memory, v_memory, page_table, kv_lengths, query_start, output, sinks, lse, q_scale,
      k_scale, v_scale;
  AttentionArgs args;
  int64_t max_rows = 1;

  AttentionProblem(const AttentionCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    const int64_t requests = static_cast<int64_t>(c.requests.size());
    int64_t tokens = 0, used_pages = 0, max_pages = 1;
    for (const AttentionRequest& r : c.requests) {
      const int64_t pages = (r.keys + c.page_tokens - 1) / c.page_tokens;
      tokens += r.rows;
      used_pages += pages;
      max_pages = std::max(max_pages, pages + 1);
      max_rows = std::max(max_rows, r.rows);
    }
    const int64_t pages = used_pages + 2;
    allocate_cache(c, pages);
    const DType plain = c.q == DType::fp8_e4m3 ? DType::bf16 : c.q;
    q = rows_of_heads(c, c.q, tokens);
    output = rows_of_heads(c, c.output == DType::none ? plain : c.output, tokens);
    const bool fp8_q = c.q == DType::fp8_e4m3;
    q.random(rng,
             fp8_q ? 100 : c.score_deviation);  // so that an fp8 row uses its range, as made scales have it
    page_table = Guarded(DType::i32, {requests, max_pages});
    kv_lengths = Guarded(DType::i32, {requests});
    query_start = Guarded(DType::i32, {requests + 1});
    if (c.sinks) sinks = std::move(Guarded(DType::f32, {c.heads_q}).random(rng));
    if (c.lse) lse = Guarded(DType::f32, {tokens, c.heads_q});

    args = {.page_table = page_table, .kv_lengths = kv_lengths, .query_start = query_start};
    args.q = as_heads(q, c, tokens);
    args.output = as_heads(output, c, tokens);
    args.k = k_view;
    args.v = v_view;
    args.sinks = sinks;
    if (fp8_q) {
      q_scale = Guarded(DType::f32, {tokens, c.heads_q});
      for (int64_t i = 0; i < tokens * c.heads_q; ++i)
        q_scale.as<float>()[i] = static_cast<float>(c.score_deviation * 0.01) * (0.75f + 0.5f * unit(rng));
    }
    if (c.kv == DType::fp8_e4m3) {
      k_scale = c.scale_per_key ? Guarded(DType::f32, {pages, c.page_tokens, c.heads_kv})
                                : Guarded(DType::f32, {1});
      if (!c.scale_per_key) k_scale.as<float>()[0] = 0.011f;
      v_scale = Guarded(DType::f32, {c.scale_per_head ? c.heads_kv : 1});
      for (int64_t i = 0; i < v_scale.tensor().shape[0]; ++i)
        v_scale.as<float>()[i] = 0.008f + 0.002f * static_cast<float>(i);
    }
    args.q_scale = q_scale;
    args.k_scale = k_scale;
    args.v_scale = v_scale;
    args.lse = lse;
    args.softmax_scale = c.softmax_scale;
    args.window = c.window;
    args.soft_cap = c.soft_cap;

    std::vector<int32_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end() - 1, rng);  // the last page stays last and is taken first
    int32_t* start = query_start.as<int32_t>();
    start[0] = 0;
    for (int64_t b = 0; b < requests; ++b) {
      const AttentionRequest& r = c.requests[b];
      kv_lengths.as<int32_t>()[b] = static_cast<int32_t>(r.keys);
      start[b + 1] = start[b] + static_cast<int32_t>(r.rows);
      int32_t* table = page_table.as<int32_t>() + b * max_pages;
      std::fill(table, table + max_pages, static_cast<int32_t>(pages));
      const int64_t first = request_range(args, b).first_key(0, c.window);
      for (int64_t j = first; j < r.keys; ++j) {
        int32_t& page = table[j / c.page_tokens];
        if (page == pages) {
          page = order.back();
          order.pop_back();
        }
        fill_key(page, j % c.page_tokens, rng);
      }
    }
  }

  /// Element offset of a key's head in k or v.
  int64_t offset(const Tensor& cache, int64_t request, int64_t key, int64_t head) const {
    const int64_t page =
        args.page_table.as<const int32_t>()[request * args.page_table.stride[0] + key / cache.shape[1]];
    return page * cache.stride[0] + key % cache.shape[1] * cache.stride[1] + head * cache.stride[2];
  }
  void set_key(int64_t request, int64_t key, int64_t head, double value) {
    set(args.k, request, key, head, value);
  }
  void set_value(int64_t request, int64_t key, int64_t head, double value) {
    set(args.v, request, key, head, value);
  }

 private:
  static float unit(std::mt19937& rng) { return static_cast<float>(rng() >> 8) * 0x1p-24f; }
  static Guarded rows_of_heads(const AttentionCase& c, DType dtype, int64_t tokens) {
    return Guarded(dtype, {tokens, c.heads_q * c.head_dim}, c.q_row_stride);
  }
  static Tensor as_heads(const Tensor& rows, const AttentionCase& c, int64_t tokens) {
    Tensor t = rows;
    t.rank = 3;
    t.shape = {tokens, c.heads_q, c.head_dim};
    t.stride = {rows.stride[0], c.head_dim, 1};
    return t;
  }
  void allocate_cache(const AttentionCase& c, int64_t pages) {
    const int64_t page = c.page_tokens * c.heads_kv * c.head_dim;
    Tensor view;
    view.dtype = c.kv;
    view.device = CaseMemory::current().device;
    view.rank = 4;
    view.shape = {pages, c.page_tokens, c.heads_kv, c.head_dim};
    view.stride = {page, c.heads_kv * c.head_dim, c.head_dim, 1};
    if (c.layout == KvLayout::head_token) view.stride = {page, c.head_dim, c.page_tokens * c.head_dim, 1};
    k_view = v_view = view;
    if (c.layout == KvLayout::interleaved) {
      kv = Guarded(c.kv, {pages, 2 * page});
      k_view.stride[0] = v_view.stride[0] = 2 * page;
      k_view.data = kv.as<char>();
      v_view.data = kv.as<char>() + page * info_of(c.kv).block_bytes;
    } else {
      k_memory = Guarded(c.kv, {pages, page});
      v_memory = Guarded(c.kv, {pages, page});
      k_view.data = k_memory.as<void>();
      v_view.data = v_memory.as<void>();
    }
  }
  void fill_key(int64_t page, int64_t slot, std::mt19937& rng) {
    // Normal numbers from a table: drawing one for each element of a long cache would be the tests' main cost.
    static const std::vector<float> noise = [] {
      std::mt19937 table_rng(1);
      std::normal_distribution<float> normal;
      std::vector<float> values(1 << 16);
      for (float& v : values) v = normal(table_rng);
      return values;
    }();
    const double deviation = args.k.dtype == DType::fp8_e4m3 ? 100 : 1;  // the range of fp8 in use
    for (int64_t h = 0; h < args.k.shape[2]; ++h) {
      if (args.k_scale.rank == 3) {
        args.k_scale.at(page).at(slot).as<float>()[h] = 0.01f * (0.75f + 0.5f * unit(rng));
      }
      for (const Tensor* cache : {&args.k, &args.v}) {
        const int64_t at = page * cache->stride[0] + slot * cache->stride[1] + h * cache->stride[2];
        const uint32_t from = rng();
        for (int64_t d = 0; d < args.k.shape[3]; ++d)
          store(cache->dtype, cache->data, at + d, deviation * noise[(from + d) % noise.size()]);
      }
    }
  }
  void set(const Tensor& cache, int64_t request, int64_t key, int64_t head, double value) {
    for (int64_t d = 0; d < cache.shape[3]; ++d)
      store(cache.dtype, cache.data, offset(cache, request, key, head) + d, value);
  }

  Tensor k_view, v_view;
};

}  // namespace vivace
