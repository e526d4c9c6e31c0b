// Attention of few rows with bf16 products: keys and values go from their pages into registers, are multiplied there with
// all of the rows, and are not written down again. To turn a block in memory takes longer than the products of few rows.
// Every sum takes the terms of `attention.h` in the same order, so the bits are the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "kv_pages.h"
#include "mixture.h"
#include "simd.h"

namespace tandem {

// There are none where tiles multiply, or where products are of fp32.
template <class T>
struct FewRows {
    static bool fits(int, const KvPages<T>&) { return false; }
    template <class... Given>
    void set(const Given&...) {}
    template <class... Given>
    void attend(const Given&...) {}
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

template <>
class FewRows<bf16> {
  public:
    static bool fits(int rows, const KvPages<bf16>& kv) { return rows <= MOST && kv.head_dim % WIDTH == 0; }

    void set(int row, const bf16* query, int64_t head_dim) {
        std::memcpy(queries_[row], query, head_dim * sizeof(bf16));
    }

    // All blocks of the rows that were set. next: what this thread most likely reads then, whose first block is fetched
    // while it is at the last one here; or none. mixture: cleared
    void attend(int rows, const KvPages<bf16>& kv, const SeenKeys& seen, const std::optional<SeenKeys>& next,
                const int64_t* positions, int64_t window, float scale, Mixture<bf16>& mixture) {
        attend_some<MOST>(rows, kv, seen, next, positions, window, scale, mixture);
    }

  private:
    static constexpr int MOST = 8;  // whose sums stay in registers
    static constexpr int PARTS = PARTS_OF<bf16>, KEYS = KEYS_OF<bf16>;
    static constexpr int64_t WIDTH = 2 * LANES;  // values in a register

    // Where keys and values of sixteen positions stand, in rows that follow each other
    struct Sixteen {
        const char *keys, *values;
    };
    using Block = std::array<Sixteen, PARTS>;

    template <int ROWS>
    void attend_some(int rows, const KvPages<bf16>& kv, const SeenKeys& seen, const std::optional<SeenKeys>& next,
                     const int64_t* positions, int64_t window, float scale, Mixture<bf16>& mixture) {
        if constexpr (ROWS > 1)
            if (rows < ROWS)
                return attend_some<ROWS - 1>(rows, kv, seen, next, positions, window, scale, mixture);
        const int64_t dim = kv.head_dim;
        int64_t key = seen.least / KEYS * KEYS;
        for (Block found = block_at(kv, seen, key), then; key <= seen.last; key += KEYS, found = then) {
            if (key + KEYS <= seen.last)
                then = block_at(kv, seen, key + KEYS);
            else
                then = next ? block_at(kv, *next, next->least / KEYS * KEYS) : found;
            for (int part = 0; part < PARTS; part++)
                if (!is_whole(kv, seen, key + part * LANES)) found[part] = made(part, kv, seen, key + part * LANES);
            alignas(64) F16 scores[ROWS][PARTS];
            for (int part = 0; part < PARTS; part++) score<ROWS>(part, found[part].keys, dim, then[part].keys, scores);
            if (!weigh_rows(mixture, 0, ROWS, scores, positions, key, window, scale)) continue;
            constexpr int WIDE = ROWS <= MOST / 2 ? 2 : 1;  // registers of values: sums take two for each row and one of these
            int64_t d = 0;
            for (; d + WIDE * WIDTH <= dim; d += WIDE * WIDTH) mix<ROWS, WIDE>(found, dim, d, then, mixture);
            for (; d < dim; d += WIDTH) mix<ROWS, 1>(found, dim, d, then, mixture);
        }
        for (int r = 0; r < ROWS; r++)
            for (int64_t d = 0; d < dim; d += WIDTH) put_in_order(mixture.row(r) + d);
    }

    // Where the sixteens of a block stand, whose first position is `key`. Of those that nobody sees: some that are seen
    static Block block_at(const KvPages<bf16>& kv, const SeenKeys& seen, int64_t key) {
        Block found;
        for (int part = 0; part < PARTS; part++) {
            const int64_t at = std::clamp(key + part * LANES, seen.least, seen.last);
            const int64_t page = at / kv.page_size, slot = at - page * kv.page_size;
            const int64_t first = kv.page_size % LANES == 0 ? slot / LANES * LANES : slot;
            found[part].keys = kv.key(seen.pages[page], first, seen.head, seen.layer);
            found[part].values = kv.value(seen.pages[page], first, seen.head, seen.layer);
        }
        return found;
    }

    // Whether sixteen keys stand in one page as they are multiplied, and all of them are seen
    static bool is_whole(const KvPages<bf16>& kv, const SeenKeys& seen, int64_t key) {
        return kv.page_size % LANES == 0 && !kv.is_int8 && key >= seen.least && key + LANES - 1 <= seen.last;
    }

