/* Vivace's operators for C, and for any language that calls C. Plain C11; no type here comes from CUDA or C++.
 *
 * Outcomes   A function that can fail returns a vivace_code; 0 is success. vivace_last_error() then has a sentence that names
 *            the place, the argument, its value and what would fit. Nothing throws.
 * Arguments  travel in structs. Fill one with zeros, set struct_bytes to its sizeof, then what the call needs: an absent
 *            tensor is all zeros, and a number has no default but 0 or what its comment says 0 means. Structs of arguments grow at their end alone: a caller
 *            that was compiled with a shorter one is understood (what it lacks is 0), one with a longer one too as long as
 *            what is unknown here is 0. vivace_tensor, vivace_stream and the structs inside structs keep their layout.
 * Memory     belongs to the caller, always; operators allocate none on a device. An output that shares memory with another argument,
 *            where the contract does not allow it, is refused as far as that is seen at once, and so is one whose own elements share
 *            memory (a stride of 0, or below what it has to step over); an input may repeat itself. Text that a function gives (an error, JSON) is
 *            the library's and lasts until the calling thread's next call that gives text of the same kind.
 * Threads    Any thread may call anything. Calls with a context on the CPU take turns on its threads.
 * Contracts  What an operator computes, writes and refuses, and how it rounds, is stated once, in the C++ header of the same
 *            name: vivace_rms_norm is vivace/rms_norm.h. The operator OP has
 *              vivace_OP                   runs it: on the CPU to its end, on a GPU it only enqueues
 *              vivace_OP_cost              the bytes and operations that it needs at least
 *              vivace_OP_explain           which row of its table would run, and why those before it would not:
 *                                          {"row": "cpu.f32", "refused": [{"row": "sm90.warps", "reason": "..."}]};
 *                                          "row" is null when none fits
 *              vivace_OP_workspace_bytes   where it takes a workspace: the scratch of such a call, workspace itself not looked at
 *            The last three are queries: memory may be null, and a call whose arguments disagree is refused in the call's words.
 */
#ifndef VIVACE_C_API_H
#define VIVACE_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a caller that was compiled before would be misunderstood. Additions do not raise it. */
#define VIVACE_ABI_VERSION 1
/* VIVACE_ABI_VERSION of the library that was loaded. */
int32_t vivace_abi_version(void);
/* "0.1.0" */
const char* vivace_version(void);

typedef int32_t vivace_code;
enum {
  VIVACE_OK = 0,
  VIVACE_INVALID_ARGUMENT = 1,   /* the caller's value is wrong; the message names it and what would fit */
  VIVACE_UNSUPPORTED = 2,        /* the value is meaningful, but nothing here can do it */
  VIVACE_NOT_FOUND = 3,          /* an operator or row of that name does not exist */
  VIVACE_IO_ERROR = 4,
  VIVACE_OUT_OF_MEMORY = 5,
  VIVACE_RESOURCE_EXHAUSTED = 6,
  VIVACE_CANCELLED = 7,
  VIVACE_DEVICE_ERROR = 8,       /* a launch or the device failed */
  VIVACE_INTERNAL = 9            /* a defect of this library */
};
/* The message of this thread's last failed call; "" before the first. */
const char* vivace_last_error(void);

enum { /* vivace_tensor.dtype */
  VIVACE_F32 = 1,
  VIVACE_F16 = 2,
  VIVACE_BF16 = 3,
  VIVACE_FP8_E4M3 = 4, /* the finite one, "e4m3fn" */
  VIVACE_U8 = 5,
  VIVACE_I32 = 6,
  VIVACE_I64 = 7,
  VIVACE_Q4_0 = 16, /* block formats of GGUF; shape and strides count weights, not bytes */
  VIVACE_Q4_1 = 17,
  VIVACE_Q8_0 = 18,
  VIVACE_Q4_K = 19,
  VIVACE_Q6_K = 20
};
enum { VIVACE_DEVICE_CPU = 0, VIVACE_DEVICE_CUDA = 1 }; /* device */
enum { VIVACE_MAX_RANK = 5 };

