#pragma once

namespace vivace::gemm {

inline constexpr int kMostGroups = 1024;  ///< of run_sm90: their list is in shared memory

}  // namespace vivace::gemm
