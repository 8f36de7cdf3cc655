#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// How much of a router weight is kept.
enum class RouterMode : uint8_t {
  two_term,  ///< two bf16 terms: every finite weight within 2^-16 of its magnitude
  exact,     ///< as many bf16 terms as the weight needs (at most three): equal to the fp32 weight
};

/// A router weight as a sum of bf16 terms, made once by prepare_router_weight. A view: the caller owns the
/// memory behind it.
///   weight = terms[0] + terms[1] + terms[2]                  usually
///   weight = terms[0] + terms[1] / 256 + terms[2] / 65536    when `scaled`
/// A trailing term that is zero everywhere is dropped in any mode; the scores of finite activations are the
/// same.
struct RouterWeight {
  static constexpr int kMaxTerms = 3;
  Tensor terms[kMaxTerms];  ///< bf16 [experts, hidden]
  int term_count = 0;
  bool scaled = false;  ///< some weight lies in (0, 2^-110): small terms would fall below bf16's subnormals
  RouterMode mode = RouterMode::exact;
  uint64_t version = 0;  ///< of the weight it was made from
};

struct RouterWeightSource {
  Tensor weight;  ///< f32, f16 or bf16 [experts, hidden]
  RouterMode mode = RouterMode::exact;
  uint64_t version = 0;  ///< the caller's number for these contents; raised when the weight changes
  Tensor storage;        ///< u8 [>= router_weight_bytes()], 2-byte aligned; absent when that is 0
};

/// Bytes of storage that the terms may need: 0 for a bf16 weight, which is its own only term.
int64_t router_weight_bytes(const RouterWeightSource& source);

/// Splits a weight into its terms. terms[0] is the weight rounded to nearest even, terms[1] is what is left,
/// rounded the same way, terms[2] what is then left. An infinity or NaN stands in terms[0] alone.
///
/// Cost     one pass over the weight; synchronous; for load time.
/// Fails    invalid_argument: a shape or type disagrees, or the storage is too small.
Result<RouterWeight> prepare_router_weight(const RouterWeightSource& source);

struct RouterGemmArgs {
  Tensor x;
  RouterWeight weight;
  uint64_t weight_version = 0;  ///< of the weight as it is now
  Tensor bias;                  ///< optional
  Tensor scores;
  bool batch_invariant = false;  ///< a token's bits must not depend on how many tokens there are
  /// On a GPU: no kernel that is still under way on the stream writes the terms of the weight, so that they may be loaded
  /// before it ends; attention_decode.h says which may be (old_keys_ready).
  bool weight_ready = false;
};

/// scores = x · weightᵀ (+ bias): the logits of a mixture-of-experts router.
///
/// Shapes   x [tokens, hidden]; weight terms [experts, hidden]; bias [experts]; scores [tokens, experts].
///          Rows may be strided; any sizes.
/// Types    x and scores f32 or bf16 each; bias f32. Store scores as f32 unless a comparison asks for bf16: a
///          bf16 logit changes the chosen experts of a few tokens in a hundred.
/// Exact    against float64 on the weight that the terms represent: fp32 accuracy, see src/ops/router_gemm/.
///          A row of x that holds a non-finite number has undefined, possibly non-finite scores.
/// Cost     router_gemm_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a row does not depend on what the rows beside it hold, nor, on the CPU and with
///          batch_invariant, on their number.
/// Fails    invalid_argument: a shape, stride or type disagrees, the weight was not prepared, or
///          weight_version is not the version it was prepared from (stale). unsupported: no row fits.
/// Source   src/ops/router_gemm/
Status router_gemm(const RouterGemmArgs& args, const Stream& stream);
Cost router_gemm_cost(const RouterGemmArgs& args);
Choice router_gemm_explain(const RouterGemmArgs& args, const Stream& stream);

}  // namespace vivace
