#include "bench/op_bench.h"
#include "src/ops/sampler/cases.h"
#include "src/ops/sampler/table.h"

VIVACE_OP_BENCH(kSampler, sampler_cases, SamplerProblem);
