// What kernel.cu needs of a Hopper GPU, for a host compiler: every instruction that ptx.h and ptx_wgmma.h have does here what the
// PTX ISA says of it.

#pragma once

#include "machine.h"
#include "memory.h"
#include "products.h"
#include "warps.h"

// Each moment of the emulation sees all that went before.
inline void launch_dependents() {}
inline void wait_for_inputs() {}
inline void fence_barrier_init() {}
inline void fence_before_copies() {}
inline void products_begin() {}
inline void products_issued() {}
inline void products_wait() {}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
