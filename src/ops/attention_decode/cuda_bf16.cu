#include "src/ops/attention_decode/cuda.cuh"

namespace vivace::attention_mma {

template Status launch_decode<bf16>(const DecodeParams&, int64_t, const Stream&);

}  // namespace vivace::attention_mma
