#pragma once

#include <string>
#include <vector>

namespace vivace {

/// Whether cuBLASLt can be used: the program was built with its header and the library was found. It is opened on the
/// first call and stays open; any thread may ask.
bool cublaslt_found();
/// Where it is looked for, in order; the loader's own paths first. Empty where the program was built without
/// its header.
std::vector<std::string> cublaslt_names();

}  // namespace vivace
