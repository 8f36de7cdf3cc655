#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>

#include "src/core/dispatch.h"

// Calls on a GPU that were found good, so that the next ones like them are not looked at again: for an operator whose checks take longer
// than all else that it does on the host.

namespace vivace {

/// What the checks of a call and the choice of its row depend on. Of an address that is how it is aligned and whether it is null: what
/// lies there, and what lay there before, is nothing to them. Equal forms have the same answer.
class CallForm {
 public:
  CallForm() {}  // NOLINT: words that are not there have no value
  CallForm& add(int64_t value) {
    assert(size_ < kMax);
    words_[size_++] = value;
    return *this;
  }
  CallForm& add(double value) { return add(std::bit_cast<int64_t>(value)); }
  CallForm& add(const Tensor& tensor) {
    constexpr uintptr_t kMostAligned = 256;  // that alignment_of() tells apart
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    const auto place = static_cast<int64_t>(address % kMostAligned + (address == 0 ? kMostAligned : 0));
    add(place << 48 | int64_t{static_cast<uint8_t>(tensor.dtype)} << 40 |
        int64_t{static_cast<uint8_t>(tensor.device)} << 32 | int64_t{static_cast<uint32_t>(tensor.rank)});
    for (int i = 0; i < std::min(tensor.rank, Tensor::kMaxRank); ++i)
      add(tensor.shape[i]).add(tensor.stride[i]);
    return *this;
  }

  CallForm(const CallForm& other) { *this = other; }  // NOLINT: the words that are there
  CallForm& operator=(const CallForm& other) {
    size_ = other.size_;
    std::copy_n(other.words_.begin(), size_, words_.begin());
    return *this;
  }
  bool operator==(const CallForm& other) const {
    return size_ == other.size_ && std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
  }

 private:
  static constexpr int kMax = 192;
  std::array<int64_t, kMax> words_;
  int size_ = 0;
};

/// The last few forms of good calls, and their rows. Of one thread.
template <class Args>
class KnownCalls {
 public:
  /// Whether calls on this stream may be known: those that look at no memory and have no preference, which may change.
  static bool may_know(const Stream& stream) {
    return stream.device == Device::cuda && !stream.check_only &&
           (stream.dispatch == nullptr || stream.dispatch->preferences().empty());
  }
  /// Null: not known.
  const Row<Args>* find(const CallForm& form) const {
    for (const Known& known : known_)
      if (known.row != nullptr && known.form == form) return known.row;
    return nullptr;
  }
  void add(const CallForm& form, const Row<Args>& row) {
    known_[next_] = {form, &row};
    next_ = (next_ + 1) % known_.size();
  }

 private:
  struct Known {
    CallForm form;
    const Row<Args>* row = nullptr;
  };
  std::array<Known, 4> known_;  ///< layers of a model have one or two forms
  size_t next_ = 0;
};

}  // namespace vivace
