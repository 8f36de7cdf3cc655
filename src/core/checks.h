#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// Checks the tensors of one call. Dimensions have names while they are checked: the first tensor that uses a
/// name defines it, the next must agree, and the message says where the expectation came from:
///   rms_norm: weight.shape[0] is 4096, needs hidden = 7168 (from x.shape[1])
/// The first failure wins; later checks do nothing.
class Checker {
 public:
  Checker(std::string_view op, Device device) : op_(op), device_(device) {}
  /// Of a call on this stream; with check_only pointers may be null.
  Checker(std::string_view op, const Stream& stream)
      : op_(op), device_(stream.device), pointers_(!stream.check_only) {}

  /// A present tensor of this shape on the call's device. A dimension is a name, or a number in text ("2") for a fixed extent. The
  /// last dimension must be contiguous, strides must not be negative, and a null pointer is legal only
  /// without elements.
  Checker& tensor(std::string_view name, const Tensor& tensor, std::initializer_list<std::string_view> dims);
  /// The same, or absent.
  Checker& optional(std::string_view name, const Tensor& tensor,
                    std::initializer_list<std::string_view> dims);
  /// It is there exactly when `wanted`; `needs` completes "NAME is absent, needs ..." or "NAME is f32[4], needs ...".
  Checker& given(std::string_view name, const Tensor& tensor, bool wanted, std::string_view needs);
  Checker& dtype(std::string_view name, const Tensor& tensor, int64_t dtypes_mask);
  /// The whole tensor is dense, not only its last dimension.
  Checker& dense(std::string_view name, const Tensor& tensor);
  /// The call writes it: each element has memory of its own. For every output, also what is updated in place; an input may repeat itself.
  Checker& written(std::string_view name, const Tensor& tensor);
  /// Gives a name to a number that comes from elsewhere, such as a scalar argument.
  Checker& define(std::string_view dim, int64_t value, std::string_view source);
  /// `fits` is a condition about argument `name`; `needs` completes "NAME is VALUE, needs ...".
  Checker& that(bool fits, std::string_view name, double value, std::string_view needs);

  /// The value of a named dimension; 0 if no tensor defined it.
  int64_t operator[](std::string_view dim) const;
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  void agree(std::string_view tensor, int axis, int64_t extent, std::string_view dim);

  struct Dim {
    std::string_view name;
    int64_t value;
    std::string_view tensor;
    int axis;
  };
  std::string_view op_;
  Device device_;
  bool pointers_ = true;
  Status status_;
  std::array<Dim, 24> dims_;
  int count_ = 0;
};

}  // namespace vivace
