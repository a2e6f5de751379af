// Sparse MLA decode for few rows, for Hopper: two kernels, compiled at run time by nvrtc.py, one cubin a tile.
//
// `attend` takes one stretch of one row's slots for one block of heads. A token of the KV cache is 1152 contiguous bytes, so
// one bulk copy gathers it into shared memory, and as many steps are on their way at once as shared memory holds. A row's
// stretches are joined within a thread-block cluster (CLUSTER > 1), through distributed shared memory, and what the clusters
// leave, or the blocks where there are none, by `join` in a second launch, each in a fixed order.
//
//   tile.h          the tile and the arguments          attend.h        `attend` for 16 and 32 heads, with copies.h
//   ptx.h           every instruction that is PTX       attend_wgmma.h  `attend` for 64 heads, with ptx_wgmma.h
//   cluster.h       joins within a cluster              join.h          `join`
//
// With EMULATE a host compiler takes these files: what follows in PTX comes from the tests' emulation.h then.

#ifdef EMULATE
#include "emulation.h"
#else
#include "ptx.h"
#endif

#if TILE_WGMMA
#include "attend_wgmma.h"
#else
#include "attend.h"
#endif
#include "join.h"