/* A view of memory. Strides count elements; the last dimension must be contiguous. The stride of a dimension of one element, and
 * all strides without elements, mean nothing. All zeros: absent. */
typedef struct vivace_tensor {
  void* data; /* may be null without elements, and in queries */
  int32_t dtype;
  int32_t rank;
  int32_t device;
  int32_t ordinal; /* of a CUDA device */
  int64_t shape[VIVACE_MAX_RANK];
  int64_t stride[VIVACE_MAX_RANK];
} vivace_tensor;

/* The threads of calls on the CPU, preferences among rows, and counts of the rows that ran. */
typedef struct vivace_context vivace_context;

typedef struct vivace_context_options {
  size_t struct_bytes;
  int64_t threads;    /* 0: the cores that this process may use */
  const char* prefer; /* "OP=ROW[,OP=ROW...]", ROW a name or a prefix up to a dot: only such rows are tried; null: the table's order */
  const vivace_context* threads_of; /* this context's threads rather than its own, and then no `threads`; it may be destroyed before */
} vivace_context_options;

/* Starts the threads. `options` may be null. A child that was forked from this process must make one of its own. */
vivace_code vivace_context_create(const vivace_context_options* options, vivace_context** context);
/* Null is legal. No call may be using the context. */
void vivace_context_destroy(vivace_context* context);
/* [{"op": "linear", "row": "cpu.f32", "calls": 12}, ...]: the rows that ran at least once. */
vivace_code vivace_context_counts(const vivace_context* context, const char** json);

/* Where a call runs. A null vivace_stream is the CPU, on the calling thread alone; in a query, wherever the first tensor lies:
 * a GPU must then be there, or the query is refused. */
typedef struct vivace_stream {
  int32_t device;
  int32_t ordinal;            /* which CUDA device */
  int32_t compute_capability; /* 10 * major + minor; 0: asked of the device. Queries answer for a device that is not there */
  int32_t reserved;           /* 0 */
  void* handle;               /* cudaStream_t; null: the device's default stream */
  vivace_context* context;    /* null: no preferences, no counts; on the CPU the calling thread alone */
} vivace_stream;

typedef struct vivace_cost {
  int64_t bytes; /* read and written once each, caches ignored */
  int64_t flops;
} vivace_cost;

/* Every operator with its table, rows in order of preference:
 * [{"op": "rms_norm", "summary": "...", "rows": [{"row": "cpu.simd", "device": "cpu", "needs": ["..."], "summary": "..."}]}] */
vivace_code vivace_operators(const char** json);
/* What the library was built with and what this machine has for it:
 * {"version": "0.1.0", "cuda": true, "runtime": "13.0", "driver": "13.0", "code": "sm_90 sm_90a",
 *  "devices": [{"name": "...", "compute_capability": 90, "sms": 132, "memory_bytes": ...}], "why_no_device": ""} */
vivace_code vivace_build(const char** json);

/* What one scale of an fp8 activation covers, and who makes it. */
enum {
  VIVACE_FP8_TENSOR = 0, /* f32 [1], given */
  VIVACE_FP8_TOKEN = 1,  /* f32 [tokens], made */
  VIVACE_FP8_BLOCK = 2   /* f32 [tokens, ceil(width / 128)], made */
};

/* residual += x and v = residual; without a residual v = x. y = v / sqrt(mean(v * v) + eps) * weight.
 * y_fp8 is what vivace_quantize_fp8 makes of y. */
typedef struct vivace_rms_norm_args {
  size_t struct_bytes;
  vivace_tensor x;        /* [tokens, hidden], f32 or bf16 */
  vivace_tensor residual; /* optional, [tokens, hidden]; updated in place */
  vivace_tensor weight;   /* [hidden], f32, f16 or bf16 */
  vivace_tensor y;        /* out, [tokens, hidden], f32, bf16 or fp8 */
  vivace_tensor y_scale;  /* with fp8 y or y_fp8: as y_scaling says */
  int64_t y_scaling;      /* VIVACE_FP8_* */
  double eps;
  vivace_tensor y_fp8; /* optional out where y is not fp8, [tokens, hidden], fp8 */
} vivace_rms_norm_args;
vivace_code vivace_rms_norm(const vivace_rms_norm_args* args, const vivace_stream* stream);
vivace_code vivace_rms_norm_cost(const vivace_rms_norm_args* args, vivace_cost* cost);
vivace_code vivace_rms_norm_explain(const vivace_rms_norm_args* args, const vivace_stream* stream, const char** json);

