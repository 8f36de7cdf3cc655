#pragma once

namespace vivace {

/// Whether cuBLASLt can be used: the program was built with its header and the library was found. It is opened on the
/// first call and stays open; any thread may ask.
bool cublaslt_found();

}  // namespace vivace
