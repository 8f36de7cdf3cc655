/* The C ABI from C11: every function is called, with what is right and with what is wrong. */

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vivace/c_api.h"

static int failures = 0;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      ++failures;                                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);           \
      fprintf(stderr, "  the library's last error: %s\n", vivace_last_error()); \
    }                                                                           \
  } while (0)

static void check_fails(int line, vivace_code code, vivace_code expected, const char* words) {
  if (code == expected && strstr(vivace_last_error(), words) != NULL) return;
  ++failures;
  fprintf(stderr, "%s:%d: code %d, expected %d; message \"%s\", expected \"%s\" in it\n", __FILE__, line,
          code, expected, vivace_last_error(), words);
}
#define CHECK_FAILS(call, code, words) check_fails(__LINE__, call, code, words)

/* A contiguous tensor. */
static vivace_tensor tensor_of(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  vivace_tensor t = {0};
  int64_t step = 1;
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  for (int i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = step;
    step *= shape[i];
  }
  return t;
}
#define TENSOR(data, dtype, ...)                                                        \
  tensor_of(data, dtype, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
            (int64_t[]){__VA_ARGS__})

static vivace_rms_norm_args rms_norm_of(float* x, float* weight, float* y) {
  vivace_rms_norm_args args = {.struct_bytes = sizeof(args), .eps = 0};
  args.x = TENSOR(x, VIVACE_F32, 2, 2);
  args.weight = TENSOR(weight, VIVACE_F32, 2);
  args.y = TENSOR(y, VIVACE_F32, 2, 2);
  return args;
}

static void test_versions(void) {
  CHECK(vivace_abi_version() == VIVACE_ABI_VERSION);
  CHECK(strchr(vivace_version(), '.') != NULL);
  CHECK(sizeof(vivace_tensor) == 104);
  CHECK(sizeof(vivace_stream) == 32);
}

/* [3, 4]: mean square 12.5; [0, 2]: 2. */
static void test_a_call(void) {
  float x[4] = {3, 4, 0, 2}, weight[2] = {1, 2}, y[4] = {0};
  vivace_rms_norm_args args = rms_norm_of(x, weight, y);
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[0] - 3 / sqrtf(12.5f)) < 1e-6f);
  CHECK(fabsf(y[1] - 8 / sqrtf(12.5f)) < 1e-6f);
  CHECK(y[2] == 0 && fabsf(y[3] - 4 / sqrtf(2)) < 1e-6f);
  vivace_cost cost = {0, 0};
  CHECK(vivace_rms_norm_cost(&args, &cost) == VIVACE_OK);
  CHECK(cost.bytes == 4 * 4 * 2 + 2 * 4 && cost.flops == 24);
}

/* Strides along which nothing steps may be anything, and a tensor without elements needs no memory. */
static void test_strides_that_mean_nothing(void) {
  float x[4] = {3, 4}, weight[2] = {1, 2}, y[4] = {0};
  vivace_rms_norm_args args = rms_norm_of(x, weight, y);
  args.x.shape[0] = args.y.shape[0] = 1;
  args.x.stride[0] = -7;
  args.y.stride[0] = INT64_MAX;
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[1] - 8 / sqrtf(12.5f)) < 1e-6f);
  args.x.shape[0] = args.y.shape[0] = 0;
  args.x.stride[1] = 0;
  args.x.data = NULL;
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
}

static void test_outputs_have_memory_of_their_own(void) {
  float x[8] = {3, 4, 0, 2}, weight[2] = {1, 2}, wide[8] = {0};
  vivace_rms_norm_args args = rms_norm_of(x, weight, x);
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(x[1] - 8 / sqrtf(12.5f)) < 1e-6f);
  args = rms_norm_of(x, weight, x + 2);
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y overlaps x in memory");
  args = rms_norm_of(x, weight, weight);
  args.x.shape[0] = args.y.shape[0] = 1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y overlaps weight in memory");
  args = rms_norm_of(x, weight, wide);
  args.residual = args.y;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "residual overlaps y in memory");
  args.residual = args.x;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "residual overlaps x in memory");
  args = rms_norm_of(wide, weight, wide + 2); /* columns of one matrix */
  args.x.stride[0] = args.y.stride[0] = 4;
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  args.x.stride[0] = 0; /* one row twice, which may only be read */
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  args.y.stride[0] = 1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT,
              "rms_norm: y is f32[2, 2] strides [1, 1], needs stride[0] >= 2: elements that are written have "
              "memory of their own");
}

