// What kernels/hopper.cuh has of a Hopper GPU, for a host compiler: a CUDA thread is a fiber, and every instruction that
// the file has in PTX does here what the PTX ISA says of it. Fibers run in a random order, those of some blocks together. A copy
// lands and a product is computed when it is asked for or when it is waited for, as chance has it; a tile lands when chance has it.
// Blocks rest in turns, so that others go ahead. Shared memory begins as NaN.

#ifndef NSA_EMULATION_H
#define NSA_EMULATION_H

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define CLUSTER_OF(blocks)
#define SHARED_MEMORY(name) unsigned char* name = emulation::now->block->shared
#define threadIdx (emulation::now->thread)
#define blockIdx (emulation::now->block->index)
#define gridDim (emulation::grid)

using std::max;
using std::min;
struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct dim3 { unsigned x, y, z; };
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selected) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t x = 0;
    for (int i = 0; i < 4; ++i) x |= (bytes >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return x;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
template <class To, class From> To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }

namespace emulation {

constexpr size_t STACK = 64 << 10, SHARED = 232448;

constexpr int MOST_THREADS = 1024, NAMED = 5;

template <int most> struct Meeting {  // of the threads of a warp, of a block or of a cluster
    int arrived = 0;
    uint64_t generation = 0, values[2][most];  // those of a generation stay until the one after the next
};
struct Block {
    alignas(1024) unsigned char shared[SHARED];
    dim3 index;
    Meeting<32> warps[MOST_THREADS / 32];
    Meeting<1> named[NAMED], cluster;
    std::vector<Block*> beside;  // blocks of its cluster, by rank
    int left;                    // threads that have not ended
};
struct Fiber {
    Block* block;
    ucontext_t context;  // to begin with
    jmp_buf place;       // since then: swapcontext would ask the kernel for signals
    bool begun;
    std::vector<char> stack;
    dim3 thread;
    bool done;
    uint64_t in_cluster;  // the meeting of the cluster that it has come to last
    std::vector<std::function<void()>> copies, products;
    std::vector<size_t> committed;  // products that were asked for when each group was committed
};
inline std::vector<Fiber> fibers;
inline Fiber* now;
inline dim3 grid;
inline jmp_buf scheduler;
inline std::mt19937 chance;
inline std::function<void()> kernel;
inline std::vector<std::function<void()>> flying;  // tiles on their way
inline int threads;
inline unsigned cluster;  // blocks of one

// Others go on, until it is this fiber's turn.
inline void pass() {
    if (_setjmp(now->place) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulation: %s\n", what);
    abort();
}

inline unsigned char* at(Block& block, uint32_t address, uint32_t bytes) {
    if (address % bytes || address + bytes > SHARED) fail("an access beside shared memory, or not aligned");
    if (!block.left) fail("an access to shared memory of a block that has ended");
    return block.shared + address;
}
inline unsigned char* at(uint32_t address, uint32_t bytes) { return at(*now->block, address, bytes); }

// Which generation of them it is one of, once all of `members` are here.
template <int most> inline uint64_t come(Meeting<most>& meeting, int members, int place, uint64_t value) {
    const uint64_t mine = meeting.generation;
    meeting.values[mine % 2][place] = value;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.generation;
    }
    return mine;
}
// Everybody's values, then.
template <int most> inline uint64_t* wait_for_all(Meeting<most>& meeting, uint64_t mine) {
    while (meeting.generation == mine) pass();
    return meeting.values[mine % 2];
}
template <int most> inline uint64_t* meet(Meeting<most>& meeting, int members, int place, uint64_t value) {
    return wait_for_all(meeting, come(meeting, members, place, value));
}

inline uint64_t* meet_warp(uint64_t value) { return meet(now->block->warps[now->thread.x / 32], 32, now->thread.x % 32, value); }

inline void later(std::vector<std::function<void()>>& list, std::function<void()> what) {
    if (chance() % 2 && list.empty()) {
        what();
    } else {
        list.push_back(what);
    }
}

inline void settle(std::vector<std::function<void()>>& list, size_t count) {
    for (size_t i = 0; i < count; ++i) list[i]();
    list.erase(list.begin(), list.begin() + count);
}

inline void settle(std::vector<std::function<void()>>& list) { settle(list, list.size()); }

inline void entry() {
    kernel();
    now->done = true;
    --now->block->left;
    if (!now->copies.empty() || !now->products.empty()) fail("a thread ended before what it asked for");
    pass();
}

// All at the same time, as blocks may wait for each other.
inline void run_blocks(const std::vector<dim3>& indices) {
    std::vector<std::unique_ptr<Block>> blocks;
    fibers.resize(indices.size() * threads);
    for (size_t b = 0; b < indices.size(); ++b) {
        blocks.push_back(std::make_unique<Block>());
        memset(blocks[b]->shared, 0xff, SHARED);
        blocks[b]->index = indices[b];
        blocks[b]->left = threads;
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[b * threads + t];
            fiber.block = blocks[b].get();
            fiber.stack.resize(STACK);
            fiber.thread = {static_cast<unsigned>(t), 0, 0};
            fiber.done = fiber.begun = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, entry, 0);
        }
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
        for (size_t of = b / cluster * cluster; of < std::min(blocks.size(), (b / cluster + 1) * cluster); ++of) blocks[b]->beside.push_back(blocks[of].get());
    }
    std::vector<int> order(fibers.size());
    for (size_t t = 0; t < order.size(); ++t) order[t] = t;
    const Block* resting = nullptr;
    for (int left = 1, rounds = 0, rested = 0, held = 0; left; ++rounds) {
        if (rounds > 1 << 20) fail("threads wait for each other");
        if (rounds % 8 == 0) std::shuffle(order.begin(), order.end(), chance);
        if (rounds == held) held += 1 + chance() % (chance() % 8 ? 8 : 512);  // until then nothing lands
        for (size_t i = 0; i < flying.size();) {
            if (rounds + 1 < held || chance() % 4) {
                ++i;
                continue;
            }
            const auto lands = flying[i];
            flying.erase(flying.begin() + i);
            lands();
        }
        left = 0;
        if (rounds == rested) {
            rested += 1 + chance() % (chance() % 8 ? 64 : 512);
            resting = chance() % 2 ? blocks[chance() % blocks.size()].get() : nullptr;
        }
        for (int t : order) {
            if (fibers[t].done) continue;
            ++left;
            if (fibers[t].block == resting && blocks.size() > 1) continue;
            now = &fibers[t];
            if (chance() % 4 == 0) settle(now->copies);
            if (_setjmp(scheduler) == 0) {
                if (now->begun) _longjmp(now->place, 1);
                now->begun = true;
                setcontext(&now->context);
            }
            left -= now->done;
        }
    }
    if (!flying.empty()) fail("blocks ended before what they asked for");
}

