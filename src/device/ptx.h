#pragma once

// The few PTX instructions that kernels here need and CUDA C++ has no word for: dependent launches, mbarriers, bulk and
// tensor copies, clusters, named barriers. A thin layer over cuda::ptx. Shared-memory operands are ordinary pointers.

#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda/ptx>

#include <cstdint>

namespace vivace::device {

namespace ptx = ::cuda::ptx;

// ---- programmatic dependent launch (no effect before compute capability 9.0, where kernels never overlap)

/// Blocks until the kernels this one depends on have ended and their writes are visible. Loads of what they cannot have
/// written may come before it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the dependent kernel's CTAs start as soon as every CTA of this one has called it or ended. Says nothing about
/// this kernel's writes: the dependent waits for those itself.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Asks for the line of global memory at `p` to be brought into the L2. A hint: it may come before the wait above.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- 16-byte asynchronous copies (compute capability 8.0)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes, or writes 16 zero bytes when `valid` is false; `source` is then not read.
__device__ __forceinline__ void copy_16_async(void* destination, const void* source, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
/// The same for 4 bytes, which stay in the L1.
__device__ __forceinline__ void copy_4_async(void* destination, const void* source, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until at most `kPending` of this thread's committed groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

// ---- mbarriers

using Barrier = uint64_t;  ///< in shared memory, 8-byte aligned

__device__ __forceinline__ void init_barrier(Barrier* barrier, uint32_t arrivals) {
  ptx::mbarrier_init(barrier, arrivals);
}
/// After the inits, before any other thread or the copy engine uses the barriers (a thread barrier must follow).
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Arrives once the calling thread's asynchronous copies so far are complete.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
/// Arrives and announces `bytes` that copies will bring to this phase.
__device__ __forceinline__ void arrive_and_expect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait_for(Barrier* barrier, uint32_t parity) {
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}
/// The same two where the bytes are stores of another CTA of the cluster.
__device__ __forceinline__ void arrive_and_expect_of_cluster(Barrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cluster.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void wait_for_cluster_writes(Barrier* barrier, uint32_t parity) {
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}
/// The same barrier in another CTA of the cluster.
__device__ __forceinline__ void arrive_at(Barrier* barrier, uint32_t cta_rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(cta_rank)
      : "memory");
}

/// Stage index and phase parity of a ring of `kStages` shared-memory buffers. The producer starts with parity 1: its
/// first wait for "empty" must not block.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- bulk and tensor copies (one thread issues; they complete on an mbarrier)

/// `bytes` a multiple of 16, both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tensor_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                            int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                            int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5}], "
      "[%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], "
      "[%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6, %7}], "
      "[%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// What is read once: the first to leave the L2.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void tensor_load(void* destination, const CUtensorMap* map, Barrier* barrier,
                                            uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}
/// Shared memory written by ordinary stores becomes visible to the copy engine and the tensor cores; each writing thread
/// calls it before the barrier that hands the data over.
__device__ __forceinline__ void publish_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// A barrier of the cluster in two halves; threads that have ended are not waited for. An arrival that says nothing about what
/// was written before it needs no fence: it tells that this CTA runs.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_without_fence() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
/// The address in CTA `rank`'s shared memory that corresponds to `p` here.
template <class T>
__device__ __forceinline__ T* in_cta(T* p, uint32_t rank) {
  uint64_t mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
  return reinterpret_cast<T*>(mapped);
}
/// The same among shared addresses.
__device__ __forceinline__ uint32_t address_in_cta(const void* p, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(p)), "r"(rank));
  return mapped;
}
/// Stores two floats in the shared memory of another CTA of a cluster. Their 8 bytes complete on that CTA's barrier, which
/// expects them. Not where no cluster was launched.
__device__ __forceinline__ void store_async(uint32_t to, const float (&v)[2], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
      "r"(barrier), "f"(v[0]), "f"(v[1])
      : "memory");
}
/// The same by the addresses here that correspond to those there.
__device__ __forceinline__ void store_async(float2* to, const float (&v)[2], Barrier* barrier,
                                            uint32_t rank) {
  store_async(address_in_cta(to, rank), v, address_in_cta(barrier, rank));
}

// ---- counters

/// Adds to a counter of the device and returns what it was: what came before it here is visible to who adds after, and the other
/// way round.
__device__ __forceinline__ int add_acquire_release(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// ---- matrices to shared memory

/// Four 8 x 8 matrices of 16-bit elements, row l / 4 and columns 2 (l % 4) and + 1 in lane l, transposed; lane l gives the
/// address of row l % 8 of matrix l / 8 of the results.
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
/// Two of them; addresses of lanes 0 to 15 count.
__device__ __forceinline__ void store_two_matrices_transposed(void* row, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
               "r"(first), "r"(second)
               : "memory");
}

// ---- warp-group registers

template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

#endif  // compute capability 9.0

// ---- named barriers: `id` 1..15, `threads` a multiple of 32

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace vivace::device
