// The tile registers of AMX: eight, each of sixteen rows of 64 bytes. A product of two is sixteen rows times sixteen sums,
// 32 terms each: of every sum the even and the odd terms have sums of their own, which are then added to what there was.
#pragma once

#include "simd.h"

namespace tandem {

// Whether products of T are computed by tiles
template <class T>
constexpr bool HAS_TILES = false;

constexpr int TILE_ROWS = 16;

// Whoever computes with a T has them meanwhile, and not longer: while a thread has some, the system saves all of them.
template <class T>
class TileRegisters {};

#if defined(__AMX_BF16__)

template <>
constexpr bool HAS_TILES<bf16> = true;

// Not made where it is used: compilers do not know that all of it is read.
inline constexpr struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} ALL_TILES;

template <>
class TileRegisters<bf16> {
  public:
    TileRegisters() { _tile_loadconfig(&ALL_TILES); }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
};

// Compilers do not know that a tile is loaded from memory: what was written there has to be there before.
inline void written() { asm volatile("" ::: "memory"); }

#endif

}  // namespace tandem