// Of every byte.
inline const std::array<float, 256> E4M3 = [] {
    std::array<float, 256> values;
    for (int x = 0; x < 256; ++x) {
        const int exponent = x >> 3 & 15, rest = x & 7;
        const float value = exponent ? ldexpf(8 + rest, exponent - 10) : ldexpf(rest, -9);
        values[x] = (x & 127) == 127 ? NAN : x >> 7 ? -value : value;
    }
    return values;
}();

inline float bf16_at(uint32_t address) { return bits_as<float>(static_cast<uint32_t>(*reinterpret_cast<uint16_t*>(at(address, 2))) << 16); }

struct Tile {
    uint32_t begin, leading, stride;
    explicit Tile(uint64_t d) : begin((d & 0x3fff) << 4), leading((d >> 16 & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4) {
        if (d >> 62 != 1) fail("no tile of 128-byte rows, swizzled");
    }
    static uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }
    uint32_t of_row(int row) const { return begin + row / 8 * stride + row % 8 * 128; }
    float along_k(int row, int k) const { return bf16_at(swizzled(of_row(row) + 2 * k)); }
    float fp8_along_k(int row, int k) const { return E4M3[*at(swizzled(of_row(row) + k), 1)]; }
    float across_k(int k, int column) const {
        return bf16_at(swizzled(begin + column / 64 * leading + column % 64 * 2 + k / 8 * stride + k % 8 * 128));
    }
};

