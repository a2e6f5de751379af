// Shared memory: its addresses, mbarriers, and what is copied to it.

#pragma once

#include "fibers.h"

#define SHARED_MEMORY(name) unsigned char* name = reinterpret_cast<unsigned char*>(emulation::me().block->base)

inline uint32_t shared_address(const void* pointer) {
    emulation::Block& block = *emulation::me().block;
    const auto offset = static_cast<const char*>(pointer) - block.base;
    if (offset < 0 || offset >= emulation::SHARED) emulation::fail("not a pointer to shared memory");
    return (block.rank + 1) * emulation::WINDOW + static_cast<uint32_t>(offset);
}

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
