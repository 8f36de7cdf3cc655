#include "src/ops/attention_prefill/sm90.cuh"

namespace vivace::prefill_sm90 {

template Status launch_prefill<fp8>(const Sm90Params&, int64_t, const Stream&);

}  // namespace vivace::prefill_sm90
