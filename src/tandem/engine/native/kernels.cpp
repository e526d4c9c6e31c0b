// The C interface, once for each instruction set. `library.py` says which one a processor gets, and how each is called.
//
// Tensors are contiguous. is_bf16: of all of them; else fp32. Calls from several threads take turns.

#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "decoder.h"
#include "sampling.h"
#include "scan.h"

using namespace tandem;

namespace {

std::mutex turn_taking;

template <class Function>
void with_type(int is_bf16, const Function& function) {
    const std::lock_guard lock(turn_taking);
    if (is_bf16)
        function(bf16{});
    else
        function(float{});
}

}  // namespace

// All else is hidden: several of these libraries may be in one process, and each has memory of its own.
#pragma GCC visibility push(default)
extern "C" {

// What this was compiled from: see `sources.py`.
uint64_t tandem_sources() { return TANDEM_SOURCES; }

// How long a helper looks for work before it sleeps.
void tandem_spin(int64_t nanoseconds) { Pool::instance().set_spin(nanoseconds); }

// y = x * weight + bias; x: [rows, inputs], y: [rows, outputs]
void tandem_linear(int is_bf16, const void* x, int64_t rows, const Linear* layer, void* y, int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        static Buffer memory;
        InputRows<T> inputs(memory, rows, layer->inputs);
        inputs.fill((const T*)x, threads);
        linear(inputs, *layer, (T*)y, false, threads);
    });
}

// weight: bf16 [outputs, inputs]; to: as `packed.h` says
void tandem_pack(const void* weight, int64_t outputs, int64_t inputs, void* to, int threads) {
    const std::lock_guard lock(turn_taking);
    Pool::instance().run(threads, ceil_div(outputs, BLOCK), [&](int64_t block) {
        const int64_t n = block * BLOCK;
        const int count = int(std::min<int64_t>(BLOCK, outputs - n));
        pack_block((const bf16*)weight + n * inputs, count, inputs, (uint32_t*)((char*)to + n * packed_row_bytes(inputs)));
    });
}

// rows: codes in rows; to: as `packed_codes.h` says, the weight of `layer`, which is like it otherwise
void tandem_pack_codes(const Linear* rows, const Linear* layer, void* to, int threads) {
    const std::lock_guard lock(turn_taking);
    Pool::instance().run(threads, ceil_div(rows->outputs, BLOCK), [&](int64_t block) {
        pack_codes(*rows, *layer, block * BLOCK, (char*)to + block * packed_codes_bytes(*layer));
    });
}

// Rows [first, first + count) of a weight that is codes or packed; to: [count, inputs]
void tandem_plain_rows(int is_bf16, const Linear* layer, int64_t first, int64_t count, void* to, int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        for_rows(count, threads, [&](int64_t n) { plain_row(*layer, first + n, (T*)to + n * layer->inputs); });
    });
}

// x, y: [rows, count]
void tandem_rms_norm(int is_bf16, const void* x, int64_t rows, int64_t count, const void* weight, double eps, void* y,
                     int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        for_rows(rows, threads, [&](int64_t row) {
            rms_norm((const T*)x + row * count, (const T*)weight, count, float(eps), (T*)y + row * count);
        });
    });
}

// x: [rows, heads, dim], in place; cos, sin: [rows, dim]
void tandem_rotate(int is_bf16, void* x, int64_t rows, int64_t heads, int64_t dim, const void* cos, const void* sin,
                   int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        for_rows(rows, threads, [&](int64_t row) {
            for (int64_t head = 0; head < heads; head++)
                rotate((T*)x + (row * heads + head) * dim, (const T*)cos + row * dim, (const T*)sin + row * dim, dim);
        });
    });
}

// gate, up: [rows, count]; the result in the memory of gate
void tandem_silu_and_mul(int is_bf16, void* gate, const void* up, int64_t rows, int64_t count, int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        for_rows(rows, threads, [&](int64_t row) {
            T* left = (T*)gate + row * count;
            const T* right = (const T*)up + row * count;
            for (int64_t i = 0; i < count; i += LANES)
                store_at(left, gated<T>(load_at(left, i, count), load_at(right, i, count)), i, count);
        });
    });
}

