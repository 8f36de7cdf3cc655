#include "src/core/checks.h"

#include <cassert>
#include <charconv>

#include "src/core/error.h"
#include "src/core/overlap.h"
#include "vivace/dispatch.h"

namespace vivace {

namespace {

/// Names of dimensions are literals, of which most are one in the program.
bool same_name(std::string_view a, std::string_view b) {
  return a.size() == b.size() && (a.data() == b.data() || (a.back() == b.back() && a == b));
}

}  // namespace

Checker& Checker::tensor(std::string_view name, const Tensor& tensor,
                         std::initializer_list<std::string_view> dims) {
  if (!ok()) return *this;
  const int rank = static_cast<int>(dims.size());
  if (!tensor.present()) {
    status_ = invalid_argument("{}: {} is absent, needs a tensor of {} dimension{}", op_, name, rank,
                               rank == 1 ? "" : "s");
    return *this;
  }
  if (tensor.rank != rank) {
    status_ = invalid_argument("{}: {} is {}, needs {} dimension{}", op_, name, to_string(tensor), rank,
                               rank == 1 ? "" : "s");
    return *this;
  }
  if (tensor.device != device_) {
    status_ = invalid_argument("{}: {} is on {}, needs {} (the stream's device)", op_, name,
                               name_of(tensor.device), name_of(device_));
    return *this;
  }
  const int64_t block = info_of(tensor.dtype).block_elements;
  for (int axis = 0; axis < rank && ok(); ++axis) {
    const int64_t extent = tensor.shape[axis], stride = tensor.stride[axis];
    if (extent < 0 || stride < 0) {
      status_ = invalid_argument("{}: {}.shape[{}] is {} with stride {}, needs both >= 0", op_, name, axis,
                                 extent, stride);
    } else if (axis == rank - 1 && stride != 1 && extent > 1) {
      status_ = invalid_argument("{}: {}.stride[{}] is {}, needs 1 (the last dimension is contiguous)", op_,
                                 name, axis, stride);
    } else if (axis == rank - 1 && block > 1 && extent % block != 0) {
      status_ = invalid_argument("{}: {}.shape[{}] is {}, needs a multiple of {} for {}", op_, name, axis,
                                 extent, block, name_of(tensor.dtype));
    } else if (axis < rank - 1 && block > 1 && stride % block != 0) {
      status_ = invalid_argument("{}: {}.stride[{}] is {}, needs a multiple of {} for {}", op_, name, axis,
                                 stride, block, name_of(tensor.dtype));
    }
  }
  int axis = 0;
  for (std::string_view dim : dims) {
    if (!ok()) return *this;
    agree(name, axis, tensor.shape[axis], dim);
    ++axis;
  }
  if (ok() && pointers_ && tensor.data == nullptr && tensor.elements() != 0) {
    status_ = invalid_argument("{}: {} is a null pointer, needs {} elements", op_, name, tensor.elements());
  }
  return *this;
}

Checker& Checker::optional(std::string_view name, const Tensor& tensor,
                           std::initializer_list<std::string_view> dims) {
  return tensor.present() ? this->tensor(name, tensor, dims) : *this;
}

Checker& Checker::given(std::string_view name, const Tensor& tensor, bool wanted, std::string_view needs) {
  if (ok() && tensor.present() != wanted)
    status_ = invalid_argument("{}: {} is {}, needs {}", op_, name, to_string(tensor), needs);
  return *this;
}

Checker& Checker::dtype(std::string_view name, const Tensor& tensor, int64_t dtypes_mask) {
  if (!ok() || !tensor.present()) return *this;
  const int64_t type = static_cast<int64_t>(tensor.dtype);
  const Need need{name, Need::dtype_in, dtypes_mask};
  if ((dtypes_mask >> type & 1) == 0) status_ = invalid_argument("{}: {}", op_, describe(need, &type));
  return *this;
}

Checker& Checker::dense(std::string_view name, const Tensor& tensor) {
  if (!ok() || !tensor.present() || tensor.contiguous()) return *this;
  status_ = invalid_argument("{}: {} is {}, needs a contiguous tensor", op_, name, to_string(tensor));
  return *this;
}

Checker& Checker::written(std::string_view name, const Tensor& tensor) {
  if (!ok() || !tensor.present()) return *this;
  if (const auto shared = overlaps_itself(tensor)) {
    status_ = invalid_argument(
        "{}: {} is {}, needs stride[{}] >= {}: elements that are written have memory of their own", op_, name,
        to_string(tensor), shared->axis, shared->least);
  }
  return *this;
}

Checker& Checker::define(std::string_view dim, int64_t value, std::string_view source) {
  if (!ok()) return *this;
  agree(source, -1, value, dim);
  return *this;
}

Checker& Checker::that(bool fits, std::string_view name, double value, std::string_view needs) {
  if (ok() && !fits) status_ = invalid_argument("{}: {} is {}, needs {}", op_, name, value, needs);
  return *this;
}

int64_t Checker::operator[](std::string_view dim) const {
  for (int i = 0; i < count_; ++i)
    if (same_name(dims_[i].name, dim)) return dims_[i].value;
  return 0;
}

void Checker::agree(std::string_view tensor, int axis, int64_t extent, std::string_view dim) {
  const auto place = [&] {
    return axis < 0 ? std::string(tensor) : fmt::format("{}.shape[{}]", tensor, axis);
  };
  if (dim.front() >= '0' && dim.front() <= '9') {
    int64_t fixed = 0;
    std::from_chars(dim.data(), dim.data() + dim.size(), fixed);
    if (extent != fixed) status_ = invalid_argument("{}: {} is {}, needs {}", op_, place(), extent, fixed);
    return;
  }
  for (int i = 0; i < count_; ++i) {
    const Dim& known = dims_[i];
    if (!same_name(known.name, dim)) continue;
    if (known.value == extent) return;
    const std::string source =
        known.axis < 0 ? std::string(known.tensor) : fmt::format("{}.shape[{}]", known.tensor, known.axis);
    status_ = invalid_argument("{}: {} is {}, needs {} = {} (from {})", op_, place(), extent, dim,
                               known.value, source);
    return;
  }
  assert(count_ < static_cast<int>(dims_.size()));
  dims_[count_++] = {dim, extent, tensor, axis};
}

}  // namespace vivace