typedef struct vivace_linear_part {
  vivace_tensor weight;       /* [n, k], any type but i32 and i64 */
  vivace_tensor weight_scale; /* with fp8 weight: f32 [1], or [ceil(n / 128), ceil(k / 128)] */
  vivace_tensor bias;         /* optional, [n] */
  vivace_tensor y;            /* out, [tokens, n], f32 or bf16 */
} vivace_linear_part;

/* y_p = x . weight_p^T + bias_p for each part p; parts share x. */
enum { VIVACE_LINEAR_PARTS = 3 };
typedef struct vivace_linear_args {
  size_t struct_bytes;
  vivace_tensor x;       /* [tokens, k], f32, bf16 or fp8 */
  vivace_tensor x_scale; /* with fp8 x: as x_scaling says */
  vivace_linear_part parts[VIVACE_LINEAR_PARTS];
  vivace_tensor workspace;
  int64_t part_count;      /* 1 .. 3 */
  int64_t x_scaling;       /* VIVACE_FP8_* */
  int64_t exact;           /* 1: no quantisation of activations */
  int64_t batch_invariant; /* 1: a token's bits do not depend on how many there are */
  int64_t weight_ready;    /* the caller's word: vivace/linear.h */
} vivace_linear_args;
vivace_code vivace_linear(const vivace_linear_args* args, const vivace_stream* stream);
vivace_code vivace_linear_workspace_bytes(const vivace_linear_args* args, const vivace_stream* stream, int64_t* bytes);
vivace_code vivace_linear_cost(const vivace_linear_args* args, vivace_cost* cost);
vivace_code vivace_linear_explain(const vivace_linear_args* args, const vivace_stream* stream, const char** json);

/* y[t] = table[ids[t]]. */
typedef struct vivace_embedding_args {
  size_t struct_bytes;
  vivace_tensor ids;   /* i32 [tokens] */
  vivace_tensor table; /* [vocab, hidden] */
  vivace_tensor y;     /* out, [tokens, hidden], f32 or bf16 */
} vivace_embedding_args;
vivace_code vivace_embedding(const vivace_embedding_args* args, const vivace_stream* stream);
vivace_code vivace_embedding_cost(const vivace_embedding_args* args, vivace_cost* cost);
vivace_code vivace_embedding_explain(const vivace_embedding_args* args, const vivace_stream* stream, const char** json);

enum { VIVACE_QK_NORM_NONE = 0, VIVACE_QK_NORM_THEN_ROPE = 1, VIVACE_QK_ROPE_THEN_NORM = 2 };
enum { VIVACE_ROPE_NEOX = 0, VIVACE_ROPE_INTERLEAVED = 1 };

/* Between the QKV projection and attention: splits qkv, normalises and rotates Q and K, writes Q densely and K and V into their
 * slots of the paged cache. */
typedef struct vivace_attention_prologue_args {
  size_t struct_bytes;
  vivace_tensor qkv;           /* [tokens, (heads_q + 2 heads_kv) * head_dim], f32 or bf16 */
  vivace_tensor q_norm_weight; /* [head_dim]; absent exactly when qk_norm is none */
  vivace_tensor k_norm_weight;
  vivace_tensor cos_sin;   /* optional, f32 [max_position, rotary_dim]: cosines, then sines */
  vivace_tensor positions; /* i32 [tokens]; needed with cos_sin */
  vivace_tensor slots;     /* i64 [tokens]: page * page_tokens + offset; -1: nowhere */
  vivace_tensor q;         /* out, [tokens, heads_q, head_dim], f32, bf16 or fp8 */
  vivace_tensor k;         /* out, [pages, page_tokens, heads_kv, head_dim] */
  vivace_tensor v;         /* out, like k */
  vivace_tensor q_scale;   /* with fp8 q: out, f32 [tokens, heads_q] */
  vivace_tensor k_scale;   /* with fp8 k: in, f32 [1]; or out, [pages, page_tokens, heads_kv] */
  vivace_tensor v_scale;   /* with fp8 v: in, f32 [1] or [heads_kv] */
  int64_t qk_norm;
  int64_t rope_style;
  double eps;
} vivace_attention_prologue_args;
vivace_code vivace_attention_prologue(const vivace_attention_prologue_args* args, const vivace_stream* stream);
vivace_code vivace_attention_prologue_cost(const vivace_attention_prologue_args* args, vivace_cost* cost);
vivace_code vivace_attention_prologue_explain(const vivace_attention_prologue_args* args, const vivace_stream* stream,
                                              const char** json);

