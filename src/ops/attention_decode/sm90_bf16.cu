#include "src/ops/attention_decode/sm90.cuh"

namespace vivace::attention_sm90 {

template Status launch_decode<bf16>(const Sm90Params&, bool, const Stream&);

}  // namespace vivace::attention_sm90
