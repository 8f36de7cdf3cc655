#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace vivace {

/// Why a call failed. The numbers are part of the C ABI and never change.
enum class Code : int32_t {
  ok = 0,
  invalid_argument = 1,    ///< the caller's value is wrong; the message names it and what would fit
  unsupported = 2,         ///< the value is meaningful, but nothing here can do it
  not_found = 3,           ///< a file, tensor, row or option of that name does not exist
  io_error = 4,            ///< the operating system refused a read, write or map
  out_of_memory = 5,       ///< host or device memory is exhausted
  resource_exhausted = 6,  ///< a queue or pool is full; the same call may succeed later
  cancelled = 7,           ///< the caller cancelled the request
  device_error = 8,        ///< a launch or the device failed
  internal = 9,            ///< a defect of this library
};

/// "ok", "invalid_argument", ...
std::string_view name_of(Code code);

/// Success, or a code and a message. Success is a null pointer, so returning it is free.
/// A message is one sentence that starts with the place ("rms_norm: ", "config.json: ") and names the
/// argument, its value and what would fit.
class Status {
 public:
  Status() = default;
  Status(Code code, std::string message);

  Status(const Status& other);
  Status& operator=(const Status& other);
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;

  bool ok() const { return error_ == nullptr; }
  Code code() const { return error_ ? error_->code : Code::ok; }
  const std::string& message() const;

  /// The same error with `place` and ": " in front of the message; success stays success.
  Status at(std::string_view place) const;

 private:
  struct Error {
    Code code;
    std::string message;
  };
  std::unique_ptr<Error> error_;
};

/// A value, or the Status that says why there is none.
template <class T>
class Result {
 public:
  Result(T value) : value_(std::make_unique<T>(std::move(value))) {}  // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {                // NOLINT: implicit on purpose
    if (status_.ok()) status_ = Status(Code::internal, "a Result was made from a successful Status");
  }

  bool ok() const { return value_ != nullptr; }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return value_.get(); }
  const T* operator->() const { return value_.get(); }

 private:
  std::unique_ptr<T> value_;
  Status status_;
};

}  // namespace vivace

/// Returns from the enclosing function when `expression` (a Status) is an error.
#define VIVACE_TRY(expression)                                                              \
  do {                                                                                      \
    if (::vivace::Status vivace_try_ = (expression); !vivace_try_.ok()) return vivace_try_; \
  } while (0)

/// Declares or assigns `target` from `expression` (a Result), or returns its error from the
/// enclosing function.
#define VIVACE_TRY_ASSIGN(target, expression) \
  VIVACE_TRY_ASSIGN_(target, expression, VIVACE_JOIN_(vivace_result_, __LINE__))
#define VIVACE_TRY_ASSIGN_(target, expression, name) \
  auto name = (expression);                          \
  if (!name.ok()) return name.status();              \
  target = std::move(name).value()
#define VIVACE_JOIN_(a, b) VIVACE_JOIN2_(a, b)
#define VIVACE_JOIN2_(a, b) a##b
