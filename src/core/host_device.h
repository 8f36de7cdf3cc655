#pragma once

// Marks plain functions that kernels call as well as the host.
#ifdef __CUDACC__
#define VIVACE_HOST_DEVICE __host__ __device__
#else
#define VIVACE_HOST_DEVICE
#endif
