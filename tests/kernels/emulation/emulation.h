// What kernel.cu needs of a Hopper GPU, for a host compiler: a CUDA thread is a fiber, and every instruction
// that file has in PTX does here what the PTX ISA says of it. Blocks of a cluster run beside each other, warps in a random order and
// some of them late; a bulk copy lands at a random moment before the wait that needs it; shared memory begins as NaN.

#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct dim3 { unsigned x, y, z; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline float __int_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

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

inline float from_bf16(uint16_t bits) { return __int_as_float(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulation

#define threadIdx (emulation::me().thread)
#define blockIdx (emulation::me().index)
#define SHARED_MEMORY(name) unsigned char* name = reinterpret_cast<unsigned char*>(emulation::me().block->base)

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

inline uint32_t shared_address(const void* pointer) {
    emulation::Block& block = *emulation::me().block;
    const auto offset = static_cast<const char*>(pointer) - block.base;
    if (offset < 0 || offset >= emulation::SHARED) emulation::fail("not a pointer to shared memory");
    return (block.rank + 1) * emulation::WINDOW + static_cast<uint32_t>(offset);
}

inline void launch_dependents() {}
inline void wait_for_inputs() {}
inline void fence_barrier_init() {}
inline void fence_before_copies() {}

inline emulation::Barrier& barrier_at(uint32_t address) {
    if (address % 8) emulation::fail("a barrier is not aligned");
    return *reinterpret_cast<emulation::Barrier*>(emulation::shared_pointer(address));
}

inline void barrier_init(uint32_t address, uint32_t arrivals) {
    barrier_at(address) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0};
}

inline void arrive_expecting(uint32_t address, uint32_t bytes) {
    emulation::Barrier& barrier = barrier_at(address);
    if (bytes >= 1 << 20) emulation::fail("more bytes than a barrier counts");
    barrier.bytes_and_phase += 2 * static_cast<int32_t>(bytes);
    if (--barrier.pending < 0) emulation::fail("too many arrivals");
    emulation::advance(barrier);
    ++emulation::machine->moves;
}

inline void barrier_wait(uint32_t address, uint32_t parity) {
    while (static_cast<uint32_t>(barrier_at(address).bytes_and_phase & 1) == parity) emulation::yield();
    ++emulation::machine->moves;
}

inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulation::fail("a bulk copy is not aligned");
    emulation::shared_pointer(to + bytes - 1);
    // What is there before the copy lands may not be relied upon.
    memset(emulation::shared_pointer(to), 0xff, bytes);
    emulation::machine->copies.push_back(
        {emulation::shared_pointer(to), static_cast<const char*>(from), bytes, &barrier_at(barrier), {}});
    ++emulation::machine->moves;
}

template <bool TRANSPOSED>
inline void ldmatrix_of(uint32_t (&r)[4], uint32_t address) {
    struct Four { uint32_t r[4]; };
    if (address % 16) emulation::fail("ldmatrix is not aligned");
    const char* row = emulation::shared_pointer(address);
    const Four four = emulation::together<const char*, Four>(row, [](const char* const** in, Four** out) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                uint16_t two[2];
                for (int i = 0; i < 2; ++i) {
                    const int r = TRANSPOSED ? 2 * (lane % 4) + i : lane / 4, c = TRANSPOSED ? lane / 4 : 2 * (lane % 4) + i;
                    memcpy(&two[i], *in[matrix * 8 + r] + 2 * c, 2);
                }
                out[lane]->r[matrix] = two[0] | static_cast<uint32_t>(two[1]) << 16;
            }
        }
    });
    memcpy(r, four.r, 16);
}

inline void ldmatrix(uint32_t (&r)[4], uint32_t address) { ldmatrix_of<false>(r, address); }
inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) { ldmatrix_of<true>(r, address); }

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct In { uint32_t a[4], b[2]; float c[4]; } in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    struct Out { float d[4]; };
    const Out result = emulation::together<In, Out>(in, [](const In** ins, Out** out) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const int group = lane / 4, in_group = lane % 4;
            for (int i = 0; i < 8; ++i) {  // the PTX ISA's formulas for .m16n8k16
                const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                const int column = 2 * in_group + (i & 1) + (i >= 4 ? 8 : 0);
                a[row][column] = emulation::from_bf16(static_cast<uint16_t>(ins[lane]->a[i / 2] >> 16 * (i & 1)));
            }
            for (int i = 0; i < 4; ++i) {
                const int row = 2 * in_group + (i & 1) + (i >= 2 ? 8 : 0);
                b[row][group] = emulation::from_bf16(static_cast<uint16_t>(ins[lane]->b[i / 2] >> 16 * (i & 1)));
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                const int row = i < 2 ? lane / 4 : lane / 4 + 8, column = 2 * (lane % 4) + (i & 1);
                float sum = ins[lane]->c[i];
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
                out[lane]->d[i] = sum;
            }
        }
    });
    memcpy(d, result.d, 16);
}

