// The tile registers of AMX: eight, each of sixteen rows of 64 bytes. A product of two is sixteen rows times sixteen sums,
// 32 terms each: of every sum the even and the odd terms have sums of their own, which are then added to what there was.
#pragma once

#include <type_traits>

#include "simd.h"

namespace tandem {

// Whether products of T are computed by tiles
template <class T>
constexpr bool HAS_TILES = false;

constexpr int TILE_ROWS = 16;

#if defined(__AMX_BF16__)

template <>
constexpr bool HAS_TILES<bf16> = true;

// Whoever uses them, says so before and after: while a thread has some, the system saves all of them with it.
class TileRegisters {
  public:
    TileRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
};

// Compilers do not know that a tile is loaded from memory: what was written there has to be there before.
inline void written() { asm volatile("" ::: "memory"); }

#endif

struct NoRegisters {};

#if defined(__AMX_BF16__)
template <class T>
using RegistersOf = std::conditional_t<HAS_TILES<T>, TileRegisters, NoRegisters>;
#else
template <class T>
using RegistersOf = NoRegisters;
#endif

}  // namespace tandem
