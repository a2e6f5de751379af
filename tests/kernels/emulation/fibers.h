// Blocks, warps and threads of a Hopper GPU: a CUDA thread is a fiber.

#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <ucontext.h>
#include <vector>

#include "host.h"

namespace emulation {

constexpr size_t STACK = 256 << 10;
constexpr uint32_t WINDOW = 1u << 24;  // shared addresses of a block of a cluster; the block is address / WINDOW
constexpr int SHARED = 232448;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulation: %s\n", what);
    abort();
}

struct Barrier {  // in the eight bytes of an mbarrier
    int16_t expected, pending;
    int32_t bytes_and_phase;  // bytes that are still to come, times two, and the phase's parity
};
static_assert(sizeof(Barrier) == 8);

struct Block;
struct Warp {
    Warp* group = nullptr;  // where its warp group meets
    int arrived = 0, exited = 0;
    uint64_t generation = 0;
    const void* in[128];
    void* out[128];
    int wait_until = 0;
};
struct Fiber {
    jmp_buf at;
    ucontext_t context;
    char* stack;
    bool started = false, done = false;
    int groups = 0;  // of copies that it has committed
    Block* block;
    Warp* warp;
    dim3 thread, index;
};
struct Piece {  // of a copy that its thread waits for
    const Fiber* fiber;
    int group;
    char* to;
    const char* from;  // null: zeros
};
struct Copy {
    char* to;
    const char* from;
    uint32_t bytes;
    Barrier* barrier;
    std::vector<Piece> pieces;  // instead, whose landing is an arrival
};
struct Block {
    std::vector<char> memory;
    char* base;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps, groups;
    int waiting = 0, left = 0;
    uint64_t generation = 0;
    int rank;
};
struct Machine {
    std::vector<Block> blocks;  // of the cluster
    std::vector<Copy> copies;
    std::mt19937 random;
    Fiber* now = nullptr;
    std::vector<Piece> pieces;
    jmp_buf scheduler;
    ucontext_t main;
    int cluster_arrived = 0;
    uint64_t cluster_generation = 0, moves = 0;
    std::function<void()> kernel;
    dim3 grid;
};
inline Machine* machine;
inline std::vector<char*> stacks;

inline Fiber& me() { return *machine->now; }

inline void yield() {
    Fiber& fiber = me();
    if (!_setjmp(fiber.at)) _longjmp(machine->scheduler, 1);
}

inline void entry() {
    machine->kernel();
    Fiber& fiber = me();
    fiber.done = true;
    ++fiber.block->left;
    ++fiber.warp->exited;
    ++machine->moves;
    _longjmp(machine->scheduler, 1);
}

inline void resume(Fiber* fiber) {
    machine->now = fiber;
    if (_setjmp(machine->scheduler)) return;
    if (fiber->started) _longjmp(fiber->at, 1);
    fiber->started = true;
    setcontext(&fiber->context);
}

inline void advance(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes_and_phase >> 1 == 0) {
        barrier.pending = barrier.expected;
        barrier.bytes_and_phase ^= 1;
    }
}

inline void land(const Piece& piece) {
    if (piece.from) {
        memcpy(piece.to, piece.from, 16);
    } else {
        memset(piece.to, 0, 16);
    }
}

inline void land(size_t i) {
    Copy& copy = machine->copies[i];
    if (copy.to) {
        memcpy(copy.to, copy.from, copy.bytes);
        copy.barrier->bytes_and_phase -= 2 * static_cast<int32_t>(copy.bytes);
    } else {
        for (const Piece& piece : copy.pieces) land(piece);
        if (--copy.barrier->pending < 0) fail("too many arrivals");
    }
    advance(*copy.barrier);
    machine->copies[i] = machine->copies.back();
    machine->copies.pop_back();
    ++machine->moves;
}

// All lanes of a warp, or of a warp group, meet; the last computes what each is given.
template <typename In, typename Out, int LANES = 32, typename Compute>
Out together(const In& in, Compute compute) {
    Warp& warp = LANES == 32 ? *me().warp : *me().warp->group;
    const int lane = me().thread.x % LANES;
    if (me().warp->exited) fail("a lane of this warp has left");
    Out out{};
    warp.in[lane] = &in;
    warp.out[lane] = &out;
    const uint64_t generation = warp.generation;
    ++machine->moves;
    if (++warp.arrived == LANES) {
        const In* ins[LANES];
        Out* outs[LANES];
        for (int i = 0; i < LANES; ++i) {
            ins[i] = static_cast<const In*>(warp.in[i]);
            outs[i] = static_cast<Out*>(warp.out[i]);
        }
        compute(ins, outs);
        warp.arrived = 0;
        ++warp.generation;
    } else {
        while (warp.generation == generation) yield();
    }
    return out;
}

inline char* shared_pointer(uint32_t address, bool remote = false) {
    const uint32_t rank = address / WINDOW - 1;
    if (rank >= machine->blocks.size()) fail("not an address of shared memory");
    if (!remote && static_cast<int>(rank) != me().block->rank) fail("shared memory of another block");
    if (address % WINDOW >= SHARED) fail("past shared memory");
    if (remote && machine->blocks[rank].left) fail("shared memory of a block that leaves");
    return machine->blocks[rank].base + address % WINDOW;
}

}  // namespace emulation

#define threadIdx (emulation::me().thread)
#define blockIdx (emulation::me().index)
