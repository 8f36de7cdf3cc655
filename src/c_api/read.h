#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "vivace/attention_decode.h"
#include "vivace/attention_prefill.h"
#include "vivace/attention_prologue.h"
#include "vivace/c_api.h"
#include "vivace/choose_experts.h"
#include "vivace/decode_schedule.h"
#include "vivace/embedding.h"
#include "vivace/fused_moe.h"
#include "vivace/grouped_gemm.h"
#include "vivace/linear.h"
#include "vivace/quantize_fp8.h"
#include "vivace/rms_norm.h"
#include "vivace/route_top_k.h"
#include "vivace/router_gemm.h"
#include "vivace/sampler.h"
#include "vivace/silu_mul.h"
#include "vivace/status.h"

// From the structs of C to those of C++. Nothing of C is trusted: types, ranks, extents and enumerators are checked here, the
// rest by the operators.

namespace vivace::c_api {

/// Reads the arguments of one call. The first thing that does not fit is remembered, and later ones are not looked at.
class Reader {
 public:
  /// `ordinal` is where tensors of a GPU have to lie; -1: anywhere.
  Reader(std::string_view place, int ordinal) : place_(place), ordinal_(ordinal) {}

  Tensor tensor(std::string_view name, const vivace_tensor& from);
  /// One that the call writes; it may be `itself` or `or_itself`, element for element.
  Tensor output(std::string_view name, const vivace_tensor& from, std::string_view itself = {},
                std::string_view or_itself = {});
  /// An enumerator from 0 to `last`.
  template <class Enum>
  Enum one_of(std::string_view name, int64_t value, Enum last) {
    return static_cast<Enum>(number(name, value, 0, static_cast<int64_t>(last)));
  }
  /// `value`, if it is from `low` to `high`; else `low`.
  int64_t number(std::string_view name, int64_t value, int64_t low, int64_t high);
  ExpertWeights expert(std::string_view name, const vivace_expert_weights& from);
  /// Experts one by one; they live as long as the Reader.
  std::span<const ExpertWeights> experts(const vivace_expert_weights* from, int64_t count);

  const Status& status() const { return status_; }
  /// A tensor that was read, and its name.
  struct Named {
    std::string_view name;
    const vivace_tensor* tensor;  ///< null: there is none
  };
  /// The first.
  Named first() const { return count_ > 0 ? Named{places_[0].seen.name, places_[0].seen.from} : Named{}; }
  /// invalid_argument where an output shares memory with another argument, as far as overlap() knows. Experts given one by one are not
  /// looked at.
  Status apart() const;

 private:
  /// A tensor that was read, and the bytes between its first and its last.
  struct Seen {
    std::string_view name, itself, or_itself;
    const vivace_tensor* from;
    uintptr_t begin, end;
    bool written = false;
  };

  /// Makes `tensor` what `from` is. False: it is absent, or something was wrong.
  bool read(std::string_view name, const vivace_tensor& from, Tensor& tensor);
  void check_kind(std::string_view name, const vivace_tensor& from);
  void check_dimensions(std::string_view name, const vivace_tensor& from);
  /// Null: there is no place left.
  Seen* remember(std::string_view name, const vivace_tensor& from, const Tensor& tensor);
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  std::string_view place_;
  int ordinal_;
  Status status_;
  std::vector<ExpertWeights> experts_;
  /// Nothing is written to it until it is used.
  union Place {
    Place() {}
    Seen seen;
  };
  std::array<Place, 32> places_;  ///< more than any operator has
  size_t count_ = 0;
};

RmsNormArgs read(Reader& reader, const vivace_rms_norm_args& from);
LinearArgs read(Reader& reader, const vivace_linear_args& from);
EmbeddingArgs read(Reader& reader, const vivace_embedding_args& from);
AttentionPrologueArgs read(Reader& reader, const vivace_attention_prologue_args& from);
AttentionPrefillArgs read(Reader& reader, const vivace_attention_prefill_args& from);
AttentionDecodeArgs read(Reader& reader, const vivace_attention_decode_args& from);
DecodeScheduleArgs read(Reader& reader, const vivace_decode_schedule_args& from);
RouterWeightSource read(Reader& reader, const vivace_router_weight_source& from);
RouterGemmArgs read(Reader& reader, const vivace_router_gemm_args& from);
RouteTopKArgs read(Reader& reader, const vivace_route_top_k_args& from);
ChooseExpertsArgs read(Reader& reader, const vivace_choose_experts_args& from);
FusedMoeArgs read(Reader& reader, const vivace_fused_moe_args& from);
GroupedGemmArgs read(Reader& reader, const vivace_grouped_gemm_args& from);
SiluMulArgs read(Reader& reader, const vivace_silu_mul_args& from);
QuantizeFp8Args read(Reader& reader, const vivace_quantize_fp8_args& from);
SamplerArgs read(Reader& reader, const vivace_sampler_args& from);

vivace_tensor written(const Tensor& tensor, int ordinal);

/// The struct that `given` points to as this library knows it: itself, or `copy` filled from what an older or newer caller has.
Status same_struct(std::string_view place, const void* given, void* copy, size_t bytes, const void*& current);

template <class Args>
Status current_args(std::string_view place, const Args* given, Args& copy, const Args*& current) {
  const void* found = nullptr;
  VIVACE_TRY(same_struct(place, given, &copy, sizeof(Args), found));
  current = static_cast<const Args*>(found);
  return {};
}

}  // namespace vivace::c_api