inline uint32_t pack_bf16(float low, float high) {
    return emulation::to_bf16(low) | static_cast<uint32_t>(emulation::to_bf16(high)) << 16;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

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

inline uint32_t address_in_block(uint32_t address, uint32_t block) {
    return address % emulation::WINDOW + (block + 1) * emulation::WINDOW;
}

template <typename T>
inline T load_from(uint32_t address) {
    T x;
    memcpy(&x, emulation::shared_pointer(address, true), sizeof(T));
    return x;
}
inline float load_remote(uint32_t address) { return load_from<float>(address); }
inline float4 load_remote4(uint32_t address) { return load_from<float4>(address); }

// Copies that their thread waits for land when it does, and not before.
inline void copy_piece(uint32_t to, const void* from, bool there) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulation::fail("a copy is not aligned");
    emulation::Fiber& fiber = emulation::me();
    memset(emulation::shared_pointer(to), 0xff, 16);
    emulation::machine->pieces.push_back(
        {&fiber, fiber.groups, emulation::shared_pointer(to), there ? static_cast<const char*>(from) : nullptr});
}
inline void copies_asked() { ++emulation::me().groups; }
template <int GROUPS>
inline void copies_wait() {
    emulation::Fiber& fiber = emulation::me();
    auto& pieces = emulation::machine->pieces;
    size_t kept = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const emulation::Piece piece = pieces[i];
        if (piece.fiber != &fiber || piece.group >= fiber.groups - GROUPS) {
            pieces[kept++] = piece;
        } else {
            emulation::land(piece);
        }
    }
    pieces.resize(kept);
}
inline void arrive_when_copied(uint32_t barrier) {
    emulation::Fiber& fiber = emulation::me();
    emulation::Copy copy{nullptr, nullptr, 0, &barrier_at(barrier), {}};
    auto& pieces = emulation::machine->pieces;
    size_t kept = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const emulation::Piece piece = pieces[i];
        if (piece.fiber == &fiber) {
            copy.pieces.push_back(piece);
        } else {
            pieces[kept++] = piece;
        }
    }
    pieces.resize(kept);
    emulation::machine->copies.push_back(copy);
}

inline bool all_lanes(bool x) { return ballot(x) == 0xffffffffu; }
inline void products_begin() {}
inline void products_issued() {}
inline void products_wait() {}

// A value of an operand that a descriptor of 128-byte swizzle names: CUTLASS's canonical layouts, of 16-bit values.
inline float value_of(uint64_t descriptor, bool rows_dense, uint32_t block, int row, int column) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) emulation::fail("not 128-byte swizzle");
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
    uint32_t address = rows_dense ? start + row / 64 * leading + row % 64 * 2 + column / 8 * stride + column % 8 * 128
                                  : start + row / 8 * stride + row % 8 * 128 + column * 2;
    address ^= (address >> 7 & 7) << 4;
    uint16_t bits;
    memcpy(&bits, emulation::shared_pointer(address + (block + 1) * emulation::WINDOW), 2);
    return emulation::from_bf16(bits);
}

template <int N, bool B_ROWS_DENSE>
inline void group_products(float (&d)[N / 2], uint64_t a, uint64_t b, bool first) {
    struct In {
        uint64_t a, b;
        float* d;
        bool first;
    } in{a, b, d, first};
    const uint32_t block = emulation::me().block->rank;
    emulation::together<In, int, 128>(in, [block](const In** ins, int**) {
        std::vector<float> a(64 * 16), b(N * 16);
        for (int column = 0; column < 16; ++column) {
            for (int row = 0; row < 64; ++row) a[row * 16 + column] = value_of(ins[0]->a, false, block, row, column);
            for (int row = 0; row < N; ++row) b[row * 16 + column] = value_of(ins[0]->b, B_ROWS_DENSE, block, row, column);
        }
        for (int thread = 0; thread < 128; ++thread) {
            if (ins[thread]->a != ins[0]->a || ins[thread]->b != ins[0]->b) emulation::fail("descriptors differ");
            for (int i = 0; i < N / 2; ++i) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
                float sum = ins[thread]->first ? 0.0f : ins[thread]->d[i];
                for (int k = 0; k < 16; ++k) sum += a[row * 16 + k] * b[column * 16 + k];
                ins[thread]->d[i] = sum;
            }
        }
    });
}
inline void score_products(float (&d)[16], uint64_t a, uint64_t b, bool first) { group_products<32, false>(d, a, b, first); }
inline void value_products(float (&d)[128], uint64_t a, uint64_t b) { group_products<256, true>(d, a, b, false); }
