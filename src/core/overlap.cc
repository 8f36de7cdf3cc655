#include "src/core/overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace vivace {

namespace {

struct Dim {
  int64_t extent, step;  ///< in bytes
};

/// A view as runs of `width` bytes: `outer` has the dimensions along which they repeat, the smallest step first, as few as there can be.
struct Runs {
  uintptr_t begin;
  int64_t width;
  int64_t reach;  ///< from the first byte to the one after the last
  std::array<Dim, Tensor::kMaxRank> outer;
  size_t count = 0;
};

Runs runs_of(const Tensor& t) {
  const DTypeInfo type = info_of(t.dtype);
  Runs runs{.begin = reinterpret_cast<uintptr_t>(t.data), .width = type.block_bytes, .reach = 0, .outer = {}};
  for (int i = 0; i < t.rank; ++i) {
    const bool last = i == t.rank - 1;
    const int64_t extent = last ? t.shape[i] / type.block_elements : t.shape[i];
    const int64_t step = t.stride[i] * type.block_bytes / (last ? 1 : type.block_elements);
    if (extent <= 1 || step == 0) continue;
    size_t place = runs.count++;
    for (; place > 0 && runs.outer[place - 1].step > step; --place) runs.outer[place] = runs.outer[place - 1];
    runs.outer[place] = {extent, step};
  }
  // What goes on where the dimension below it ends is part of that.
  size_t kept = 0;
  runs.reach = runs.width;
  for (size_t i = 0; i < runs.count; ++i) {
    const Dim dim = runs.outer[i];
    runs.reach += (dim.extent - 1) * dim.step;
    if (kept == 0 && dim.step <= runs.width) {
      runs.width = runs.reach;
    } else if (kept > 0 && dim.step == runs.outer[kept - 1].extent * runs.outer[kept - 1].step) {
      runs.outer[kept - 1].extent *= dim.extent;
    } else {
      runs.outer[kept++] = dim;
    }
  }
  runs.count = kept;
  return runs;
}

/// Whether runs of `a` and `b` meet that have `steps` of one length between their beginnings, low <= steps <= high; `between` from the
/// first run of a to that of b.
bool runs_meet(int64_t between, int64_t step, int64_t low, int64_t high, int64_t a_width, int64_t b_width) {
  const int64_t nearest = std::clamp(-between / step, low, high);
  for (int64_t steps = std::max(nearest - 1, low); steps <= std::min(nearest + 1, high); ++steps) {
    const int64_t distance = between + steps * step;
    if (distance > -b_width && distance < a_width) return true;
  }
  return false;
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) {
  if (!a.present() || !b.present() || a.device != b.device) return false;
  if (a.data == nullptr || b.data == nullptr || a.elements() == 0 || b.elements() == 0) return false;
  const Runs x = runs_of(a), y = runs_of(b);
  const auto between = static_cast<int64_t>(y.begin - x.begin);
  if (between >= x.reach || -between >= y.reach) return false;
  if (x.count == 0 && y.count == 0) return true;
  if (x.count <= 1 && y.count <= 1) {
    const Dim p = x.outer[0], q = y.outer[0];
    if (x.count == 0) return runs_meet(between, q.step, 0, q.extent - 1, x.width, y.width);
    if (y.count == 0) return runs_meet(between, p.step, 1 - p.extent, 0, x.width, y.width);
    if (p.step == q.step) return runs_meet(between, p.step, 1 - p.extent, q.extent - 1, x.width, y.width);
  }
  return between == 0;
}

std::optional<ShortStride> overlaps_itself(const Tensor& tensor) {
  if (tensor.contiguous() || tensor.elements() == 0) return {};
  // A stride of 0 counts as the largest, so that what it lacks is the reach of all others.
  const auto step_of = [&](int axis) {
    return tensor.stride[axis] > 0 ? tensor.stride[axis] : std::numeric_limits<int64_t>::max();
  };
  std::array<int, Tensor::kMaxRank> axes;
  int count = 0;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] <= 1) continue;
    int place = count++;
    for (; place > 0 && step_of(axes[place - 1]) > step_of(axis); --place) axes[place] = axes[place - 1];
    axes[place] = axis;
  }
  int64_t reach = 1;  // elements from the first to the one after the last
  for (int i = 0; i < count; ++i) {
    const int64_t stride = tensor.stride[axes[i]];
    if (stride < reach) return ShortStride{axes[i], reach};
    int64_t further;
    if (__builtin_mul_overflow(tensor.shape[axes[i]] - 1, stride, &further) ||
        __builtin_add_overflow(reach, further, &reach))
      reach = std::numeric_limits<int64_t>::max();  // which no stride exceeds
  }
  return {};
}

}  // namespace vivace