/* Causal attention of ragged query rows over a paged KV cache: vivace/attention.h. */
typedef struct vivace_attention {
  vivace_tensor q;           /* [tokens, heads_q, head_dim], f32, bf16 or fp8 */
  vivace_tensor k;           /* [pages, page_tokens, heads_kv, head_dim] */
  vivace_tensor v;           /* like k, with strides of its own */
  vivace_tensor page_table;  /* i32 [requests, max_pages] */
  vivace_tensor kv_lengths;  /* i32 [requests]: this call's tokens included */
  vivace_tensor query_start; /* i32 [requests + 1] */
  vivace_tensor output;      /* out, like q; f32 or bf16 when q is fp8; rows of no request are not written */
  vivace_tensor q_scale;     /* with fp8 q: f32 [tokens, heads_q] */
  vivace_tensor k_scale;     /* with fp8 k: f32 [1], or [pages, page_tokens, heads_kv] */
  vivace_tensor v_scale;     /* with fp8 v: f32 [1], or [heads_kv] */
  vivace_tensor sinks;       /* optional, f32 [heads_q] */
  vivace_tensor lse;         /* optional out, f32 [tokens, heads_q] */
  double softmax_scale;      /* 0: 1 / sqrt(head_dim) */
  int64_t window;            /* 0: none */
  double soft_cap;           /* 0: none */
} vivace_attention;

typedef struct vivace_attention_prefill_args {
  size_t struct_bytes;
  vivace_attention attention;
  int64_t max_query_tokens; /* no request has more query rows; 0: tokens */
  int64_t split_tokens;     /* 0: keys are added up in one run */
} vivace_attention_prefill_args;
vivace_code vivace_attention_prefill(const vivace_attention_prefill_args* args, const vivace_stream* stream);
vivace_code vivace_attention_prefill_cost(const vivace_attention_prefill_args* args, vivace_cost* cost);
vivace_code vivace_attention_prefill_explain(const vivace_attention_prefill_args* args, const vivace_stream* stream,
                                             const char** json);

/* How the work of a decode step is cut; the same for decode_schedule and the attention_decode calls that use its map. */
typedef struct vivace_decode_schedule_params {
  int64_t heads_kv;     /* 0: 1 */
  int64_t tile_tokens;  /* 0: 64 */
  int64_t workers;      /* 0: 1 */
  int64_t min_tiles;    /* 0: 1 */
  int64_t request_cost; /* in tiles */
  int64_t window;       /* as in vivace_attention */
  int64_t piece_tiles;  /* 0: a request is cut wherever balance wants */
} vivace_decode_schedule_params;

typedef struct vivace_attention_decode_args {
  size_t struct_bytes;
  vivace_attention attention;
  vivace_tensor schedule;  /* the map that decode_schedule wrote for these lengths and row ranges */
  vivace_tensor workspace;
  vivace_decode_schedule_params params; /* those that `schedule` was made with */
  int64_t max_query_tokens;             /* no request has more query rows; 1 .. 8 */
  int64_t old_keys_ready;               /* the caller's word: vivace/attention_decode.h */
} vivace_attention_decode_args;
vivace_code vivace_attention_decode(const vivace_attention_decode_args* args, const vivace_stream* stream);
vivace_code vivace_attention_decode_workspace_bytes(const vivace_attention_decode_args* args, const vivace_stream* stream,
                                                    int64_t* bytes);
