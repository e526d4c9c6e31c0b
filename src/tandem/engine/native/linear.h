// Products of activations with a weight: one that keeps its layout in the file, [outputs, inputs], and is read once, in
// place; or one that is packed (`products_packed.h`, `products_codes.h`, `products_codes_fp32.h`).
//
//     y[m, n] = sum over k of x[m, k] * weight[n, k]
//
// Rows of x are put before into the order in which they are read (`InputRows`): where their length is a power of two, the
// same inputs of all of them would take the same places of the first cache. A block of outputs is multiplied with tiles of
// rows, one after the other, while the next block is fetched (`ahead.h`). How a few outputs and a tile are multiplied
// depends on the registers there are: `products_avx2.h`, `products_avx512.h`, `products_amx.h`.
//
// Every sum has its own accumulators and takes its terms in order of k, so the bits of a row do not depend on how many
// rows there are, nor on who computes them. Which accumulators, depends on what the processor is used for:
//
//     fp32      16 lanes; lane i takes the terms i, i + 16, ... with fused products; then one tree. The same on all.
//     AVX-512   bf16 dot products: 16 lanes of pairs of terms
//     AMX       tiles: even and odd terms of each 32 by themselves, then their sums to what there is
//     packed    without tiles a lane is an output, and takes all of its terms
#pragma once

#include "buffer.h"
#include "pool.h"

#if defined(__AVX512F__)
#include "products_amx.h"
#include "products_codes.h"
#include "products_packed.h"
#else
#include "products_avx2.h"
#endif

#include "products_codes_fp32.h"

namespace tandem {

// --- x, as the products of a type want it --------------------------------------------------------------------------------

// Whether rows that were prepared as X are multiplied with packed weights as they lie
template <class X>
constexpr bool HAS_PACKED = false;

#if defined(__AVX512BF16__)

template <>
constexpr bool HAS_PACKED<bf16> = true;

#endif

// Whether they are multiplied with packed codes as they lie; and whether sums are scaled then, or else the codes
template <class X>
constexpr bool HAS_PACKED_CODES = false;

template <>
constexpr bool HAS_PACKED_CODES<float> = true;

template <class X>
constexpr bool SCALES_SUMS = false;

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

template <>
constexpr bool HAS_PACKED_CODES<bf16> = true;

template <>
constexpr bool SCALES_SUMS<bf16> = true;

#endif

// Rows that go through a block together, at most; and the bytes of those that are read again for each block: in the second
// cache, beside two blocks of a weight.
#if defined(__AMX_BF16__)

template <>
constexpr bool HAS_PACKED<Tile> = true;

constexpr int GROUP_ROWS = 128;
constexpr int64_t INPUT_BYTES = 1 << 20;

#else

constexpr int GROUP_ROWS = 96;
constexpr int64_t INPUT_BYTES = 400 << 10;

#endif

// What `products` reads, in tiles of rows: as few as there can be, equally high. rows may be none
template <class T>
struct Input {
#if defined(__AVX512BF16__)
    using type = T;
#else
    using type = float;
#endif

    static int tile_rows(int64_t rows) {
        return rows <= MICRO_ROWS ? int(std::max<int64_t>(1, rows)) : int(ceil_div(rows, ceil_div(rows, MICRO_ROWS)));
    }
    static int64_t padded_inputs(int64_t inputs) { return padded<type>(inputs); }
    static int64_t tile_size(int rows, int64_t inputs) { return rows * padded<type>(inputs); }
};

#if defined(__AMX_BF16__)

template <>
struct Input<bf16> {
    using type = Tile;

    static int tile_rows(int64_t) { return TILE_ROWS; }
    static int64_t padded_inputs(int64_t inputs) { return ceil_div(inputs, PAIRED_INPUTS) * PAIRED_INPUTS; }
    static int64_t tile_size(int, int64_t inputs) { return ceil_div(inputs, PAIRED_INPUTS); }
};

#endif

// Rows of inputs as products read them. They are filled from rows in memory, or by whoever computes them.
template <class T>
class InputRows {
    using In = Input<T>;

  public:
    using type = typename In::type;

    // memory: has to outlive them, and is not asked for anything else meanwhile
    InputRows(Buffer& memory, int64_t rows, int64_t inputs)
        : rows_(rows), inputs_(inputs), padded_(In::padded_inputs(inputs)), tile_(In::tile_rows(rows)),
          tile_size_(In::tile_size(tile_, inputs)) {
        tiles_ = (type*)memory.get(num_tiles() * tile_bytes());
    }

    int64_t rows() const { return rows_; }
    int64_t inputs() const { return inputs_; }
    int tile() const { return tile_; }  // rows
    int64_t num_tiles() const { return ceil_div(rows_, tile_); }
    int64_t tile_bytes() const { return tile_size_ * sizeof(type); }
    // row: the first one of a tile
    const type* from(int64_t row) const { return tiles_ + row / tile_ * tile_size_; }

    // body(tile): on one thread where another one would be awake too late
    template <class Body>
    void for_tiles(int threads, const Body& body) const {
        constexpr int64_t FEW = 24;  // rows
        Pool::instance().run(rows_ < FEW ? 1 : threads, num_tiles(), body);
    }

    // Inputs [k, k + LANES). Those behind the last have to be put, too, as zeros, up to a whole block; what is not there
    // for them is left out.
    void put(int64_t row, int64_t k, F16 values) {
        if (k >= padded_) return;
        const auto tile = uint32_t(row) / uint32_t(tile_);
        const auto first = int64_t(tile) * tile_;
        const int count = int(std::min<int64_t>(tile_, rows_ - first));
        place<T>(values, int(row - first), k, count, inputs_, tiles_ + tile * tile_size_);
    }

    // x: [rows, inputs]
    void fill(const T* x, int threads) {
        for_tiles(threads, [&](int64_t tile) {
            const int64_t first = tile * tile_;
            const int count = int(std::min<int64_t>(tile_, rows_ - first));
            for (int64_t k = 0; k < padded_; k += LANES)
                for (int row = 0; row < count; row++) {
                    const F16 values = k < inputs_ ? load_at(x + (first + row) * inputs_, k, inputs_) : zeros();
                    place<T>(values, row, k, count, inputs_, tiles_ + tile * tile_size_);
                }
        });
    }

  private:
    int64_t rows_, inputs_, padded_;
    int tile_;
    int64_t tile_size_;
    type* tiles_;
};

}  // namespace tandem
