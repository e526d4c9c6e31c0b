// Products with AMX and a packed weight (`packed.h`): tiles of sixteen rows times the sixteens of outputs of a block, 32
// inputs at a time.
//
// The processor wants the pairs of inputs as the rows of its right operand, and so they lie in a packed weight; rows of x
// are its left operand as they are. Two tiles of rows at a time: four products for four tiles that are read.
#pragma once

#include "ahead.h"
#include "buffer.h"
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

inline void products_of_tiles(const Tile* x, int rows, const char* weight, int64_t inputs, Ahead& ahead, float* sums) {
    const int64_t steps = ceil_div(inputs, PAIRED_INPUTS);
    written();
    for (int m = 0; m < rows; m += 2 * TILE_ROWS, x += 2 * steps, sums += 2 * TILE_ROWS * BLOCK)
        if (rows - m > TILE_ROWS)
            micro_tiles<2>(x, steps, weight, ahead, sums);
        else
            micro_tiles<1>(x, steps, weight, ahead, sums);
}

// As for other instructions, see `products_packed.h`. sums has whole tiles.
inline void products_packed(const Tile* x, int rows, int, const char* weight, int64_t inputs, const char* next,
                            float* sums) {
    const int64_t bytes = BLOCK * packed_row_bytes(inputs);
    const int times = times_multiplied(rows);
    Ahead ahead(weight, next, bytes, times == 1 ? std::min(NEAR_BYTES, bytes) : bytes, times);
    products_of_tiles(x, rows, weight, inputs, ahead, sums);
}

template <>
inline int times_read<Tile, bf16>(int rows, int) { return times_multiplied(rows) + 1; }

template <>
inline int outputs_ahead<Tile>(int, int outputs, int64_t) { return outputs; }

template <>
constexpr int EXPANDED_ROWS<Tile, bf16> = 0;

// A weight in rows is packed first, in the second cache.
inline void products(const Tile* x, int rows, int, const bf16* weight, int outputs, int64_t inputs, Ahead ahead,
                     float* sums) {
    static thread_local Buffer buffer;
    char* packed = (char*)buffer.get(BLOCK * packed_row_bytes(inputs));
    pack_block(weight, outputs, inputs, (uint32_t*)packed, ahead);
    products_of_tiles(x, rows, packed, inputs, ahead, sums);
}

#endif

}  // namespace tandem