/* How to cut the schedule of such calls for the row that runs them; piece_tiles and window of args->params are kept. */
vivace_code vivace_attention_decode_schedule_params(const vivace_attention_decode_args* args, const vivace_stream* stream,
                                                    vivace_decode_schedule_params* params);
vivace_code vivace_attention_decode_cost(const vivace_attention_decode_args* args, vivace_cost* cost);
vivace_code vivace_attention_decode_explain(const vivace_attention_decode_args* args, const vivace_stream* stream,
                                            const char** json);

/* Cuts the key tiles of all requests and KV heads into one run per worker. Once per step and distinct window. */
typedef struct vivace_decode_schedule_args {
  size_t struct_bytes;
  vivace_tensor kv_lengths;  /* i32 [requests] */
  vivace_tensor query_start; /* i32 [requests + 1] */
  vivace_tensor schedule;    /* out, i32, at least vivace_decode_schedule_ints() long */
  vivace_decode_schedule_params params;
} vivace_decode_schedule_args;
vivace_code vivace_decode_schedule(const vivace_decode_schedule_args* args, const vivace_stream* stream);
vivace_code vivace_decode_schedule_cost(const vivace_decode_schedule_args* args, vivace_cost* cost);
vivace_code vivace_decode_schedule_explain(const vivace_decode_schedule_args* args, const vivace_stream* stream,
                                           const char** json);
/* int32 values of a map for at most this many requests. */
int64_t vivace_decode_schedule_ints(int64_t max_requests, int64_t workers);

enum { VIVACE_ROUTER_TWO_TERM = 0, VIVACE_ROUTER_EXACT = 1 };
enum { VIVACE_ROUTER_TERMS = 3 };

/* A router weight as a sum of bf16 terms: terms[0] + terms[1] + terms[2]; terms[0] + terms[1] / 256 + terms[2] / 65536 when scaled. */
typedef struct vivace_router_weight {
  vivace_tensor terms[VIVACE_ROUTER_TERMS]; /* bf16 [experts, hidden] */
  int64_t term_count;
  int64_t scaled; /* some weight lies in (0, 2^-110) */
  int64_t mode;
  uint64_t version; /* of the weight it was made from */
} vivace_router_weight;

typedef struct vivace_router_weight_source {
  size_t struct_bytes;
  vivace_tensor weight;  /* f32, f16 or bf16 [experts, hidden], in host memory */
  vivace_tensor storage; /* u8 [>= vivace_router_weight_bytes()]; absent when that is 0 */
  int64_t mode;
  uint64_t version; /* raised by the caller when the weight changes */
} vivace_router_weight_source;
/* Storage that the terms may need; 0 for a bf16 weight, which is its own only term. */
vivace_code vivace_router_weight_bytes(const vivace_router_weight_source* source, int64_t* bytes);
/* Splits a weight into its terms, which lie in storage; for load time. They may be copied to a device afterwards. */
vivace_code vivace_prepare_router_weight(const vivace_router_weight_source* source, vivace_router_weight* weight);

/* scores = x . weight^T (+ bias): the logits of a mixture-of-experts router. */
typedef struct vivace_router_gemm_args {
  size_t struct_bytes;
  vivace_tensor x; /* [tokens, hidden], f32 or bf16 */
  vivace_router_weight weight;
  vivace_tensor bias;      /* optional, f32 [experts] */
  vivace_tensor scores;    /* out, [tokens, experts], f32 or bf16 */
  uint64_t current_version; /* of the weight as it is now; another than weight.version is refused */
  int64_t batch_invariant;  /* a token's bits must not depend on how many tokens there are */
  int64_t weight_ready;     /* the caller's word: vivace/router_gemm.h */
} vivace_router_gemm_args;
vivace_code vivace_router_gemm(const vivace_router_gemm_args* args, const vivace_stream* stream);
vivace_code vivace_router_gemm_cost(const vivace_router_gemm_args* args, vivace_cost* cost);
vivace_code vivace_router_gemm_explain(const vivace_router_gemm_args* args, const vivace_stream* stream, const char** json);