/* A question about a call that is refused is refused in the same words; memory is not looked at. */
static void test_questions_about_refused_calls(void) {
  vivace_rms_norm_args args = rms_norm_of(NULL, NULL, NULL);
  vivace_cost cost;
  const char* json = NULL;
  CHECK(vivace_rms_norm_cost(&args, &cost) == VIVACE_OK);
  CHECK(vivace_rms_norm_explain(&args, NULL, &json) == VIVACE_OK);
  args.weight.shape[0] = 1;
  CHECK_FAILS(vivace_rms_norm_cost(&args, &cost), VIVACE_INVALID_ARGUMENT,
              "weight.shape[0] is 1, needs hidden = 2");
  CHECK_FAILS(vivace_rms_norm_explain(&args, NULL, &json), VIVACE_INVALID_ARGUMENT,
              "weight.shape[0] is 1, needs hidden = 2");
}

static void test_refusals(void) {
  float x[4] = {3, 4, 0, 2}, weight[2] = {1, 2}, y[4] = {0};
  vivace_rms_norm_args args = rms_norm_of(x, weight, y);
  CHECK_FAILS(vivace_rms_norm(NULL, NULL), VIVACE_INVALID_ARGUMENT, "rms_norm: the arguments are null");
  args.weight.shape[0] = 1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT,
              "weight.shape[0] is 1, needs hidden = 2 (from x.shape[1])");
  args = rms_norm_of(x, weight, y);
  args.x.dtype = 99;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "x.dtype is 99");
  args.x.dtype = 256 + VIVACE_F32;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "x.dtype is 257");
  args.x.dtype = -1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "x.dtype is -1");
  args = rms_norm_of(x, weight, y);
  args.y.rank = 6;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y.rank is 6, needs 0 to 5");
  args.y.rank = -1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y.rank is -1");
  args = rms_norm_of(x, weight, y);
  args.y.device = 2;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y.device is 2");
  args.y.device = VIVACE_DEVICE_CUDA;
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_INVALID_ARGUMENT);
  args = rms_norm_of(x, weight, y);
  args.x.shape[0] = -1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "x.shape[0] is -1");
  args = rms_norm_of(x, weight, y);
  args.x.stride[0] = -2;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "x.stride[0] is -2");
  args = rms_norm_of(x, weight, y);
  args.x.shape[0] = args.x.shape[1] = INT64_C(1) << 40;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "more bytes than 62 bits can count");
  args = rms_norm_of(x, weight, y);
  args.x.stride[0] = INT64_C(1) << 61;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "more bytes than 62 bits can count");
  args = rms_norm_of(x, weight, y);
  args.y_scaling = 3;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "y_scaling is 3, needs 0 to 2");
  args.y_scaling = 0;
  args.eps = NAN;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "eps");
  args = rms_norm_of(x, weight, y);
  vivace_stream stream = {.device = 7};
  CHECK_FAILS(vivace_rms_norm(&args, &stream), VIVACE_INVALID_ARGUMENT, "stream.device is 7");
  stream = (vivace_stream){.reserved = 1};
  CHECK_FAILS(vivace_rms_norm(&args, &stream), VIVACE_INVALID_ARGUMENT, "stream.reserved is 1");
  stream = (vivace_stream){.device = VIVACE_DEVICE_CUDA, .ordinal = 4096};
  CHECK(vivace_rms_norm(&args, &stream) != VIVACE_OK); /* there is no such device, or no CUDA in this build */
}

