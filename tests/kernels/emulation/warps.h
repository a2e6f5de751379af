// Threads that meet: barriers of blocks and clusters, shuffles and votes.

#pragma once

#include "fibers.h"

inline void __syncthreads() {
    emulation::Block& block = *emulation::me().block;
    const uint64_t generation = block.generation;
    ++emulation::machine->moves;
    ++block.waiting;
    while (block.generation == generation) {
        if (block.waiting + block.left == static_cast<int>(block.fibers.size())) {
            block.waiting = 0;
            ++block.generation;
            ++emulation::machine->moves;
        } else {
            emulation::yield();
        }
    }
}

inline void __syncwarp() {
    emulation::together<int, int>(0, [](const int**, int**) {});
}

template <typename T>
inline T exchanged(T x, int from) {
    struct In { T x; int from; } in{x, from};
    return emulation::together<In, T>(in, [](const In** ins, T** out) {
        for (int lane = 0; lane < 32; ++lane) *out[lane] = ins[ins[lane]->from]->x;
    });
}

inline float shuffle_xor(float x, int lanes) { return exchanged(x, static_cast<int>(threadIdx.x % 32) ^ lanes); }
inline int shuffle(int x, int lane) { return exchanged(x, lane); }

inline uint32_t ballot(bool x) {
    return emulation::together<bool, uint32_t>(x, [](const bool** in, uint32_t** out) {
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(*in[lane]) << lane;
        for (int lane = 0; lane < 32; ++lane) *out[lane] = bits;
    });
}

inline void cluster_arrive() {}
inline void cluster_wait() {
    emulation::Machine& m = *emulation::machine;
    size_t all = 0;
    for (const emulation::Block& block : m.blocks) all += block.fibers.size();
    const uint64_t generation = m.cluster_generation;
    ++m.moves;
    if (++m.cluster_arrived == static_cast<int>(all)) {
        m.cluster_arrived = 0;
        ++m.cluster_generation;
    }
    while (m.cluster_generation == generation) emulation::yield();
}

inline bool all_lanes(bool x) { return ballot(x) == 0xffffffffu; }
