// Products of activations with a weight that keeps its layout in the file, [outputs, inputs]: read once, in place.
//
//     y[m, n] = sum over k of x[m, k] * weight[n, k]
//
// Every sum has its own accumulators and takes its terms in order of k, so the bits of a row do not depend on how many
// rows there are, nor on who computes them. Which accumulators, depends on what the processor is used for:
//
//     fp32      16 lanes; lane i takes the terms i, i + 16, ... with fused products; then one tree. The same on all.
//     AVX-512   bf16 dot products: 16 lanes of pairs of terms
//     AMX       tiles of 16 outputs x 16 rows; the weight is the left operand, so that it needs no packing
#pragma once

#include <algorithm>

#include "simd.h"

namespace tandem {

constexpr int BLOCK = 32;      // outputs of one unit of work
constexpr int TILE_ROWS = 64;  // rows that go through a block together: its sums stay in the first cache

// --- fp32 accumulation: x is [rows, inputs] fp32 -----------------------------------------------------------------------

template <class W, int OUTPUTS, int ROWS>
inline void micro(const float* x, const W* weight, int64_t inputs, float* sums, int64_t stride) {
    F16 acc[OUTPUTS][ROWS];
    for (auto& row : acc)
        for (F16& one : row) one = zeros();
    const int64_t full = inputs / LANES * LANES;
    auto step = [&](auto read, int64_t k) __attribute__((always_inline)) {
        F16 w[OUTPUTS];
        for (int i = 0; i < OUTPUTS; i++) w[i] = read(weight + i * inputs + k);
        for (int j = 0; j < ROWS; j++) {
            const F16 value = read(x + j * inputs + k);
            for (int i = 0; i < OUTPUTS; i++) acc[i][j] = fma(w[i], value, acc[i][j]);
        }
    };
    for (int64_t k = 0; k < full; k += LANES) step([](const auto* p) { return load(p); }, k);
    if (const int rest = int(inputs - full)) step([rest](const auto* p) { return load_part(p, rest); }, full);
    for (int i = 0; i < OUTPUTS; i++)
        for (int j = 0; j < ROWS; j++) sums[j * stride + i] = sum(acc[i][j]);
}

#if defined(__AVX512F__)
constexpr int MICRO_ROWS = 6, MICRO_OUTPUTS = 4;
#else
constexpr int MICRO_ROWS = 3, MICRO_OUTPUTS = 2;
#endif

template <class W, int OUTPUTS, int ROWS>
inline void micro_rows(const float* x, int rows, const W* weight, int64_t inputs, float* sums) {
    if (rows == ROWS) return micro<W, OUTPUTS, ROWS>(x, weight, inputs, sums, BLOCK);
    if constexpr (ROWS > 1) micro_rows<W, OUTPUTS, ROWS - 1>(x, rows, weight, inputs, sums);
}

template <class W>
inline void products(const float* x, int rows, const W* weight, int outputs, int64_t inputs, float* sums) {
    for (int m = 0; m < rows; m += MICRO_ROWS) {
        const int some = std::min(MICRO_ROWS, rows - m);
        const float* from = x + m * inputs;
        float* to = sums + m * BLOCK;
        int n = 0;
        if (some == 1)
            for (; n + 4 <= outputs; n += 4) micro<W, 4, 1>(from, weight + n * inputs, inputs, to + n, BLOCK);
        for (; n + MICRO_OUTPUTS <= outputs; n += MICRO_OUTPUTS)
            micro_rows<W, MICRO_OUTPUTS, MICRO_ROWS>(from, some, weight + n * inputs, inputs, to + n);
        for (; n < outputs; n++) micro_rows<W, 1, MICRO_ROWS>(from, some, weight + n * inputs, inputs, to + n);
    }
}

// --- bf16 dot products: x is [rows, inputs] bf16 -----------------------------------------------------------------------

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline __m512bh some_pairs(const bf16* p, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p);
}

template <int OUTPUTS, int ROWS>
inline void micro(const bf16* x, const bf16* weight, int64_t inputs, float* sums) {
    __m512 acc[OUTPUTS][ROWS];
    for (auto& row : acc)
        for (__m512& one : row) one = _mm512_setzero_ps();
    const int64_t full = inputs / 32 * 32;
    auto step = [&](auto read, int64_t k) __attribute__((always_inline)) {
        __m512bh w[OUTPUTS];
        for (int i = 0; i < OUTPUTS; i++) w[i] = read(weight + i * inputs + k);
        for (int j = 0; j < ROWS; j++) {
            const __m512bh value = read(x + j * inputs + k);
            for (int i = 0; i < OUTPUTS; i++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], w[i], value);
        }
    };
    for (int64_t k = 0; k < full; k += 32) step(pairs, k);
    if (const int rest = int(inputs - full)) step([rest](const bf16* p) { return some_pairs(p, rest); }, full);
    for (int i = 0; i < OUTPUTS; i++)
        for (int j = 0; j < ROWS; j++) sums[j * BLOCK + i] = sum(F16{acc[i][j]});
}