/* Callers that were compiled with a shorter or a longer struct. */
static void test_other_sizes(void) {
  float x[4] = {3, 4, 0, 2}, weight[2] = {1, 2}, y[4] = {0};
  vivace_rms_norm_args args = rms_norm_of(x, weight, y);
  args.struct_bytes = offsetof(vivace_rms_norm_args, y_scale);
  args.eps = NAN; /* not looked at */
  CHECK(vivace_rms_norm(&args, NULL) == VIVACE_OK);
  struct {
    vivace_rms_norm_args known;
    int64_t later;
  } newer = {rms_norm_of(x, weight, y), 0};
  newer.known.struct_bytes = sizeof(newer);
  CHECK(vivace_rms_norm(&newer.known, NULL) == VIVACE_OK);
  newer.later = 1;
  CHECK_FAILS(vivace_rms_norm(&newer.known, NULL), VIVACE_UNSUPPORTED, "older than its caller");
  args.struct_bytes = 0;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "struct_bytes is 0");
  args.struct_bytes = (size_t)-1;
  CHECK_FAILS(vivace_rms_norm(&args, NULL), VIVACE_INVALID_ARGUMENT, "struct_bytes");
}

/* Every operator with nothing set: an error or an empty call, never a crash. */
#define CHECK_EMPTY(op)                                                                                   \
  do {                                                                                                    \
    vivace_##op##_args args = {.struct_bytes = sizeof(args)};                                             \
    vivace_cost cost = {-1, -1};                                                                          \
    const char* json = NULL;                                                                              \
    CHECK_FAILS(vivace_##op(&args, NULL), VIVACE_INVALID_ARGUMENT, #op ": ");                             \
    vivace_code code = vivace_##op##_cost(&args, &cost);                                                  \
    CHECK(code == VIVACE_INVALID_ARGUMENT || (code == VIVACE_OK && cost.bytes >= 0));                     \
    code = vivace_##op##_explain(&args, NULL, &json);                                                     \
    CHECK(code == VIVACE_INVALID_ARGUMENT || (code == VIVACE_OK && strncmp(json, "{\"row\": ", 8) == 0)); \
    CHECK(vivace_##op##_cost(&args, NULL) == VIVACE_INVALID_ARGUMENT);                                    \
    CHECK(vivace_##op##_explain(&args, NULL, NULL) == VIVACE_INVALID_ARGUMENT);                           \
  } while (0)
#define CHECK_EMPTY_WORKSPACE(op)                                                       \
  do {                                                                                  \
    vivace_##op##_args args = {.struct_bytes = sizeof(args)};                           \
    int64_t bytes = -1;                                                                 \
    const vivace_code code = vivace_##op##_workspace_bytes(&args, NULL, &bytes);        \
    CHECK(code != VIVACE_OK || bytes >= 0);                                             \
    CHECK(code != VIVACE_INTERNAL);                                                     \
    CHECK(vivace_##op##_workspace_bytes(&args, NULL, NULL) == VIVACE_INVALID_ARGUMENT); \
  } while (0)

static void test_empty_arguments(void) {
  CHECK_EMPTY(rms_norm);
  CHECK_EMPTY(linear);
  CHECK_EMPTY(embedding);
  CHECK_EMPTY(attention_prologue);
  CHECK_EMPTY(attention_prefill);
  CHECK_EMPTY(attention_decode);
  CHECK_EMPTY(decode_schedule);
  CHECK_EMPTY(router_gemm);
  CHECK_EMPTY(route_top_k);
  CHECK_EMPTY(choose_experts);
  CHECK_EMPTY(fused_moe);
  CHECK_EMPTY(grouped_gemm);
  CHECK_EMPTY(silu_mul);
  CHECK_EMPTY(quantize_fp8);
  CHECK_EMPTY(sampler);
  CHECK_EMPTY_WORKSPACE(linear);
  CHECK_EMPTY_WORKSPACE(attention_decode);
  CHECK_EMPTY_WORKSPACE(fused_moe);
  CHECK_EMPTY_WORKSPACE(sampler);
}

static void test_context(void) {
  vivace_context* context = NULL;
  const char* json = NULL;
  CHECK_FAILS(vivace_context_create(NULL, NULL), VIVACE_INVALID_ARGUMENT, "context is null");
  vivace_context_options options = {
      .struct_bytes = sizeof(options), .threads = 2, .prefer = "rms_norm=nothing"};
  CHECK_FAILS(vivace_context_create(&options, &context), VIVACE_NOT_FOUND,
              "vivace_context_create: prefer: rms_norm has no row 'nothing'");
  options.prefer = "rms_norm";
  CHECK_FAILS(vivace_context_create(&options, &context), VIVACE_INVALID_ARGUMENT, "OP=ROW");
  options.prefer = "rms_norm=reference";
  options.threads = -1;
  CHECK_FAILS(vivace_context_create(&options, &context), VIVACE_INVALID_ARGUMENT, "threads is -1");
  options.threads = 2;
  CHECK(vivace_context_create(&options, &context) == VIVACE_OK);
  CHECK(vivace_context_counts(context, &json) == VIVACE_OK && strcmp(json, "[]") == 0);

  float x[4] = {3, 4, 0, 2}, weight[2] = {1, 2}, y[4] = {0};
  const vivace_rms_norm_args args = rms_norm_of(x, weight, y);
  const vivace_stream stream = {.context = context};
  CHECK(vivace_rms_norm(&args, &stream) == VIVACE_OK);
  CHECK(vivace_rms_norm(&args, &stream) == VIVACE_OK);
  CHECK(vivace_context_counts(context, &json) == VIVACE_OK);
  CHECK(strcmp(json, "[{\"op\": \"rms_norm\", \"row\": \"reference\", \"calls\": 2}]") == 0);
  CHECK(vivace_rms_norm_explain(&args, &stream, &json) == VIVACE_OK &&
        strstr(json, "\"row\": \"reference\"") != NULL);
  CHECK(vivace_context_counts(NULL, &json) == VIVACE_INVALID_ARGUMENT);
  vivace_context_options sharing = {.struct_bytes = sizeof(sharing), .threads = 2, .threads_of = context};
  vivace_context* second = NULL;
  CHECK_FAILS(vivace_context_create(&sharing, &second), VIVACE_INVALID_ARGUMENT,
              "threads is 2 with threads_of");
  sharing.threads = 0;
  CHECK(vivace_context_create(&sharing, &second) == VIVACE_OK);
  vivace_context_destroy(context);
  const vivace_stream later = {.context = second};
  CHECK(vivace_rms_norm(&args, &later) == VIVACE_OK);
  CHECK(vivace_context_counts(second, &json) == VIVACE_OK && strstr(json, "\"calls\": 1") != NULL);
  vivace_context_destroy(second);
  vivace_context_destroy(NULL);
  CHECK(vivace_context_create(NULL, &context) == VIVACE_OK);
  vivace_context_destroy(context);
}

/* What would run on a GPU of 9.0, whether there is one or not. */
static void test_explain_for_another_machine(void) {
  vivace_rms_norm_args args = rms_norm_of(NULL, NULL, NULL);
  args.x.device = args.weight.device = args.y.device = VIVACE_DEVICE_CUDA;
  const vivace_stream stream = {.device = VIVACE_DEVICE_CUDA, .compute_capability = 90};
  const char* json = NULL;
  CHECK(vivace_rms_norm_explain(&args, &stream, &json) == VIVACE_OK);
  CHECK(strstr(json, "\"row\": \"cuda.") != NULL ||
        strstr(json, "\"row\": null") != NULL); /* null: built without CUDA */
  /* Without a stream: of the GPU where the tensors lie, if it is there. */
  args.x.ordinal = args.weight.ordinal = args.y.ordinal = 4096;
  vivace_cost cost;
  CHECK(vivace_rms_norm_cost(&args, &cost) == VIVACE_OK); /* the same wherever it runs */
  CHECK(vivace_rms_norm_explain(&args, &stream, &json) == VIVACE_OK);
  CHECK(vivace_rms_norm_explain(&args, NULL, &json) != VIVACE_OK);
  CHECK(strstr(vivace_last_error(), "rms_norm: stream is null, and x lies on a GPU: cuda:4096 ") != NULL);
  CHECK(strstr(vivace_last_error(), "; to ask about a GPU that is not here, give a stream with") != NULL);
  CHECK(strstr(vivace_last_error(), "compute_capability, such as 90") != NULL);
  const vivace_stream unknown = {.device = VIVACE_DEVICE_CUDA, .ordinal = 4096};
  CHECK(vivace_rms_norm_explain(&args, &unknown, &json) != VIVACE_OK);
  CHECK(strstr(vivace_last_error(), "rms_norm: cuda:4096 ") != NULL &&
        strstr(vivace_last_error(), "compute_capability, such as 90") != NULL);
  vivace_sampler_args sampling = {.struct_bytes = sizeof(sampling)};
  sampling.logits = TENSOR(NULL, VIVACE_F32, 2, 100);
  sampling.ids = TENSOR(NULL, VIVACE_I32, 2);
  sampling.valid = TENSOR(NULL, VIVACE_U8, 2);
  sampling.logits.device = sampling.ids.device = sampling.valid.device = VIVACE_DEVICE_CUDA;
  sampling.logits.ordinal = 4096;
  int64_t bytes = -1;
  CHECK(vivace_sampler_workspace_bytes(&sampling, &stream, &bytes) == VIVACE_OK && bytes >= 0);
  CHECK(vivace_sampler_workspace_bytes(&sampling, NULL, &bytes) != VIVACE_OK);
  CHECK(strstr(vivace_last_error(), "sampler: stream is null, and logits lies on a GPU: cuda:4096 ") != NULL);
  CHECK(vivace_operators(&json) == VIVACE_OK && strstr(json, "\"op\": \"sampler\"") != NULL);
  CHECK(vivace_build(&json) == VIVACE_OK && strstr(json, "\"version\": \"") != NULL);
  CHECK(vivace_operators(NULL) == VIVACE_INVALID_ARGUMENT);
  CHECK(vivace_build(NULL) == VIVACE_INVALID_ARGUMENT);
}

/* Two experts of one by one: y = w0 (silu(g0 x) u0 x) d0 + ..., by hand. */
static void test_fused_moe(void) {
  float x[2] = {1, 2}, gate_up[4] = {1, 2, -1, 0.5f}, down[2] = {3, 1}, weights[4] = {0.25f, 0.75f, 1, 0},
        y[2] = {0};
  int32_t ids[4] = {0, 1, 1, -1};
  vivace_fused_moe_args args = {.struct_bytes = sizeof(args)};
  args.x = TENSOR(x, VIVACE_F32, 2, 1);
  args.gate_up = TENSOR(gate_up, VIVACE_F32, 2, 2, 1);
  args.down = TENSOR(down, VIVACE_F32, 2, 1, 1);
  args.expert_ids = TENSOR(ids, VIVACE_I32, 2, 2);
  args.expert_weights = TENSOR(weights, VIVACE_F32, 2, 2);
  args.y = TENSOR(y, VIVACE_F32, 2, 1);
  int64_t bytes = -1;
  CHECK(vivace_fused_moe_workspace_bytes(&args, NULL, &bytes) == VIVACE_OK && bytes >= 0);
  void* scratch = malloc((size_t)bytes + 1);
  if (bytes > 0) {
    CHECK_FAILS(vivace_fused_moe(&args, NULL), VIVACE_INVALID_ARGUMENT, "workspace");
    args.workspace = TENSOR(scratch, VIVACE_U8, bytes);
  }
  const float e0 = 1 / (1 + expf(-1)) * 2 * 3, e1 = -1 / (1 + expf(1)) * 0.5f,
              e1_of_2 = -2 / (1 + expf(2)) * 1;
  const float expected[2] = {0.25f * e0 + 0.75f * e1, e1_of_2};
  CHECK(vivace_fused_moe(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[0] - expected[0]) < 1e-6f && fabsf(y[1] - expected[1]) < 1e-6f);

  /* Ids 4 and 5 of a slice, or by a map, and gpt-oss's gate: 2 at most 1.5, and 0.5 + 1. */
  int32_t slice[4] = {4, 5, 5, 3}, of_map[4] = {2, 0, 0, 1}, map[3] = {1, -1, 0};
  args.expert_ids = TENSOR(slice, VIVACE_I32, 2, 2);
  args.first_expert = 4;
  y[0] = y[1] = 0;
  CHECK(vivace_fused_moe(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[0] - expected[0]) < 1e-6f && fabsf(y[1] - expected[1]) < 1e-6f);
  args.expert_ids = TENSOR(of_map, VIVACE_I32, 2, 2);
  args.first_expert = 0;
  args.expert_map = TENSOR(map, VIVACE_I32, 3);
  args.swiglu_alpha = 1.702, args.swiglu_limit = 1.5, args.swiglu_beta = 1;
  CHECK(vivace_fused_moe(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[1] + 2 / (1 + expf(1.702f * 2)) * 2) < 1e-6f);
  args.swiglu_limit = -1;
  CHECK_FAILS(vivace_fused_moe(&args, NULL), VIVACE_INVALID_ARGUMENT,
              "swiglu.limit is -1, needs 1e-30 to 1e30, or infinity");
  args.swiglu_alpha = args.swiglu_limit = args.swiglu_beta = 0;
  args.expert_map = (vivace_tensor){0};
  args.expert_ids = TENSOR(ids, VIVACE_I32, 2, 2);

  vivace_expert_weights experts[2];
  memset(experts, 0, sizeof(experts));
  for (int e = 0; e < 2; ++e) {
    experts[e].gate = TENSOR(gate_up + 2 * e, VIVACE_F32, 1, 1);
    experts[e].up = TENSOR(gate_up + 2 * e + 1, VIVACE_F32, 1, 1);
    experts[e].down = TENSOR(down + e, VIVACE_F32, 1, 1);
  }
  args.gate_up = args.down = (vivace_tensor){0};
  args.experts = experts;
  args.expert_count = 2;
  y[0] = y[1] = 0;
  CHECK(vivace_fused_moe(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(y[0] - expected[0]) < 1e-6f && fabsf(y[1] - expected[1]) < 1e-6f);
  args.experts = NULL;
  CHECK_FAILS(vivace_fused_moe(&args, NULL), VIVACE_INVALID_ARGUMENT, "experts is null");
  args.expert_count = -1;
  CHECK_FAILS(vivace_fused_moe(&args, NULL), VIVACE_INVALID_ARGUMENT, "expert_count is -1");
  args.experts = experts;
  args.expert_count = 2;
  experts[1].up.dtype = 77;
  CHECK_FAILS(vivace_fused_moe(&args, NULL), VIVACE_INVALID_ARGUMENT, "experts[1].up.dtype is 77");
  free(scratch);
}

static void test_router(void) {
  float weight[4] = {1, 2, 0.1f, -3}, x[2] = {1, 10}, scores[2] = {0};
  uint16_t storage[12];
  vivace_router_weight_source source = {
      .struct_bytes = sizeof(source), .mode = VIVACE_ROUTER_EXACT, .version = 5};
  source.weight = TENSOR(weight, VIVACE_F32, 2, 2);
  int64_t bytes = 0;
  CHECK(vivace_router_weight_bytes(&source, &bytes) == VIVACE_OK && bytes == (int64_t)sizeof(storage));
  source.storage = TENSOR(storage, VIVACE_U8, bytes);
  vivace_router_gemm_args args = {.struct_bytes = sizeof(args), .current_version = 5};
  CHECK_FAILS(vivace_prepare_router_weight(&source, NULL), VIVACE_INVALID_ARGUMENT, "weight is null");
  CHECK(vivace_prepare_router_weight(&source, &args.weight) == VIVACE_OK);
  CHECK(args.weight.term_count >= 2 && args.weight.term_count <= 3 && args.weight.version == 5);
  args.x = TENSOR(x, VIVACE_F32, 1, 2);
  args.scores = TENSOR(scores, VIVACE_F32, 1, 2);
  CHECK(vivace_router_gemm(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(scores[0] - 21) < 1e-5f && fabsf(scores[1] + 29.9f) < 1e-5f);
  args.batch_invariant = args.weight_ready = 1;
  CHECK(vivace_router_gemm(&args, NULL) == VIVACE_OK);
  int32_t id[1] = {-1};
  float share[1] = {0}, scratch[32];
  vivace_choose_experts_args both = {
      .struct_bytes = sizeof(both), .x = args.x, .weight = args.weight, .current_version = 5, .scale = 2};
  both.renormalise = 1;
  both.expert_ids = TENSOR(id, VIVACE_I32, 1, 1);
  both.expert_weights = TENSOR(share, VIVACE_F32, 1, 1);
  CHECK(vivace_choose_experts_workspace_bytes(&both, NULL, &bytes) == VIVACE_OK && bytes == 8 + 63);
  CHECK_FAILS(vivace_choose_experts(&both, NULL), VIVACE_INVALID_ARGUMENT, "workspace");
  both.workspace = TENSOR(scratch, VIVACE_U8, bytes);
  CHECK(vivace_choose_experts(&both, NULL) == VIVACE_OK && id[0] == 0 && share[0] == 2);
  CHECK(args.weight.scaled == 0);
  weight[0] = 1e-36f; /* its terms would fall below the subnormals of bf16 */
  CHECK(vivace_prepare_router_weight(&source, &args.weight) == VIVACE_OK && args.weight.scaled == 1);
  CHECK(vivace_router_gemm(&args, NULL) == VIVACE_OK && fabsf(scores[0] - 20) < 1e-5f);
  args.current_version = 6;
  CHECK_FAILS(vivace_router_gemm(&args, NULL), VIVACE_INVALID_ARGUMENT, "version");
  args.weight.term_count = 4;
  CHECK_FAILS(vivace_router_gemm(&args, NULL), VIVACE_INVALID_ARGUMENT, "weight.term_count is 4");
}

/* One request of three keys, decoded through a schedule; attention over equal keys is the mean of the values. */
static void test_decode(void) {
  float q[1] = {1}, k[4] = {0, 0, 0, NAN}, v[4] = {1, 2, 6, NAN}, output[1] = {0};
  int32_t pages[1] = {0}, lengths[1] = {3}, start[2] = {0, 1};
  vivace_attention_decode_args args = {.struct_bytes = sizeof(args), .max_query_tokens = 1};
  args.attention.q = TENSOR(q, VIVACE_F32, 1, 1, 1);
  args.attention.k = TENSOR(k, VIVACE_F32, 1, 4, 1, 1);
  args.attention.v = TENSOR(v, VIVACE_F32, 1, 4, 1, 1);
  args.attention.page_table = TENSOR(pages, VIVACE_I32, 1, 1);
  args.attention.kv_lengths = TENSOR(lengths, VIVACE_I32, 1);
  args.attention.query_start = TENSOR(start, VIVACE_I32, 2);
  args.attention.output = TENSOR(output, VIVACE_F32, 1, 1, 1);
  CHECK(vivace_attention_decode_schedule_params(&args, NULL, NULL) == VIVACE_INVALID_ARGUMENT);
  CHECK(vivace_attention_decode_schedule_params(&args, NULL, &args.params) == VIVACE_OK);
  CHECK(args.params.heads_kv == 1 && args.params.workers >= 1);
  const int64_t ints = vivace_decode_schedule_ints(1, args.params.workers);
  int32_t* map = malloc((size_t)ints * sizeof(int32_t));
  vivace_decode_schedule_args schedule = {.struct_bytes = sizeof(schedule), .params = args.params};
  schedule.kv_lengths = args.attention.kv_lengths;
  schedule.query_start = args.attention.query_start;
  schedule.schedule = args.schedule = TENSOR(map, VIVACE_I32, ints);
  CHECK(vivace_decode_schedule(&schedule, NULL) == VIVACE_OK);
  int64_t bytes = 0;
  CHECK(vivace_attention_decode_workspace_bytes(&args, NULL, &bytes) == VIVACE_OK);
  void* scratch = malloc((size_t)bytes + 1);
  if (bytes > 0) args.workspace = TENSOR(scratch, VIVACE_U8, bytes);
  CHECK(vivace_attention_decode(&args, NULL) == VIVACE_OK);
  CHECK(fabsf(output[0] - 3) < 1e-6f);
  free(scratch);
  free(map);
}

/* Another thread's error is its own. */
static void* fail_elsewhere(void* unused) {
  (void)unused;
  if (vivace_last_error()[0] != '\0') return "a new thread begins with another's error";
  vivace_rms_norm(NULL, NULL);
  return strstr(vivace_last_error(), "rms_norm") != NULL ? NULL : "no message";
}

static void test_errors_of_threads(void) {
  vivace_silu_mul(NULL, NULL);
  pthread_t thread;
  void* problem = NULL;
  pthread_create(&thread, NULL, fail_elsewhere, NULL);
  pthread_join(thread, &problem);
  CHECK(problem == NULL);
  CHECK(strstr(vivace_last_error(), "silu_mul") != NULL);
}

/* Threads that share a context take turns. */
static void* norm_often(void* context) {
  float x[2 * 512], weight[512], y[2 * 512];
  for (int i = 0; i < 2 * 512; ++i) x[i] = (float)(i % 7);
  for (int i = 0; i < 512; ++i) weight[i] = 1;
  vivace_rms_norm_args args = {.struct_bytes = sizeof(args)};
  args.x = TENSOR(x, VIVACE_F32, 2, 512);
  args.weight = TENSOR(weight, VIVACE_F32, 512);
  args.y = TENSOR(y, VIVACE_F32, 2, 512);
  const vivace_stream stream = {.context = context};
  for (int i = 0; i < 200; ++i) {
    if (vivace_rms_norm(&args, &stream) != VIVACE_OK) return "a call failed";
  }
  return NULL;
}

static void test_shared_context(void) {
  vivace_context* context = NULL;
  vivace_context_options options = {.struct_bytes = sizeof(options), .threads = 2};
  CHECK(vivace_context_create(&options, &context) == VIVACE_OK);
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, norm_often, context);
  for (int i = 0; i < 4; ++i) {
    void* problem = NULL;
    pthread_join(threads[i], &problem);
    CHECK(problem == NULL);
  }
  const char* json = NULL;
  CHECK(vivace_context_counts(context, &json) == VIVACE_OK && strstr(json, "\"calls\": 800") != NULL);
  vivace_context_destroy(context);
}

int main(void) {
  test_versions();
  test_a_call();
  test_strides_that_mean_nothing();
  test_outputs_have_memory_of_their_own();
  test_questions_about_refused_calls();
  test_refusals();
  test_other_sizes();
  test_empty_arguments();
  test_context();
  test_explain_for_another_machine();
  test_fused_moe();
  test_router();
  test_decode();
  test_errors_of_threads();
  test_shared_context();
  if (failures == 0) printf("the C ABI: all tests passed\n");
  return failures == 0 ? 0 : 1;
}
