#include <cmath>

#include "src/core/checks.h"
#include "src/core/number.h"
#include "src/ops/router_gemm/table.h"

namespace vivace {

namespace {

/// How many terms a weight of this type may need.
int terms_of(const RouterWeightSource& source) {
  if (source.weight.dtype == DType::bf16) return 1;
  if (source.weight.dtype == DType::f16) return 2;  // 11 significant bits; a term has 8
  return source.mode == RouterMode::exact ? 3 : 2;
}

/// Nearest bf16; toward zero where the nearest is infinity, so that what is left stays finite.
uint16_t nearest_finite_bf16(float value) {
  const uint16_t bits = f32_to_bf16(value);
  const bool overflow = (bits & 0x7fffu) == 0x7f80u && std::isfinite(value);
  return overflow ? static_cast<uint16_t>(bits - 1) : bits;
}

/// Whether the terms need their scales: the last bit of a weight below this, other than 0, is no bf16 number.
bool needs_scales(const Tensor& weight) {
  constexpr float kLeast = 0x1p-110f;
  for (int64_t e = 0; e < weight.shape[0]; ++e) {
    const Tensor row = weight.at(e);
    for (int64_t k = 0; k < weight.shape[1]; ++k) {
      const float value = std::abs(load(weight.dtype, row.data, k));
      if (value > 0 && value < kLeast) return true;
    }
  }
  return false;
}

}  // namespace

int64_t router_weight_bytes(const RouterWeightSource& source) {
  if (source.weight.dtype == DType::bf16) return 0;
  return terms_of(source) * source.weight.elements() * info_of(DType::bf16).block_bytes;
}

Result<RouterWeight> prepare_router_weight(const RouterWeightSource& source) {
  const Tensor& weight = source.weight;
  Checker check("prepare_router_weight", Device::cpu);
  check.tensor("weight", weight, {"experts", "hidden"})
      .dtype("weight", weight, dtypes_mask(DType::f32, DType::f16, DType::bf16))
      .that(source.mode == RouterMode::two_term || source.mode == RouterMode::exact, "mode",
            static_cast<double>(source.mode), "two_term (0) or exact (1)");
  VIVACE_TRY(check.status());
  RouterWeight result{.mode = source.mode, .version = source.version};
  if (weight.dtype == DType::bf16) {
    result.terms[0] = weight;
    result.term_count = 1;
    return result;
  }

  const int64_t experts = weight.shape[0], hidden = weight.shape[1];
  const int64_t needed = router_weight_bytes(source);
  if (needed > 0) {
    check.tensor("storage", source.storage, {"storage_bytes"})
        .dtype("storage", source.storage, dtypes_mask(DType::u8))
        .that(source.storage.bytes() >= needed, "storage.shape[0]", double(source.storage.shape[0]),
              fmt::format("at least {} bytes", needed))
        .that(reinterpret_cast<uintptr_t>(source.storage.data) % alignof(uint16_t) == 0, "storage address",
              double(reinterpret_cast<uintptr_t>(source.storage.data)), "an even number");
    VIVACE_TRY(check.status());
  }
  const int terms = terms_of(source);
  uint16_t* planes[RouterWeight::kMaxTerms] = {};
  for (int i = 0; i < terms; ++i) {
    planes[i] = source.storage.as<uint16_t>() + i * experts * hidden;
    result.terms[i] = Tensor(planes[i], DType::bf16, {experts, hidden});
  }
  result.scaled = needs_scales(weight);
  const float step = result.scaled ? 256.0f : 1.0f;
  int used = 1;
  for (int64_t e = 0; e < experts; ++e) {
    const Tensor row = weight.at(e);
    for (int64_t k = 0; k < hidden; ++k) {
      float left = load(weight.dtype, row.data, k);
      for (int i = 0; i < terms; ++i) {
        const uint16_t term = nearest_finite_bf16(left);
        planes[i][e * hidden + k] = term;
        if ((term & 0x7fffu) != 0 && i >= used) used = i + 1;
        const float value = bf16_to_f32(term);
        // Both steps are exact: what is left has at most 16 significant bits, none below 2^-149.
        left = std::isfinite(value) ? (left - value) * step : 0.0f;
      }
    }
  }
  for (int i = used; i < terms; ++i) result.terms[i] = Tensor();
  result.term_count = used;
  return result;
}

}  // namespace vivace