template <int OUTPUTS, int ROWS>
inline void micro_rows(const bf16* x, int rows, const bf16* weight, int64_t inputs, float* sums) {
    if (rows == ROWS) return micro<OUTPUTS, ROWS>(x, weight, inputs, sums);
    if constexpr (ROWS > 1) micro_rows<OUTPUTS, ROWS - 1>(x, rows, weight, inputs, sums);
}

inline void products(const bf16* x, int rows, const bf16* weight, int outputs, int64_t inputs, float* sums) {
    for (int m = 0; m < rows; m += 6) {
        const int some = std::min(6, rows - m);
        int n = 0;
        for (; n + 4 <= outputs; n += 4)
            micro_rows<4, 6>(x + m * inputs, some, weight + n * inputs, inputs, sums + m * BLOCK + n);
        for (; n < outputs; n++)
            micro_rows<1, 6>(x + m * inputs, some, weight + n * inputs, inputs, sums + m * BLOCK + n);
    }
}

#endif

// --- AMX: x is [ceil(rows / 16), ceil(inputs / 32)] tiles ----------------------------------------------------------------

#if defined(__AMX_BF16__)

constexpr int TILE_INPUTS = 32;

struct alignas(64) Tile {
    uint32_t pairs[16][16];  // of inputs 2 * i and 2 * i + 1 (first index), of row j (second)
};

inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}

// Compilers do not know that a tile is loaded from memory: what was written there has to be there before.
inline void written() { asm volatile("" ::: "memory"); }

// Zeros where there are no rows or inputs.
inline void pack_tiles(const bf16* x, int rows, int64_t inputs, Tile* tiles) {
    alignas(64) static const bf16 nothing[TILE_INPUTS] = {};
    alignas(64) bf16 ends[16][TILE_INPUTS];
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
        const int64_t count = std::min<int64_t>(TILE_INPUTS, inputs - k);
        const uint32_t* from[LANES];
        for (int m = 0; m < 16; m++) {
            const bf16* row = m < rows ? x + m * inputs + k : nothing;
            if (m < rows && count < TILE_INPUTS) {
                std::memset(ends[m], 0, sizeof ends[m]);
                std::memcpy(ends[m], row, count * sizeof(bf16));
                row = ends[m];
            }
            from[m] = (const uint32_t*)row;
        }
        transpose(from, tiles++->pairs[0]);
    }
}

// A tile of weights that does not fill it, with zeros.
inline void copy_tile(const bf16* weight, int outputs, int64_t count, int64_t inputs, bf16 (*to)[TILE_INPUTS]) {
    std::memset(to, 0, 16 * sizeof *to);
    for (int n = 0; n < outputs; n++) std::memcpy(to[n], weight + n * inputs, count * sizeof(bf16));
}

// Tiles 0..3 hold sums of two by two, 4 and 5 weights, 6 and 7 rows of x.
template <int OUTPUT_TILES, int ROW_TILES>
inline void micro_tiles(const Tile* x, const bf16* weight, int outputs, int64_t inputs, float (*sums)[16][16]) {
    _tile_zero(0);
    if (OUTPUT_TILES > 1) _tile_zero(1);
    if (ROW_TILES > 1) _tile_zero(2);
    if (OUTPUT_TILES > 1 && ROW_TILES > 1) _tile_zero(3);
    written();
    const int64_t num_tiles = ceil_div(inputs, TILE_INPUTS);
    const bool fills = outputs == 16 * OUTPUT_TILES;
    const int64_t full = fills ? inputs / TILE_INPUTS : 0;
    auto multiply = [&]() __attribute__((always_inline)) {
        _tile_dpbf16ps(0, 4, 6);
        if (OUTPUT_TILES > 1) _tile_dpbf16ps(1, 5, 6);
        if (ROW_TILES > 1) _tile_dpbf16ps(2, 4, 7);
        if (OUTPUT_TILES > 1 && ROW_TILES > 1) _tile_dpbf16ps(3, 5, 7);
    };
    for (int64_t t = 0; t < full; t++) {
        _tile_loadd(6, x[t].pairs, 64);
        if (ROW_TILES > 1) _tile_loadd(7, x[num_tiles + t].pairs, 64);
        _tile_loadd(4, weight + t * TILE_INPUTS, inputs * sizeof(bf16));
        if (OUTPUT_TILES > 1) _tile_loadd(5, weight + 16 * inputs + t * TILE_INPUTS, inputs * sizeof(bf16));
        multiply();
    }
    for (int64_t t = full; t < num_tiles; t++) {
        alignas(64) bf16 some[2][16][TILE_INPUTS];
        const int64_t count = std::min<int64_t>(TILE_INPUTS, inputs - t * TILE_INPUTS);
        for (int i = 0; i < OUTPUT_TILES; i++) {
            const int left = std::clamp(outputs - 16 * i, 0, 16);
            copy_tile(weight + 16 * i * inputs + t * TILE_INPUTS, left, count, inputs, some[i]);
        }
        written();
        _tile_loadd(6, x[t].pairs, 64);
        if (ROW_TILES > 1) _tile_loadd(7, x[num_tiles + t].pairs, 64);
        _tile_loadd(4, some[0], 64);
        if (OUTPUT_TILES > 1) _tile_loadd(5, some[1], 64);
        multiply();
    }
    _tile_stored(0, sums[0], 64);
    if (OUTPUT_TILES > 1) _tile_stored(1, sums[1], 64);
    if (ROW_TILES > 1) _tile_stored(2, sums[2], 64);
    if (OUTPUT_TILES > 1 && ROW_TILES > 1) _tile_stored(3, sums[3], 64);
}

