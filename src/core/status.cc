#include "vivace/status.h"

namespace vivace {

std::string_view name_of(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::invalid_argument:
      return "invalid_argument";
    case Code::unsupported:
      return "unsupported";
    case Code::not_found:
      return "not_found";
    case Code::io_error:
      return "io_error";
    case Code::out_of_memory:
      return "out_of_memory";
    case Code::resource_exhausted:
      return "resource_exhausted";
    case Code::cancelled:
      return "cancelled";
    case Code::device_error:
      return "device_error";
    case Code::internal:
      return "internal";
  }
  return "unknown";
}

Status::Status(Code code, std::string message) {
  if (code != Code::ok) error_ = std::make_unique<Error>(Error{code, std::move(message)});
}

Status::Status(const Status& other) {
  if (other.error_) error_ = std::make_unique<Error>(*other.error_);
}

Status& Status::operator=(const Status& other) {
  if (this != &other) error_ = other.error_ ? std::make_unique<Error>(*other.error_) : nullptr;
  return *this;
}

const std::string& Status::message() const {
  static const std::string none;
  return error_ ? error_->message : none;
}

Status Status::at(std::string_view place) const {
  if (ok()) return {};
  return Status(code(), std::string(place) + ": " + message());
}

}  // namespace vivace
