#include "src/ops/attention_prefill/cuda.cuh"

namespace vivace::attention_mma {

template Status launch_prefill<f16>(const PrefillParams&, int64_t, const Stream&);

}  // namespace vivace::attention_mma
