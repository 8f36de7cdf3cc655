#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

// Products by cuBLASLt, which is opened when first needed and never linked: the row cuda.cublaslt of linear, and what
// benchmarks are timed beside.

namespace vivace {

/// Whether cuBLASLt can be used: the program was built with its header and the library was found. It is opened on the
/// first call and stays open; any thread may ask.
bool cublaslt_found();
/// Where it is looked for, in order; the loader's own paths first. Empty where the program was built without
/// its header.
std::vector<std::string> cublaslt_names();

/// What every product brings: 32 MiB, which NVIDIA recommends for Hopper, at any address.
inline constexpr int64_t kCublasltWorkspaceBytes = (int64_t{32} << 20) + 255;

/// y = x · weightᵀ + bias with x [m, k], weight [n, k], bias [n] and y [m, n], none of them empty; rows may be strided.
/// x and weight are both f32, bf16 or fp8_e4m3, y is f32 or bf16; a bias goes with a bf16 y and is bf16.
struct CublasltProduct {
  Tensor x, weight, y;
  Tensor bias;                   ///< optional
  Tensor x_scale, weight_scale;  ///< with fp8: f32 [1], at a multiple of 16 bytes
  bool tf32 = false;             ///< f32 factors are multiplied as tf32 instead of fp32
  void* workspace = nullptr;     ///< kCublasltWorkspaceBytes on the device
};

/// An algorithm for products of some shapes, types and alignments on one device.
struct CublasltPlan;
/// That of this product; null where cuBLASLt's heuristic knows none. It is asked once for each, and plans stay.
/// unsupported: cuBLASLt was not found. device_error: it refused something else.
Result<const CublasltPlan*> cublaslt_plan(const CublasltProduct& product, const Stream& stream);
/// Enqueues the product by its plan.
Status cublaslt_multiply(const CublasltProduct& product, const CublasltPlan& plan, const Stream& stream);
/// The same with the plan looked up. unsupported: there is none, or cuBLASLt was not found.
Status cublaslt_multiply(const CublasltProduct& product, const Stream& stream);

}  // namespace vivace