// A tile of sums, [output][row], to rows of the block
inline void turn(const float (*tile)[16], int rows, float* sums) {
    const uint32_t* from[LANES];
    alignas(64) float turned[16][16];
    for (int i = 0; i < 16; i++) from[i] = (const uint32_t*)tile[i];
    transpose(from, (uint32_t*)turned);
    for (int m = 0; m < rows; m++) std::memcpy(sums + m * BLOCK, turned[m], sizeof turned[m]);
}

inline void products(const Tile* x, int rows, const bf16* weight, int outputs, int64_t inputs, float* sums) {
    alignas(64) float tiles[4][16][16];
    const int64_t num_tiles = ceil_div(inputs, TILE_INPUTS);
    for (int m = 0; m < rows; m += 32) {
        const Tile* from = x + m / 16 * num_tiles;
        const bool is_wide = outputs > 16, is_high = rows - m > 16;
        if (is_wide && is_high) micro_tiles<2, 2>(from, weight, outputs, inputs, tiles);
        if (is_wide && !is_high) micro_tiles<2, 1>(from, weight, outputs, inputs, tiles);
        if (!is_wide && is_high) micro_tiles<1, 2>(from, weight, outputs, inputs, tiles);
        if (!is_wide && !is_high) micro_tiles<1, 1>(from, weight, outputs, inputs, tiles);
        for (int j = 0; j <= int(is_high); j++)
            for (int i = 0; i <= int(is_wide); i++)
                turn(tiles[2 * j + i], std::min(16, rows - m - 16 * j), sums + (m + 16 * j) * BLOCK + 16 * i);
    }
}

#endif

// --- x, as the products of a type want it --------------------------------------------------------------------------------

template <class T>
struct Input;  // what `products` reads; how many bytes; and how rows get there, in units of 16

template <>
struct Input<float> {
    using type = float;
    static int64_t bytes(int64_t, int64_t) { return 0; }
    static const float* at(const float* x, const void*, int64_t row, int64_t inputs) { return x + row * inputs; }
    static constexpr bool is_copied = false;
    static void prepare(const float*, int64_t, int64_t, int64_t, void*) {}
};

#if defined(__AMX_BF16__)

template <>
struct Input<bf16> {
    using type = Tile;
    static int64_t bytes(int64_t rows, int64_t inputs) {
        return ceil_div(rows, 16) * ceil_div(inputs, TILE_INPUTS) * int64_t(sizeof(Tile));
    }
    // row: a multiple of 16
    static const Tile* at(const bf16*, const void* prepared, int64_t row, int64_t inputs) {
        return (const Tile*)prepared + row / 16 * ceil_div(inputs, TILE_INPUTS);
    }
    static constexpr bool is_copied = true;
    static void prepare(const bf16* x, int64_t rows, int64_t inputs, int64_t unit, void* to) {
        const int64_t first = 16 * unit;
        Tile* tiles = (Tile*)to + unit * ceil_div(inputs, TILE_INPUTS);
        pack_tiles(x + first * inputs, int(std::min<int64_t>(16, rows - first)), inputs, tiles);
    }
};

#elif defined(__AVX512BF16__)

template <>
struct Input<bf16> {
    using type = bf16;
    static int64_t bytes(int64_t, int64_t) { return 0; }
    static const bf16* at(const bf16* x, const void*, int64_t row, int64_t inputs) { return x + row * inputs; }
    static constexpr bool is_copied = false;
    static void prepare(const bf16*, int64_t, int64_t, int64_t, void*) {}
};

#else

template <>
struct Input<bf16> {
    using type = float;
    static int64_t bytes(int64_t rows, int64_t inputs) { return rows * inputs * int64_t(sizeof(float)); }
    static const float* at(const bf16*, const void* prepared, int64_t row, int64_t inputs) {
        return (const float*)prepared + row * inputs;
    }
    static constexpr bool is_copied = true;
    static void prepare(const bf16* x, int64_t rows, int64_t inputs, int64_t unit, void* to) {
        const int64_t first = 16 * unit * inputs, last = std::min(rows, 16 * unit + 16) * inputs;
        for (int64_t i = first; i < last; i += LANES) store_at((float*)to, load_at(x, i, last), i, last);
    }
};

#endif

}  // namespace tandem
