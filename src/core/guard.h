#pragma once

#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "src/core/error.h"

// Exceptions of the standard library end where a Status is promised.

namespace vivace {

/// The exception in flight as an error whose message starts with `place`: std::bad_alloc is out_of_memory, anything
/// else internal. To be called in a handler. Throws std::bad_alloc when there is no memory for the message.
inline Status status_of_exception(std::string_view place) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return error(Code::out_of_memory, "{}: memory is exhausted", place);
  } catch (const std::exception& failure) {
    return error(Code::internal, "{}: {}", place, failure.what());
  } catch (...) {
    return error(Code::internal, "{}: an exception of unknown type", place);
  }
}

/// What `body` returns (a Status or a Result); an exception becomes the error above.
template <class Body>
auto guarded(std::string_view place, Body&& body) -> decltype(body()) {
  try {
    return std::forward<Body>(body)();
  } catch (...) {
    return status_of_exception(place);
  }
}

}  // namespace vivace
