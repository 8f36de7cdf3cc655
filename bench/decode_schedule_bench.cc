#include "bench/op_bench.h"
#include "src/ops/decode_schedule/cases.h"
#include "src/ops/decode_schedule/table.h"

VIVACE_OP_BENCH(kDecodeSchedule, decode_schedule_cases, DecodeScheduleProblem);