template <int K, int N, class A, class B> void multiply(float (&d)[N], bool add, A a, B b) {
    const int warp = now->thread.x / 32 % 4, lane = now->thread.x % 32;
    for (int i = 0; i < N; ++i) {
        const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? d[i] : 0;
        for (int k = 0; k < K; ++k) sum += a(row, k) * b(k, column);
        d[i] = sum;
    }
}

}  // namespace emulation

inline void others_go_on() {
    for (int left = emulation::chance() % 16; left; --left) emulation::pass();
}
template <int number, int threads> void meet() {
    emulation::meet(emulation::now->block->named[number], threads, 0, 0);
    others_go_on();
}
template <int registers> void take_registers() {}
template <int registers> void leave_registers() {}
inline void sync_warp() { emulation::meet_warp(0); }
inline uint32_t warp_ballot(bool x) {
    const uint64_t* all = emulation::meet_warp(x);
    uint32_t found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= static_cast<uint32_t>(all[lane]) << lane;
    return found;
}
template <class Join> uint32_t warp_joined(uint32_t x, Join join) {
    const uint64_t* all = emulation::meet_warp(x);
    uint32_t joined = static_cast<uint32_t>(all[0]);
    for (int lane = 1; lane < 32; ++lane) joined = join(joined, static_cast<uint32_t>(all[lane]));
    return joined;
}
inline uint32_t warp_or(uint32_t x) { return warp_joined(x, [](uint32_t a, uint32_t b) { return a | b; }); }
inline uint32_t warp_least(uint32_t x) { return warp_joined(x, [](uint32_t a, uint32_t b) { return min(a, b); }); }
inline uint32_t warp_most(uint32_t x) { return warp_joined(x, [](uint32_t a, uint32_t b) { return max(a, b); }); }
inline int warp_uniform(int x) { return x; }
inline uint32_t shuffle_from(uint32_t x, int lane) { return emulation::meet_warp(x)[lane]; }
inline uint32_t shuffle_up(uint32_t x, int lanes) {
    const int lane = emulation::now->thread.x % 32;
    return shuffle_from(x, lane < lanes ? lane : lane - lanes);
}
inline float shuffle_xor(float x, int lanes) {
    return bits_as<float>(shuffle_from(bits_as<uint32_t>(x), emulation::now->thread.x % 32 ^ lanes));
}
inline uint32_t shared_address(const void* pointer) { return static_cast<const unsigned char*>(pointer) - emulation::now->block->shared; }
inline void wait_for_inputs() {}
inline void let_others_begin() {}
inline void fence_before_products() {}
template <int bytes> void copy(uint32_t to, const void* from, bool there) {
    emulation::later(emulation::now->copies, [=] {
        if (there) memcpy(emulation::at(to, bytes), from, bytes);
        else memset(emulation::at(to, bytes), 0, bytes);
    });
}
inline void copy_16(uint32_t to, const void* from, bool there) { copy<16>(to, from, there); }
inline void copy_4(uint32_t to, const void* from, bool there) { copy<4>(to, from, there); }
inline void wait_for_copies() { emulation::settle(emulation::now->copies); }

