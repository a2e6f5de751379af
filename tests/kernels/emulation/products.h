// What the tensor cores do, and how they read what they multiply.

#pragma once

#include "fibers.h"

namespace emulation {

inline float from_bf16(uint16_t bits) { return __int_as_float(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulation

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
