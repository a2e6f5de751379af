// Runs a grid: blocks of a cluster beside each other, warps in a random order and some of them late; a bulk copy lands at a random
// moment before the wait that needs it; shared memory begins as NaN.

#pragma once

#include "fibers.h"

namespace emulation {

inline void run_cluster(int threads) {
    Machine& m = *machine;
    size_t used = 0;
    for (Block& block : m.blocks) {
        for (Fiber* fiber : block.fibers) {
            if (used == stacks.size()) stacks.push_back(static_cast<char*>(malloc(STACK)));
            fiber->stack = stacks[used++];
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack;
            fiber->context.uc_stack.ss_size = STACK;
            fiber->context.uc_link = nullptr;
            makecontext(&fiber->context, entry, 0);
        }
    }
    std::vector<std::pair<Block*, int>> order;
    for (Block& block : m.blocks) {
        for (int warp = 0; warp < threads / 32; ++warp) order.push_back({&block, warp});
    }
    int idle = 0;
    for (int round = 0;; ++round) {
        size_t left = 0;
        const uint64_t moves = m.moves;
        if (round % 8 == 0) std::shuffle(order.begin(), order.end(), m.random);
        for (auto& [block, index] : order) {
            Warp& warp = block->warps[index];
            if (warp.exited == 32) continue;
            ++left;
            if (warp.wait_until > round && idle == 0) continue;
            if (m.random() % 256 == 0) warp.wait_until = round + m.random() % 200;  // late
            for (int lane = 0; lane < 32; ++lane) {
                Fiber* fiber = block->fibers[index * 32 + lane];
                if (!fiber->done) resume(fiber);
            }
        }
        if (!left) break;
        const bool storm = m.random() % 16 == 0;  // of landings
        if (!m.copies.empty() && (storm || m.random() % 4 == 0 || m.moves == moves)) {
            for (size_t n = storm ? m.random() % 256 : 1; n > 0 && !m.copies.empty(); --n) land(m.random() % m.copies.size());
        }
        idle = m.moves == moves ? idle + 1 : 0;
        if (idle > 1000) fail("nothing moves: a barrier that not all reach");
    }
    if (!m.copies.empty() || !m.pieces.empty()) fail("a block has left before its copies landed");
}

inline void run(dim3 grid, int threads, int cluster, int seed, std::function<void()> kernel) {
    Machine m;
    machine = &m;
    m.random.seed(seed);
    m.kernel = kernel;
    m.grid = grid;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; x += cluster) {
                m.blocks.assign(cluster, Block{});
                for (int rank = 0; rank < cluster; ++rank) {
                    Block& block = m.blocks[rank];
                    block.rank = rank;
                    block.memory.assign(SHARED + 128, static_cast<char>(0xff));
                    block.base = block.memory.data() + (128 - reinterpret_cast<uintptr_t>(block.memory.data()) % 128);
                    block.warps.resize(threads / 32);
                    block.groups.resize(threads / 128);
                    for (int warp = 0; warp < threads / 32; ++warp) block.warps[warp].group = &block.groups[warp / 4];
                    for (int thread = 0; thread < threads; ++thread) {
                        Fiber* fiber = new Fiber;
                        fiber->block = &block;
                        fiber->warp = &block.warps[thread / 32];
                        fiber->thread = {static_cast<unsigned>(thread), 0, 0};
                        fiber->index = {x + rank, y, z};
                        block.fibers.push_back(fiber);
                    }
                }
                run_cluster(threads);
                for (Block& block : m.blocks) {
                    for (Fiber* fiber : block.fibers) delete fiber;
                }
            }
        }
    }
}

}  // namespace emulation