enum { VIVACE_ROUTE_SOFTMAX = 0, VIVACE_ROUTE_SOFTMAX_CHOSEN = 1, VIVACE_ROUTE_SIGMOID = 2 };

/* Chooses top_k experts for each token from its router logits, and their weights. */
typedef struct vivace_route_top_k_args {
  size_t struct_bytes;
  vivace_tensor scores;          /* f32 [tokens, experts] */
  vivace_tensor correction_bias; /* optional, f32 [experts]: for the choice, not in the weights */
  vivace_tensor expert_ids;      /* out, i32 [tokens, top_k] */
  vivace_tensor expert_weights;  /* out, f32 [tokens, top_k] */
  vivace_tensor zero_weight;     /* out, f32 [tokens]; present exactly when zero_experts > 0 */
  vivace_tensor live_tokens;     /* optional, i32 [1]: tokens from this number on are padding */
  int64_t scoring;
  int64_t renormalise;
  double scale;       /* factor on the weights, after renormalisation */
  int64_t groups;     /* 0: 1 */
  int64_t top_groups; /* 0: 1 */
  int64_t zero_experts;
} vivace_route_top_k_args;
vivace_code vivace_route_top_k(const vivace_route_top_k_args* args, const vivace_stream* stream);
vivace_code vivace_route_top_k_cost(const vivace_route_top_k_args* args, vivace_cost* cost);
vivace_code vivace_route_top_k_explain(const vivace_route_top_k_args* args, const vivace_stream* stream, const char** json);

/* vivace_router_gemm and vivace_route_top_k in one call, which is one kernel where that is faster. */
typedef struct vivace_choose_experts_args {
  size_t struct_bytes;
  vivace_tensor x; /* [tokens, hidden], f32 or bf16 */
  vivace_router_weight weight;
  vivace_tensor bias;            /* optional, f32 [experts]: of the scores */
  vivace_tensor scores;          /* optional out, f32 [tokens, experts]: the logits, if somebody wants them */
  vivace_tensor correction_bias; /* optional, f32 [experts]: for the choice, not in the weights */
  vivace_tensor expert_ids;      /* out, i32 [tokens, top_k] */
  vivace_tensor expert_weights;  /* out, f32 [tokens, top_k] */
  vivace_tensor zero_weight;     /* out, f32 [tokens]; present exactly when zero_experts > 0 */
  vivace_tensor live_tokens;     /* optional, i32 [1]: tokens from this number on are padding */
  vivace_tensor workspace;       /* u8 [>= vivace_choose_experts_workspace_bytes()]; absent when that is 0 */
  uint64_t current_version;      /* of the weight as it is now; another than weight.version is refused */
  int64_t scoring;
  int64_t renormalise;
  double scale;       /* factor on the weights, after renormalisation */
  int64_t groups;     /* 0: 1 */
  int64_t top_groups; /* 0: 1 */
  int64_t zero_experts;
  int64_t batch_invariant; /* a token's bits must not depend on how many tokens there are */
  int64_t weight_ready;    /* the caller's word: vivace/router_gemm.h */
} vivace_choose_experts_args;
vivace_code vivace_choose_experts(const vivace_choose_experts_args* args, const vivace_stream* stream);
vivace_code vivace_choose_experts_cost(const vivace_choose_experts_args* args, vivace_cost* cost);
vivace_code vivace_choose_experts_explain(const vivace_choose_experts_args* args, const vivace_stream* stream, const char** json);
vivace_code vivace_choose_experts_workspace_bytes(const vivace_choose_experts_args* args, const vivace_stream* stream, int64_t* bytes);

/* The three matrices of one expert. */
typedef struct vivace_expert_weights {
  vivace_tensor gate; /* [intermediate, hidden] */
  vivace_tensor up;
  vivace_tensor down;       /* [hidden, intermediate] */
  vivace_tensor gate_scale; /* with fp8 weights: f32 [1], or one per block of 128 x 128 */
  vivace_tensor up_scale;
  vivace_tensor down_scale;
  vivace_tensor act_scale; /* with fp8 weights of one scale: f32 [1] */
} vivace_expert_weights;

