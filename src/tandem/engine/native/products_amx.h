// Products with AMX: tiles of sixteen rows times the sixteens of outputs of a block, 32 inputs at a time. Two tiles of rows
// at a time: four products for four tiles that are read.
//
// The processor wants the pairs of inputs as the rows of its right operand, and so they lie in a packed weight
// (`packed.h`); rows of x are its left operand as they are.
#pragma once

#include "ahead.h"
#include "packed.h"
#include "products_packed.h"
#include "tiles.h"

namespace tandem {

#if defined(__AMX_BF16__)

struct alignas(64) Tile {
    bf16 values[TILE_ROWS][PAIRED_INPUTS];
};

// See `products_avx512.h`; whatever stands in rows that are not there, shows in no other.
template <class T>
inline void place(F16 values, int row, int64_t k, int, int64_t, Tile* to) {
    store(to[k / PAIRED_INPUTS].values[row] + k % PAIRED_INPUTS, values);
}

// x: a tile of rows, [steps], and behind it a second one; sums: [16 * ROW_TILES][BLOCK]. Tiles 0 to 3 are sums, 4 and 5
// weights, 6 and 7 rows.
template <int ROW_TILES>
inline void micro_tiles(const Tile* x, int64_t steps, const char* weight, Ahead& ahead, float* sums) {
    constexpr int LINES = 2 * TILE_ROWS, ROW_BYTES = BLOCK * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES > 1) _tile_zero(2);
    if (ROW_TILES > 1) _tile_zero(3);
    Ahead fetched = ahead;  // in registers
    for (int64_t k = 0; k < steps; k++, weight += LINES * LINE_BYTES) {
        fetched.read(LINES);
        _tile_loadd(6, x[k].values, LINE_BYTES);
        _tile_loadd(4, weight, 2 * LINE_BYTES);
        _tile_loadd(5, weight + LINE_BYTES, 2 * LINE_BYTES);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if (ROW_TILES == 1) continue;
        _tile_loadd(7, x[steps + k].values, LINE_BYTES);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
    }
    ahead = fetched;
    _tile_stored(0, sums, ROW_BYTES);
    _tile_stored(1, sums + LANES, ROW_BYTES);
    if (ROW_TILES == 1) return;
    _tile_stored(2, sums + TILE_ROWS * BLOCK, ROW_BYTES);
    _tile_stored(3, sums + TILE_ROWS * BLOCK + LANES, ROW_BYTES);
}

// How often each line of a block is read
inline int times_multiplied(int rows) { return int(ceil_div(rows, 2 * TILE_ROWS)); }

// As for other instructions, see `products_packed.h`. sums has whole tiles.
inline void products_packed(const Tile* x, int rows, int, const char* weight, int64_t inputs, const char* next,
                            float* sums) {
    const int64_t bytes = BLOCK * packed_row_bytes(inputs), steps = ceil_div(inputs, PAIRED_INPUTS);
    const int times = times_multiplied(rows);
    Ahead ahead(weight, next, bytes, times == 1 ? std::min(NEAR_BYTES, bytes) : bytes, times);
    written();
    for (int m = 0; m < rows; m += 2 * TILE_ROWS, x += 2 * steps, sums += 2 * TILE_ROWS * BLOCK)
        if (rows - m > TILE_ROWS)
            micro_tiles<2>(x, steps, weight, ahead, sums);
        else
            micro_tiles<1>(x, steps, weight, ahead, sums);
}

// --- weights in rows -----------------------------------------------------------------------------------------------------
//
// To pack a weight for each use would take longer than its products with few rows. So there it is the left operand, where
// it stands, and the tiles of x are turned to be the right one, once for all weights: the same sums, [output][row].

inline void turn(const Tile& x, Tile& to) {
    const uint32_t* from[LANES];
    for (int m = 0; m < TILE_ROWS; m++) from[m] = (const uint32_t*)x.values[m];
    transpose(from, (uint32_t*)to.values);
}

// Sums of a block, zeros behind its last output. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows.
template <int ROW_TILES>
inline void micro_turned(const Tile* x, const bf16* weight, int outputs, int64_t inputs, Ahead& ahead,
                         float (*sums)[TILE_ROWS][LANES]) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES > 1) _tile_zero(2);
    if (ROW_TILES > 1) _tile_zero(3);
    const int64_t steps = ceil_div(inputs, PAIRED_INPUTS);
    Ahead fetched = ahead;  // in registers
    // distance: of rows of the weight, in elements
    auto step = [&](int64_t k, const bf16* from, int64_t distance) __attribute__((always_inline)) {
        fetched.read(BLOCK);
        _tile_loadd(6, x[k].values, LINE_BYTES);
        if (ROW_TILES > 1) _tile_loadd(7, x[steps + k].values, LINE_BYTES);
        _tile_loadd(4, from, distance * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        if (ROW_TILES > 1) _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, from + TILE_ROWS * distance, distance * sizeof(bf16));
        _tile_dpbf16ps(1, 5, 6);
        if (ROW_TILES > 1) _tile_dpbf16ps(3, 5, 7);
    };
    const int64_t full = outputs == BLOCK ? inputs / PAIRED_INPUTS : 0;
    for (int64_t k = 0; k < full; k++) step(k, weight + k * PAIRED_INPUTS, inputs);
    for (int64_t k = full; k < steps; k++) {  // what does not fill a tile, with zeros
        alignas(64) bf16 some[BLOCK][PAIRED_INPUTS] = {};
        const int64_t first = k * PAIRED_INPUTS, count = std::min(PAIRED_INPUTS, inputs - first);
        for (int n = 0; n < outputs; n++) std::memcpy(some[n], weight + n * inputs + first, count * sizeof(bf16));
        written();
        step(k, some[0], PAIRED_INPUTS);
        written();
    }
    ahead = fetched;
    _tile_stored(0, sums[0], LINE_BYTES);
    _tile_stored(1, sums[1], LINE_BYTES);
    if (ROW_TILES > 1) _tile_stored(2, sums[2], LINE_BYTES);
    if (ROW_TILES > 1) _tile_stored(3, sums[3], LINE_BYTES);
}

template <>
inline int times_read<Tile, bf16>(int rows, int) { return times_multiplied(rows); }

template <>
inline int outputs_ahead<Tile>(int, int outputs, int64_t) { return outputs; }

template <>
constexpr int EXPANDED_ROWS<Tile, bf16> = 0;

// x: turned; sums has whole tiles.
inline void products(const Tile* x, int rows, int, const bf16* weight, int outputs, int64_t inputs, Ahead ahead,
                     float* sums) {
    alignas(64) float tiles[4][TILE_ROWS][LANES];
    const int64_t steps = ceil_div(inputs, PAIRED_INPUTS);
    written();
    for (int m = 0; m < rows; m += 2 * TILE_ROWS, x += 2 * steps, sums += 2 * TILE_ROWS * BLOCK) {
        const bool is_high = rows - m > TILE_ROWS;
        is_high ? micro_turned<2>(x, weight, outputs, inputs, ahead, tiles)
                : micro_turned<1>(x, weight, outputs, inputs, ahead, tiles);
        for (int tile = 0; tile < (is_high ? 4 : 2); tile++) {
            const uint32_t* from[LANES];
            for (int n = 0; n < LANES; n++) from[n] = (const uint32_t*)tiles[tile][n];
            transpose(from, (uint32_t*)sums + tile / 2 * TILE_ROWS * BLOCK + tile % 2 * LANES, BLOCK);
        }
    }
}

#endif

}  // namespace tandem