    // Copies of those that are seen, and zeros: what stands in their places may be anything.
    Sixteen made(int part, const KvPages<bf16>& kv, const SeenKeys& seen, int64_t key) {
        bf16* rows[2] = {made_[part][0], made_[part][1]};
        const int64_t dim = kv.head_dim, bytes = dim * int64_t(sizeof(bf16));
        auto put = [&](bf16* to, const char* row) {
            const bf16* from = kv.get(row, to);
            if (from != to) std::memcpy(to, from, bytes);
        };
        const int64_t end = std::max(std::min(key + LANES - 1, seen.last), key - 1);  // the last one that is seen
        const int64_t begin = std::min(std::max(key, seen.least), end + 1);
        for (bf16* all : rows) {
            std::memset(all, 0, (begin - key) * bytes);
            std::memset(all + (end + 1 - key) * dim, 0, (key + LANES - 1 - end) * bytes);
        }
        if (begin <= end) {
            KeyRows<bf16> row(kv, seen, begin);
            for (int64_t at = begin; at <= end; at++, row.next()) {
                put(rows[0] + (at - key) * dim, row.key());
                put(rows[1] + (at - key) * dim, row.value());
            }
        }
        return {(const char*)rows[0], (const char*)rows[1]};
    }

    // Products of the queries with sixteen keys, turned in registers
    template <int ROWS>
    __attribute__((always_inline)) void score(int part, const char* keys, int64_t dim, const char* next,
                                              F16 (*scores)[PARTS]) const {
        F16 sums[ROWS];
#pragma GCC unroll 8  // here and below, or the compiler keeps registers in memory
        for (int r = 0; r < ROWS; r++) sums[r] = zeros();
        for (int64_t d = 0; d < dim; d += WIDTH) {
            __m512i units[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                const int64_t at = (j * dim + d) * sizeof(bf16);
                units[j] = _mm512_loadu_si512(keys + at);
                _mm_prefetch(next + at, _MM_HINT_T0);
            }
            transpose(units);
#pragma GCC unroll 16
            for (int u = 0; u < LANES; u++)
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const auto query = (__m512bh)_mm512_set1_epi32(int(queries_[r][d / 2 + u]));
                    sums[r] = {_mm512_dpbf16_ps(sums[r].v, (__m512bh)units[u], query)};
                }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) scores[r][part] = sums[r];
    }

    // sums += shares * values, for WIDE registers of values from d on, two keys at a time. Of each register the sums of
    // the first four of eight values stand together, then the others: see `put_in_order`.
    template <int ROWS, int WIDE>
    __attribute__((always_inline)) void mix(const Block& found, int64_t dim, int64_t d, const Block& then,
                                            Mixture<bf16>& mixture) const {
        constexpr int SUMS = 2 * WIDE;
        F16 acc[ROWS][SUMS];
        mixture.load_sums<ROWS, SUMS>(0, d, acc);
        const int64_t row = dim * sizeof(bf16);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 2
            for (int j = 0; j < LANES; j += 2) {
                const char *values = found[part].values, *next = then[part].values;
                __m512bh pairs[SUMS];
#pragma GCC unroll 2
                for (int i = 0; i < WIDE; i++) {
                    const int64_t at = j * row + (d + i * WIDTH) * sizeof(bf16);
                    const __m512i first = _mm512_loadu_si512(values + at);
                    const __m512i second = _mm512_loadu_si512(values + at + row);
                    pairs[2 * i] = (__m512bh)_mm512_unpacklo_epi16(first, second);
                    pairs[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(first, second);
                    _mm_prefetch(next + at, _MM_HINT_T0);
                    _mm_prefetch(next + at + row, _MM_HINT_T0);
                }
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    uint32_t two;
                    std::memcpy(&two, mixture.shares[r] + part * LANES + j, sizeof two);
                    const auto share = (__m512bh)_mm512_set1_epi32(int(two));
#pragma GCC unroll 4
                    for (int i = 0; i < SUMS; i++) acc[r][i] = {_mm512_dpbf16_ps(acc[r][i].v, share, pairs[i])};
                }
            }
        mixture.store_sums<ROWS, SUMS>(0, d, acc);
    }

    // Of one register of values
    static void put_in_order(float* sums) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        const F16 first = load(sums), second = load(sums + LANES);
        store(sums, {_mm512_permutex2var_ps(first.v, low, second.v)});
        store(sums + LANES, {_mm512_permutex2var_ps(first.v, high, second.v)});
    }

    alignas(64) uint32_t queries_[MOST][MAX_HEAD_DIM / 2];
    alignas(64) bf16 made_[PARTS][2][LANES * MAX_HEAD_DIM];
};

#endif

}  // namespace tandem