/* y_t = sum over j of expert_weights[t, j] * down_e . (silu(gate_e . x_t) * (up_e . x_t)) with e = expert_ids[t, j], plus shared. */
typedef struct vivace_fused_moe_args {
  size_t struct_bytes;
  vivace_tensor x;             /* [tokens, hidden], f32, bf16 or fp8 */
  vivace_tensor x_scale;       /* with fp8 x: f32 [1], or [tokens, ceil(hidden / 128)]; or what x is quantised by */
  vivace_tensor gate_up;       /* [experts, 2 * intermediate, hidden], gate rows first; absent with `experts` */
  vivace_tensor down;          /* [experts, hidden, intermediate] */
  vivace_tensor gate_up_scale; /* with fp8 weights: f32 [experts, 2], or [experts, 2, block rows of I, of H] */
  vivace_tensor down_scale;    /* with fp8 weights: f32 [experts], or [experts, block rows of H, of I] */
  vivace_tensor act_scale;     /* with fp8 weights of one scale an expert: f32 [1] or [experts] */
  vivace_expert_weights shared; /* optional expert that every token visits */
  vivace_tensor expert_ids;     /* i32 [tokens, top_k]; -1: not here */
  vivace_tensor expert_weights; /* f32 [tokens, top_k] */
  vivace_tensor expert_map;     /* optional i32 [ids]: which expert here an id is, negative for those elsewhere */
  vivace_tensor y;              /* out, [tokens, hidden] */
  vivace_tensor workspace;
  const vivace_expert_weights* experts; /* or one by one, in place of gate_up and down; read during the call only */
  int64_t expert_count;                 /* how many there are at `experts` */
  int64_t block_offset;                 /* 0 .. 127: where this slice of the intermediate starts in a block of 128; 0 without such scales */
  int64_t first_expert;                 /* the id of expert 0 here; 0 with an expert_map */
  int64_t total_experts;                /* of all slices, where there are others; 0: those here alone, or an expert_map */
  double swiglu_alpha;                  /* g * sigmoid(alpha * g) * (u + beta), with g = min(gate, limit) and u = up within */
  double swiglu_limit;                  /* -limit and limit; alpha 0 is 1, limit 0 is none, so that zeros are SiLU */
  double swiglu_beta;
  int64_t batch_invariant;              /* a token's bits must not depend on how many tokens there are */
} vivace_fused_moe_args;
vivace_code vivace_fused_moe(const vivace_fused_moe_args* args, const vivace_stream* stream);
vivace_code vivace_fused_moe_workspace_bytes(const vivace_fused_moe_args* args, const vivace_stream* stream, int64_t* bytes);
/* Reads expert_ids in host memory. */
vivace_code vivace_fused_moe_cost(const vivace_fused_moe_args* args, vivace_cost* cost);
vivace_code vivace_fused_moe_explain(const vivace_fused_moe_args* args, const vivace_stream* stream, const char** json);

/* y[r] = x[r] . weight[g]^T for each row r of each group g; rows of no group are not written. */
typedef struct vivace_grouped_gemm_args {
  size_t struct_bytes;
  vivace_tensor x;            /* [rows, k] */
  vivace_tensor weight;       /* [groups, n, k] */
  vivace_tensor group_start;  /* i32 [groups] */
  vivace_tensor group_rows;   /* i32 [groups] */
  vivace_tensor x_scale;      /* with fp8 x: f32 [1], or [rows, ceil(k / 128)] */
  vivace_tensor weight_scale; /* with fp8 weight: f32 [groups], or [groups, ceil(n / 128), ceil(k / 128)] */
  vivace_tensor y;            /* out, [rows, n], f32 or bf16 */
  int64_t batch_invariant;    /* a row's bits must not depend on how many rows there are */
} vivace_grouped_gemm_args;
vivace_code vivace_grouped_gemm(const vivace_grouped_gemm_args* args, const vivace_stream* stream);
vivace_code vivace_grouped_gemm_cost(const vivace_grouped_gemm_args* args, vivace_cost* cost);
vivace_code vivace_grouped_gemm_explain(const vivace_grouped_gemm_args* args, const vivace_stream* stream, const char** json);