// Writes k and v, [tokens, kv_heads, head_dim], to their slots; q, out: [tokens, heads, head_dim].
void tandem_attention(int is_bf16, void* kv, int kv_is_int8, int64_t page_size, int64_t kv_heads, int64_t layers,
                      int64_t head_dim, const BatchView* batch, int64_t layer, int64_t heads, const void* q, const void* k, const void* v,
                      void* out, int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        const KvPages<T> pages{(char*)kv, page_size, kv_heads, layers, head_dim, kv_is_int8 != 0};
        const int64_t size = kv_heads * head_dim;
        for_rows(batch->num_tokens, threads, [&](int64_t token) {
            write_kv(pages, *batch, layer, token, (const T*)k + token * size, (const T*)v + token * size);
        });
        attend_all(pages, *batch, layer, (const T*)q, (T*)out, heads, threads);
    });
}

// x: [tokens, hidden]: what goes into the first of these layers, and what comes out of the last
void tandem_layers(int is_bf16, const Decoder* model, const BatchView* batch, void* x, int threads) {
    with_type(is_bf16, [&](auto kind) { run_layers(*model, *batch, (decltype(kind)*)x, threads); });
}

// The state-space part of one layer. own: [tokens, heads * dim], shared: [tokens, 2 * groups * size], dt: [tokens, heads];
// out: fp32 [tokens, heads * dim]. begins: [count + 1], see `scan_all`.
void tandem_scan(int is_bf16, const Scan* scan, const States* states, const Stretch* stretches, const int64_t* begins,
                 int64_t count, const void* own, const void* shared, const void* dt, float* out, int64_t tokens,
                 int threads) {
    with_type(is_bf16, [&](auto kind) {
        using T = decltype(kind);
        const Seen<T> seen{(const T*)own, (const T*)shared};
        scan_all(*scan, *states, stretches, begins, count, seen, (const T*)dt, out, tokens, threads);
    });
}

// to: [count] rows of a table of `rows`; returns how many numbers name none of it, for which nothing is written
int64_t tandem_take_rows(const void* table, int64_t rows, int64_t row_bytes, const int64_t* numbers, int64_t count,
                         void* to, int threads) {
    const std::lock_guard lock(turn_taking);
    std::atomic<int64_t> unknown{0};
    for_rows(count, threads, [&](int64_t i) {
        if (numbers[i] < 0 || numbers[i] >= rows)
            unknown++;
        else
            std::memcpy((char*)to + i * row_bytes, (const char*)table + numbers[i] * row_bytes, row_bytes);
    });
    return unknown;
}

// x: [count], to: fp32 [count]
void tandem_widen(const void* x, int64_t count, float* to, int threads) {
    constexpr int64_t PIECE = 1024 * LANES;
    const std::lock_guard lock(turn_taking);
    Pool::instance().run(threads, ceil_div(count, PIECE), [&](int64_t piece) {
        const int64_t end = std::min(count, (piece + 1) * PIECE);
        for (int64_t i = piece * PIECE; i < end; i += LANES) store_at(to, load_at((const bf16*)x, i, end), i, end);
    });
}

// Of each row of logits, [rows, vocab]: see `largest_logit`.
void tandem_largest(const float* logits, int64_t rows, int64_t vocab, int32_t* tokens, uint8_t* are_finite, int threads) {
    const std::lock_guard lock(turn_taking);
    Pool::instance().run(threads, rows, [&](int64_t row) {
        const LargestLogit found = largest_logit(logits + row * vocab, vocab);
        tokens[row] = found.token, are_finite[row] = found.are_finite;
    });
}

// A token for each row of logits, [vocab] each
void tandem_draw(const Draw* draws, int64_t rows, int64_t vocab, int32_t* tokens, int threads) {
    const std::lock_guard lock(turn_taking);
    Pool::instance().run(threads, rows, [&](int64_t row) { tokens[row] = TokenDraw(draws[row], vocab).token(); });
}

}  // extern "C"
#pragma GCC visibility pop
