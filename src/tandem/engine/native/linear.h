// Products of activations with a weight that keeps its layout in the file, [outputs, inputs]: read once, in place.
//
//     y[m, n] = sum over k of x[m, k] * weight[n, k]
//
// Rows of x are copied before, into the order in which they are read: where their length is a power of two, the same
// inputs of all of them would take the same places of the first cache. A block of outputs is multiplied with tiles of
// rows, one after the other, while the next block is fetched (`ahead.h`). How a few outputs and a tile are multiplied
// depends on the registers there are: `products_avx2.h`, `products_avx512.h`.
//
// Every sum has its own accumulators and takes its terms in order of k, so the bits of a row do not depend on how many
// rows there are, nor on who computes them. Which accumulators, depends on what the processor is used for:
//
//     fp32      16 lanes; lane i takes the terms i, i + 16, ... with fused products; then one tree. The same on all.
//     AVX-512   bf16 dot products: 16 lanes of pairs of terms
//     AMX       tiles of 16 outputs x 16 rows; the weight is the left operand, so that it needs no packing
#pragma once

#if defined(__AVX512F__)
#include "products_packed.h"
#else
#include "products_avx2.h"
#endif

namespace tandem {

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

// Nothing is fetched ahead: no machine was there to show what that brings.
template <>
inline int times_read<Tile, bf16>(int, int) { return 1; }

template <>
constexpr int EXPANDED_ROWS<Tile, bf16> = 0;

inline void products(const Tile* x, int rows, int, const bf16* weight, int outputs, int64_t inputs, const Ahead&,
                     float* sums) {
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

// Whether rows that were prepared as X are multiplied with packed weights as they lie
template <class X>
constexpr bool HAS_PACKED = false;

#if defined(__AVX512BF16__)

template <>
constexpr bool HAS_PACKED<bf16> = true;

#endif

constexpr int GROUP_ROWS = 96;  // at most, that go through a block together

// What `products` reads, in tiles of rows
template <class T>
struct Input {
#if defined(__AVX512BF16__)
    using type = T;
#else
    using type = float;
#endif

    // As few as there can be, equally high. rows may be none
    static int tile_rows(int64_t rows) {
        return rows <= MICRO_ROWS ? int(std::max<int64_t>(1, rows)) : int(ceil_div(rows, ceil_div(rows, MICRO_ROWS)));
    }
    static int64_t tile_size(int rows, int64_t inputs) { return rows * padded<type>(inputs); }
    static void prepare(const T* x, int rows, int64_t inputs, type* to) { pack_rows(x, rows, inputs, to); }
};

#if defined(__AMX_BF16__)

template <>
struct Input<bf16> {
    using type = Tile;

    static int tile_rows(int64_t) { return 16; }
    static int64_t tile_size(int, int64_t inputs) { return ceil_div(inputs, TILE_INPUTS); }
    static void prepare(const bf16* x, int rows, int64_t inputs, Tile* to) { pack_tiles(x, rows, inputs, to); }
};

#endif

}  // namespace tandem
