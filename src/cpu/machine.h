#pragma once

#include <cstdint>

namespace vivace::cpu {

/// Cores that this process may use (its affinity mask); at least 1.
int usable_cores();

/// Memory that can be taken without swapping: the system's estimate, or what a container's limit leaves when that is
/// less; 0 when the system does not say.
int64_t available_memory_bytes();

}  // namespace vivace::cpu