/* y = silu(gate) * up. */
typedef struct vivace_silu_mul_args {
  size_t struct_bytes;
  vivace_tensor gate; /* [tokens, intermediate], f32 or bf16 */
  vivace_tensor up;
  vivace_tensor y;       /* out, of gate's type or fp8 */
  vivace_tensor y_scale; /* with fp8 y: as y_scaling says */
  int64_t y_scaling;     /* VIVACE_FP8_* */
} vivace_silu_mul_args;
vivace_code vivace_silu_mul(const vivace_silu_mul_args* args, const vivace_stream* stream);
vivace_code vivace_silu_mul_cost(const vivace_silu_mul_args* args, vivace_cost* cost);
vivace_code vivace_silu_mul_explain(const vivace_silu_mul_args* args, const vivace_stream* stream, const char** json);

/* y = e4m3(x / scale). */
typedef struct vivace_quantize_fp8_args {
  size_t struct_bytes;
  vivace_tensor x;     /* [tokens, width], f32, bf16 or f16 */
  vivace_tensor y;     /* out, fp8 [tokens, width] */
  vivace_tensor scale; /* in or out, as scaling says */
  int64_t scaling;     /* VIVACE_FP8_* */
} vivace_quantize_fp8_args;
vivace_code vivace_quantize_fp8(const vivace_quantize_fp8_args* args, const vivace_stream* stream);
vivace_code vivace_quantize_fp8_cost(const vivace_quantize_fp8_args* args, vivace_cost* cost);
vivace_code vivace_quantize_fp8_explain(const vivace_quantize_fp8_args* args, const vivace_stream* stream, const char** json);

/* Draws one token per row. An absent parameter has its default in all rows. */
typedef struct vivace_sampler_args {
  size_t struct_bytes;
  vivace_tensor logits;             /* f32 or bf16 [rows, vocab]; not modified */
  vivace_tensor temperature;        /* f32 [rows]; 0: greedy */
  vivace_tensor top_p;              /* f32 [rows] */
  vivace_tensor min_p;              /* f32 [rows] */
  vivace_tensor top_k;              /* i32 [rows]; 0: all */
  vivace_tensor repetition_penalty; /* f32 [rows] */
  vivace_tensor presence_penalty;   /* f32 [rows] */
  vivace_tensor frequency_penalty;  /* f32 [rows] */
  vivace_tensor seed;               /* i64 [rows], together with position */
  vivace_tensor position;           /* i64 [rows]: of the token to be drawn in its request */
  vivace_tensor prompt_bits;        /* i32 [states, ceil(vocab / 32)]: the ids of the prompt */
  vivace_tensor output_counts;      /* i32 [states, vocab]: how often an id was drawn; written with count_ids */
  vivace_tensor state;              /* i32 [rows]: the row's state, -1 none; absent: row i has state i */
  vivace_tensor bias_start;         /* i32 [rows + 1] */
  vivace_tensor bias_ids;           /* i32 [entries] */
  vivace_tensor bias_values;        /* f32 [entries] */
  vivace_tensor allowed_bits;       /* optional, i32 [rows, ceil(vocab / 32)] */
  vivace_tensor ids;                /* out, i32 [rows] */
  vivace_tensor valid;              /* out, u8 [rows] */
  vivace_tensor logprobs;           /* optional out, f32 [rows] */
  vivace_tensor top_ids;            /* optional out, i32 [rows, n], together with top_logprobs */
  vivace_tensor top_logprobs;       /* optional out, f32 [rows, n] */
  vivace_tensor workspace;
  int64_t count_ids; /* 1: the drawn id of a valid row is counted into output_counts */
} vivace_sampler_args;
vivace_code vivace_sampler(const vivace_sampler_args* args, const vivace_stream* stream);
vivace_code vivace_sampler_workspace_bytes(const vivace_sampler_args* args, const vivace_stream* stream, int64_t* bytes);
vivace_code vivace_sampler_cost(const vivace_sampler_args* args, vivace_cost* cost);
vivace_code vivace_sampler_explain(const vivace_sampler_args* args, const vivace_stream* stream, const char** json);

#ifdef __cplusplus
}
#endif

#endif
