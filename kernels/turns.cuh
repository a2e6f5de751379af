// Places in shared memory that are filled and emptied in turns, as barriers tell.

#pragma once

#include "hopper.cuh"

// `count` places, with two barriers each, which lie at `at`.
template <int count> struct Turns {
    static constexpr uint32_t BYTES = 2 * count * 8;
    uint32_t at;

    // So many arrive when a place is filled, and so many when it is emptied.
    __device__ __forceinline__ void start(int filling, int emptying) const {
#pragma unroll
        for (int place = 0; place < count; ++place) {
            start_barrier(filled(place), filling);
            start_barrier(emptied(place), emptying);
        }
    }
    __device__ __forceinline__ static uint32_t place(uint32_t turn) { return turn % count; }
    __device__ __forceinline__ uint32_t filled(uint32_t turn) const { return at + place(turn) * 8; }
    __device__ __forceinline__ uint32_t emptied(uint32_t turn) const { return at + (count + place(turn)) * 8; }
    __device__ __forceinline__ void wait_for(uint32_t turn) const { wait_for_turn(filled(turn), turn / count); }
    __device__ __forceinline__ void wait_for_room(uint32_t turn) const {
        if (turn >= count) wait_for_turn(emptied(turn), turn / count - 1);
    }
};
