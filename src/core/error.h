#pragma once

#ifndef __CUDACC__  // fmt 9 does not compile under nvcc; kernels' files only pass a Status on
#include <fmt/format.h>
#endif

#include <utility>

#include "vivace/status.h"

// Errors with a formatted message. The message starts with the place and names the argument, its value and
// what fits.

#ifndef __CUDACC__

namespace vivace {

template <class... Args>
Status error(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
Status invalid_argument(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::invalid_argument, format, std::forward<Args>(args)...);
}

template <class... Args>
Status unsupported(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::unsupported, format, std::forward<Args>(args)...);
}

template <class... Args>
Status not_found(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::not_found, format, std::forward<Args>(args)...);
}

template <class... Args>
Status io_error(fmt::format_string<Args...> format, Args&&... args) {
  return error(Code::io_error, format, std::forward<Args>(args)...);
}

}  // namespace vivace

#endif