struct Barrier {  // as it lies in shared memory
    uint16_t expected, pending;
    int32_t bytes : 24;  // that are still to come
    uint32_t phase : 8;
};
inline Barrier& barrier_at(uint32_t address, emulation::Block& block = *emulation::now->block) {
    return *reinterpret_cast<Barrier*>(emulation::at(block, address, 8));
}
inline void start_barrier(uint32_t address, int arrivals) {
    const uint16_t all = static_cast<uint16_t>(arrivals);
    barrier_at(address) = {all, all, 0, 0};
}
inline void arrived(Barrier& barrier, int arrivals, int bytes) {
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier = {barrier.expected, barrier.expected, 0, (barrier.phase + 1) & 255u};
}
inline void arrived(uint32_t address) { arrived(barrier_at(address), 1, 0); }
inline void arrive(uint32_t address) {
    arrived(address);
    others_go_on();
}
inline int cluster_rank() { return emulation::now->block->index.x % emulation::cluster; }
inline void arrive_in_cluster() {
    emulation::now->in_cluster = emulation::come(emulation::now->block->beside[0]->cluster, emulation::cluster * emulation::threads, 0, 0);
    others_go_on();
}
inline void wait_for_cluster() {
    emulation::wait_for_all(emulation::now->block->beside[0]->cluster, emulation::now->in_cluster);
    others_go_on();
}
inline void meet_cluster() {
    arrive_in_cluster();
    wait_for_cluster();
}
inline void arrive_at(uint32_t address, int rank) {
    arrived(barrier_at(address, *emulation::now->block->beside[rank]), 1, 0);
    others_go_on();
}
inline void store_shared_of(uint32_t address, uint32_t x, int rank) {
    *reinterpret_cast<uint32_t*>(emulation::at(*emulation::now->block->beside[rank], address, 4)) = x;
}
inline uint2 load_shared_2_of(uint32_t address, int rank) {
    return *reinterpret_cast<uint2*>(emulation::at(*emulation::now->block->beside[rank], address, 8));
}
inline void copy_shared_to(int rank, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    emulation::Block &block = *emulation::now->block, &there = *block.beside[rank];
    emulation::flying.push_back([=, &block, &there] {
        for (uint32_t at = 0; at < bytes; at += 16) memcpy(emulation::at(there, to + at, 16), emulation::at(block, from + at, 16), 16);
        arrived(barrier_at(barrier, there), 0, -static_cast<int>(bytes));
    });
}
inline void arrive_before_bytes(uint32_t address, uint32_t bytes) {
    arrived(barrier_at(address), 1, bytes);
    others_go_on();
}
struct TensorMap {  // as emulated.py has it
    const unsigned char* from;
    int64_t rows, columns, box_rows, may_end, unused[11];  // whether a box may reach behind the last row
};
inline void copy_tile(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, int ranks) {
    const int64_t most = map.may_end ? 1 : map.box_rows;  // rows that are there
    if (to % 1024 || column < 0 || row < 0 || column + 128 > map.columns || row + most > map.rows) emulation::fail("no such tile");
    for (unsigned rank = 0; rank < emulation::cluster; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        emulation::Block& block = *emulation::now->block->beside[rank];
        emulation::flying.push_back([=, &block] {
            for (uint32_t at = 0; at < map.box_rows * 128; at += 16) {
                unsigned char* place = emulation::at(block, emulation::Tile::swizzled(to + at), 16);
                const int64_t of = row + at / 128;
                if (of < map.rows) memcpy(place, map.from + of * map.columns + column + at % 128, 16);
                else memset(place, 0, 16);  // as behind the end of a tensor
            }
            arrived(barrier_at(barrier, block), 0, -static_cast<int>(map.box_rows) * 128);
        });
    }
}
inline void copy_tile(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier) {
    copy_tile(to, map, column, row, barrier, 1 << cluster_rank());
}
inline void copy_tile_to_both(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier) {
    copy_tile(to, map, column, row, barrier, 3);
}
inline void arrive_after_copies(uint32_t address) {
    auto& copies = emulation::now->copies;
    copies.push_back([=] { arrived(address); });
    if (emulation::chance() % 2) emulation::settle(copies);
    others_go_on();
}
inline void wait_for_turn(uint32_t address, uint32_t turn) {
    while (barrier_at(address).phase % 2 == turn % 2) emulation::pass();
}
inline uint32_t load_shared(uint32_t address) { return *reinterpret_cast<uint32_t*>(emulation::at(address, 4)); }
inline float load_shared_float(uint32_t address) { return bits_as<float>(load_shared(address)); }
inline uint2 load_shared_2(uint32_t address) { return *reinterpret_cast<uint2*>(emulation::at(address, 8)); }
inline uint4 load_shared_4(uint32_t address) { return *reinterpret_cast<uint4*>(emulation::at(address, 16)); }
inline void store_shared(uint32_t address, uint32_t x) { *reinterpret_cast<uint32_t*>(emulation::at(address, 4)) = x; }
inline void store_shared_2(uint32_t address, uint2 x) { *reinterpret_cast<uint2*>(emulation::at(address, 8)) = x; }
inline void store_shared_4(uint32_t address, uint4 x) { *reinterpret_cast<uint4*>(emulation::at(address, 16)) = x; }
inline uint32_t load_shared_half(uint32_t address) { return *reinterpret_cast<uint16_t*>(emulation::at(address, 2)); }
inline void store_shared_half(uint32_t address, uint32_t x) { *reinterpret_cast<uint16_t*>(emulation::at(address, 2)) = x; }
inline void store_shared_half_if(bool stored, uint32_t address, uint32_t x) {
    if (stored) store_shared_half(address, x);
}
inline void store_shared_byte_if(bool stored, uint32_t address, uint32_t x) {
    if (stored) *emulation::at(address, 1) = x;
}
inline uint32_t swap_shared_half(uint32_t address, uint32_t expected, uint32_t x) {
    const uint32_t old = load_shared_half(address);
    if (old == expected) store_shared_half(address, x);
    return old;
}
inline void or_shared(uint32_t address, uint32_t bits) { *reinterpret_cast<uint32_t*>(emulation::at(address, 4)) |= bits; }
inline uint32_t add_to_counter(uint32_t* counter, uint32_t x) {
    const uint32_t old = *counter;
    *counter += x;
    return old;
}
inline uint32_t load_counter(const uint32_t* counter) {
    emulation::pass();
    return *counter;
}
inline uint4 load_written(const void* from) { return *static_cast<const uint4*>(from); }
inline uint32_t load_list(const uint32_t* from) { return *from; }
inline uint32_t bf16_bits(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t x = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto half = [=](uint32_t of) { return static_cast<double>(bits_as<float>(of >> shift << 16)); };
        x |= bf16_bits(static_cast<float>(half(a) * half(b) + half(c))) << shift;
    }
    return x;
}
inline uint32_t multiply_bf16(uint32_t a, uint32_t b) { return multiply_add_bf16(a, b, 0x80008000); }  // and -0, which keeps signs
inline uint32_t fp8_bits(float x) {  // the nearest of all, the even one of two
    uint32_t nearest = 0;
    for (uint32_t bits = 1; bits < 127; ++bits) {
        const float apart = fabsf(fabsf(x) - emulation::E4M3[bits]), before = fabsf(fabsf(x) - emulation::E4M3[nearest]);
        if (apart < before || (apart == before && bits % 2 == 0)) nearest = bits;
    }
    return nearest | (std::signbit(x) ? 128 : 0);
}
inline uint32_t pack_fp8(float low, float high) { return fp8_bits(low) | fp8_bits(high) << 8; }
inline uint4 load_early(const void* from) { return *static_cast<const uint4*>(from); }
inline uint4 load_once(const void* from) { return *static_cast<const uint4*>(from); }
inline const std::array<float, 1 << 16> HALVES = [] {
    std::array<float, 1 << 16> values;
    for (int x = 0; x < 1 << 16; ++x) values[x] = static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(x)));
    return values;
}();
inline uint2 unpack_fp8(uint32_t four) {
    uint32_t pairs[2] = {};
    for (int i = 0; i < 4; ++i) {
        const auto half = static_cast<_Float16>(emulation::E4M3[four >> 8 * i & 255]);
        pairs[i / 2] |= static_cast<uint32_t>(bits_as<uint16_t>(half)) << i % 2 * 16;
    }
    return {pairs[0], pairs[1]};
}
template <class Value>
void multiply_few(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Value value) {
    struct {
        float upper[4], lower[4], other[4];
    } own;
    const auto unpack = [&](float (&to)[4], uint32_t near, uint32_t far) {
        to[0] = value(near & 0xffff), to[1] = value(near >> 16), to[2] = value(far & 0xffff), to[3] = value(far >> 16);
    };
    unpack(own.upper, a[0], a[2]);
    unpack(own.lower, a[1], a[3]);
    unpack(own.other, b[0], b[1]);
    const uint64_t* all = emulation::meet_warp(reinterpret_cast<uint64_t>(&own));
    const int lane = emulation::now->thread.x % 32;
    for (int i = 0; i < 4; ++i) {
        double sum = d[i];
        for (int piece = 0; piece < 4; ++piece) {
            const auto* lines = reinterpret_cast<const decltype(own)*>(all[lane / 4 * 4 + piece]);
            const auto* columns = reinterpret_cast<const decltype(own)*>(all[(lane % 4 * 2 + i % 2) * 4 + piece]);
            const float* line = i < 2 ? lines->upper : lines->lower;
            for (int k = 0; k < 4; ++k) sum += static_cast<double>(line[k]) * columns->other[k];
        }
        d[i] = static_cast<float>(sum);
    }
    emulation::meet_warp(0);  // until then others read what this thread has here
}
inline void multiply_few_half(float (&d)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint32_t x, uint32_t y) {
    multiply_few(d, {a, b, c, e}, {x, y}, [](uint32_t bits) { return HALVES[bits]; });
}
inline void multiply_few_bf16(float (&d)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint32_t x, uint32_t y) {
    multiply_few(d, {a, b, c, e}, {x, y}, [](uint32_t bits) { return bits_as<float>(bits << 16); });
}
inline float divide_fast(float a, float b) { return a / b; }
inline float divide_full(float a, float b) { return a / b; }
inline float clamped(float x, float most) { return x != x ? most : copysignf(fminf(fabsf(x), most), x); }  // a GPU's NaN is positive
inline float rsqrt_fast(float x) { return 1 / sqrtf(x); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline uint32_t made_again(uint32_t x) { return x; }
inline void products_begin() {}
inline void products_commit() { emulation::now->committed.push_back(emulation::now->products.size()); }
template <int left> void products_wait() {  // of a warp together
    auto& committed = emulation::now->committed;
    while (committed.size() > left) {
        const size_t count = committed.front();
        emulation::settle(emulation::now->products, count);
        committed.erase(committed.begin());
        for (size_t& later : committed) later -= count;
    }
    emulation::meet_warp(0);
}
template <int N> void score(float (&d)[N], uint64_t a, uint64_t b, bool add) {
    emulation::later(emulation::now->products, [&d, add, left = emulation::Tile(a), right = emulation::Tile(b)] {
        const auto of_left = [&](int row, int k) { return left.along_k(row, k); };
        emulation::multiply<16>(d, add, of_left, [&](int k, int column) { return right.along_k(column, k); });
    });
}
inline void weigh(float (&d)[128], uint64_t a, uint64_t b) {
    emulation::later(emulation::now->products, [&d, left = emulation::Tile(a), right = emulation::Tile(b)] {
        const auto of_left = [&](int row, int k) { return left.along_k(row, k); };
        emulation::multiply<16>(d, true, of_left, [&](int k, int column) { return right.across_k(k, column); });
    });
}
template <int N> void multiply_fp8(float (&d)[N], uint64_t a, uint64_t b, bool add) {
    emulation::later(emulation::now->products, [&d, add, left = emulation::Tile(a), right = emulation::Tile(b)] {
        const auto of_left = [&](int row, int k) { return left.fp8_along_k(row, k); };
        emulation::multiply<32>(d, add, of_left, [&](int k, int column) { return right.fp8_along_k(column, k); });
    });
}

#endif
