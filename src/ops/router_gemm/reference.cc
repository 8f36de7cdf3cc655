#include "src/core/number.h"
#include "src/ops/router_gemm/table.h"

namespace vivace {

Status router_gemm_reference(const RouterGemmArgs& args, const Stream&) {
  const int64_t hidden = args.x.shape[1], experts = args.scores.shape[1];
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor x = args.x.at(t), scores = args.scores.at(t);
    for (int64_t e = 0; e < experts; ++e) {
      double sum = args.bias.present() ? double{load(DType::f32, args.bias.data, e)} : 0.0;
      for (int i = 0; i < args.weight.term_count; ++i) {
        const Tensor term = args.weight.terms[i].at(e);
        double products = 0;
        for (int64_t k = 0; k < hidden; ++k) {
          products += double{load(x.dtype, x.data, k)} * load(DType::bf16, term.data, k);
        }
        sum += router_term_scale(args.weight, i) * products;
      }
      store(scores.dtype, scores.data, e, sum);
    }
  }
  return {};
}

}  // namespace vivace
