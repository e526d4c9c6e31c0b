// The layers of a dense decoder over the rows of a batch: one call for all of them, no memory taken on the way.
//
//     x += o_proj(attention(rotate(q), rotate(k), v))      of rms_norm(x)
//     x += down_proj(silu(gate) * up)                      of rms_norm(x)
#pragma once

#include <algorithm>
#include <initializer_list>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "pool.h"
#include "quantized.h"
#include "rows.h"

namespace tandem {

// Shared with Python, see `library.py`. Null stands for what a layer does not have.
struct Layer {
    const void *input_norm, *q_norm, *k_norm, *post_norm;
    Linear q, k, v, o, gate, up, down;
};

struct Decoder {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, inner;
    double eps;
    const Layer* layers;
    void* kv;  // of KvPages
    int64_t page_size, kv_is_int8;
    const void *cos, *sin;  // [positions, head_dim]
};

// Rows, times some weights of so many inputs.
template <class T>
class Product {
    using X = typename InputRows<T>::type;

  public:
    // rows: have to outlive it. weights: that it is multiplied with; of tiles, one product at a time
    Product(const InputRows<T>& rows, std::initializer_list<const Linear*> weights, int threads)
        : x_(rows), rows_(rows.rows()), inputs_(rows.inputs()), threads_(threads), tile_(rows.tile()),
          group_(GROUP_ROWS / tile_ * tile_),
          step_(std::clamp<int64_t>(INPUT_BYTES / rows.tile_bytes() * tile_ / group_, 1, 8) * group_) {
        if constexpr (HAS_TILES<T>) {
            const auto is_packed = [](const Linear* weight) { return weight->is_packed && !weight->bits; };
            if (std::all_of(weights.begin(), weights.end(), is_packed)) return;
            static Buffer memory;
            auto* turned = (X*)memory.get(rows.num_tiles() * rows.tile_bytes());
            const int64_t steps = rows.tile_bytes() / sizeof(X);
            rows.for_tiles(threads, [&](int64_t tile) {
                for (int64_t k = tile * steps; k < (tile + 1) * steps; k++) turn(x_.from(0)[k], turned[k]);
            });
            turned_ = turned;
        }
        if constexpr (SCALES_SUMS<X>) {
            const auto has_offsets = [](const Linear* weight) { return weight->is_packed && weight->has_offsets; };
            if (std::none_of(weights.begin(), weights.end(), has_offsets)) return;
            static Buffer memory;
            const int64_t size = input_sums_size(inputs_);
            auto* sums = (float*)memory.get(rows_ * size * sizeof(float));
            rows.for_tiles(threads, [&](int64_t tile) {
                const int64_t first = tile * tile_;
                input_sums(x_.from(first), int(std::min<int64_t>(tile_, rows_ - first)), inputs_, sums + first * size);
            });
            input_sums_ = sums;
        }
    }

    // body(n, m, rows, next) for blocks of `outputs` from n on and groups of rows from m on. next: the block that this
    // thread most likely takes then, to be fetched; or -1
    template <class Body>
    void run(int64_t outputs, const Body& body) const {
        const int64_t blocks = ceil_div(outputs, BLOCK);
        const bool is_small = rows_ * outputs * inputs_ < SMALL;
        // Each thread reads the weight of its blocks: rows are only shared out where there are few blocks for all.
        const int64_t share = blocks < 4 * threads_ ? group_ : step_;
        for (int64_t first = 0; first < rows_; first += step_) {
            const int64_t last = std::min(rows_, first + step_), shares = ceil_div(last - first, share);
            Pool::instance().run(is_small ? 1 : threads_, blocks * shares, [&](int64_t unit) {
                [[maybe_unused]] const TileRegisters<T> registers;
                const int64_t begin = first + unit % shares * share, end = std::min(last, begin + share);
                const int64_t block = unit / shares, then = (unit + threads_) / shares;
                for (int64_t m = begin; m < end; m += group_) {
                    const bool has_next = m + group_ >= end && block < then && then < blocks;
                    const int rows = int(std::min<int64_t>(group_, end - m));
                    body(block * BLOCK, m, rows, has_next ? then * BLOCK : -1);
                }
            });
        }
    }

    // Where the weight of outputs from n on begins, to be fetched; null without n
    const char* weight_at(const Linear& linear, int64_t n) const {
        return n < 0 ? nullptr : block_at<T>(linear, n);
    }

    // next: what is wanted after it, of `weight_at`. to: [GROUP_ROWS, BLOCK]; behind the last row there may be anything then
    void sums(const Linear& linear, int64_t n, int64_t m, int rows, const char* next, float* to) const {
        const int outputs = int(std::min<int64_t>(BLOCK, linear.outputs - n));
        if (HAS_PACKED<X> && linear.is_packed && !linear.bits) {
            if constexpr (HAS_PACKED<X>) products_packed(x_.from(m), rows, tile_, weight_at(linear, n), inputs_, next, to);
        } else if (HAS_PACKED_CODES<X> && linear.is_packed && linear.bits) {
            if constexpr (HAS_PACKED_CODES<X>) {
                const float* of = input_sums_ ? input_sums_ + m * input_sums_size(inputs_) : nullptr;
                products_packed_codes<T>(x_.from(m), of, rows, tile_, weight_at(linear, n), linear, next, to);
            }
        } else if (linear.bits || linear.is_packed) {
            of_codes(for_plain(m), rows, linear, n, outputs, next, to);
        } else {
            const X* x = for_plain(m);
            const char* weight = weight_at(linear, n);
            const int64_t row = row_bytes<T>(linear);
            const int64_t distance = outputs_ahead<X>(rows, outputs, inputs_) * row;
            const Ahead ahead(weight, next, outputs * row, distance, times_read<X, T>(rows, tile_));
            products(x, rows, tile_, (const T*)weight, outputs, inputs_, ahead, to);
        }
        if (!linear.bias) return;
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < outputs; i += LANES) {
                float* at = to + row * BLOCK;
                store_at(at, load_at(at, i, outputs) + load_at((const T*)linear.bias + n, i, outputs), i, outputs);
            }
    }

  private:
    // The rows from m on, as weights in rows want them, and codes that become such
    const X* for_plain(int64_t m) const { return HAS_TILES<T> ? turned_ + (x_.from(m) - x_.from(0)) : x_.from(m); }

    // The weights of a block are made in the second cache, while the codes of the next one are fetched.
    void of_codes(const X* x, int rows, const Linear& linear, int64_t n, int outputs, const char* next,
                  float* to) const {
        if constexpr (constexpr int EXPANDED = EXPANDED_ROWS<X, T>; EXPANDED > 0)
            if (!linear.is_packed && rows <= EXPANDED && outputs == BLOCK)
                return products_of_codes<T>(x, rows, linear, n, next, to);
        static thread_local Buffer buffer;
        T* weight = (T*)buffer.get(outputs * inputs_ * sizeof(T));
        for (int i = 0; i < outputs; i++) plain_row(linear, n + i, weight + i * inputs_);
        const int64_t bytes = block_at<T>(linear, BLOCK) - block_at<T>(linear, 0);
        const int times = times_read<X, T>(rows, tile_) * int(linear.bits ? 8 * sizeof(T) / linear.bits : 1);
        const Ahead ahead(nullptr, next, 0, bytes, times);
        products(x, rows, tile_, (const T*)weight, outputs, inputs_, ahead, to);
    }

    static constexpr int64_t SMALL = 1 << 16;  // products that one thread has done before another one is awake

    const InputRows<T>& x_;
    const X* turned_ = nullptr;  // the same, for weights that are not packed; or null
    const float* input_sums_ = nullptr;  // [rows][input_sums_size], for packed codes with offsets, where sums are scaled; or null
    int64_t rows_, inputs_;
    int threads_, tile_;
    int64_t group_, step_;  // rows that go through a block together; and then through the next
};

// y = x * weight + bias; adds: y += that, rounded before
template <class T>
void linear(const InputRows<T>& x, const Linear& layer, T* y, bool adds, int threads) {
    const Product<T> product(x, {&layer}, threads);
    product.run(layer.outputs, [&](int64_t n, int64_t m, int rows, int64_t next) {
        alignas(64) float sums[GROUP_ROWS][BLOCK];
        product.sums(layer, n, m, rows, product.weight_at(layer, next), sums[0]);
        const int64_t outputs = std::min<int64_t>(BLOCK, layer.outputs - n);
        for (int row = 0; row < rows; row++) {
            T* at = y + (m + row) * layer.outputs + n;
            for (int64_t i = 0; i < outputs; i += LANES) {
                F16 value = load_at(sums[row], i, outputs);
                if (adds) value = load_at(at, i, outputs) + rounded_to<T>(value);
                store_at(at, value, i, outputs);
            }
        }
    });
}

// y: silu(x * gate) * (x * up)
template <class T>
void gated_linear(const InputRows<T>& x, const Linear& gate, const Linear& up, InputRows<T>& y, int threads) {
    const Product<T> product(x, {&gate, &up}, threads);
    product.run(gate.outputs, [&](int64_t n, int64_t m, int rows, int64_t next) {
        alignas(64) float opened[GROUP_ROWS][BLOCK], sums[GROUP_ROWS][BLOCK];
        product.sums(gate, n, m, rows, product.weight_at(up, n), opened[0]);
        product.sums(up, n, m, rows, product.weight_at(gate, next), sums[0]);
        const int64_t outputs = std::min<int64_t>(BLOCK, gate.outputs - n);
        for (int row = 0; row < rows; row++)
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const bool is_there = i < outputs;
                const F16 left = is_there ? rounded_to<T>(load_at(opened[row], i, outputs)) : zeros();
                const F16 right = is_there ? rounded_to<T>(load_at(sums[row], i, outputs)) : zeros();
                y.put(m + row, n + i, rounded_to<T>(gated<T>(left, right)));
            }
    });
}

// Three weights, one input: blocks of all of them are shared out together.
template <class T>
void three_linears(const InputRows<T>& x, const Linear* const layers[3], T* const results[3], int threads) {
    const Product<T> product(x, {layers[0], layers[1], layers[2]}, threads);
    int64_t blocks[4] = {0};
    for (int i = 0; i < 3; i++) blocks[i + 1] = blocks[i] + ceil_div(layers[i]->outputs, BLOCK);
    auto which = [&](int64_t n) { return n >= blocks[2] * BLOCK ? 2 : n >= blocks[1] * BLOCK ? 1 : 0; };
    product.run(blocks[3] * BLOCK, [&](int64_t n, int64_t m, int rows, int64_t next) {
        const int now = which(n), then = which(next);
        const Linear& layer = *layers[now];
        n -= blocks[now] * BLOCK;
        if (next >= 0) next -= blocks[then] * BLOCK;
        alignas(64) float sums[GROUP_ROWS][BLOCK];
        product.sums(layer, n, m, rows, product.weight_at(*layers[then], next), sums[0]);
        const int64_t outputs = std::min<int64_t>(BLOCK, layer.outputs - n);
        for (int row = 0; row < rows; row++)
            for (int64_t i = 0; i < outputs; i += LANES)
                store_at(results[now] + (m + row) * layer.outputs + n, load_at(sums[row], i, outputs), i, outputs);
    });
}

// rows [0, count): on one thread where it is not worth more
template <class Body>
void for_rows(int64_t count, int threads, const Body& body) {
    constexpr int64_t TOGETHER = 8;
    Pool::instance().run(threads, ceil_div(count, TOGETHER), [&](int64_t unit) {
        for (int64_t row = TOGETHER * unit; row < std::min(count, TOGETHER * (unit + 1)); row++) body(row);
    });
}

template <class T>
void write_kv(const KvPages<T>& kv, const BatchView& batch, int64_t layer, int64_t token, const T* k, const T* v) {
    const int64_t page = batch.slots[token] / kv.page_size, slot = batch.slots[token] % kv.page_size;
    for (int64_t head = 0; head < kv.kv_heads; head++) {
        kv.put(kv.key(page, slot, head, layer), k + head * kv.head_dim);
        kv.put(kv.value(page, slot, head, layer), v + head * kv.head_dim);
    }
}

// x: [tokens, hidden], changed in place.
template <class T>
void run_layers(const Decoder& model, const BatchView& batch, T* x, int threads) {
    static Buffer buffer, inputs, inner_inputs;
    const int64_t n = batch.num_tokens, dim = model.head_dim;
    const int64_t q_size = model.heads * dim, kv_size = model.kv_heads * dim;
    T* normed = (T*)buffer.get(n * (model.hidden + 2 * q_size + 2 * kv_size) * sizeof(T));
    T *q = normed + n * model.hidden, *k = q + n * q_size, *v = k + n * kv_size, *mixed = v + n * kv_size;
    auto filled = [&](const T* x, int64_t count) {
        InputRows<T> rows(inputs, n, count);
        rows.fill(x, threads);
        return rows;
    };
    InputRows<T> inner(inner_inputs, n, model.inner);
    const KvPages<T> kv{(char*)model.kv,  model.page_size, model.kv_heads,
                        model.num_layers, dim,             model.kv_is_int8 != 0};
    const float eps = float(model.eps);
    for (int64_t l = 0; l < model.num_layers; l++) {
        const Layer& layer = model.layers[l];
        for_rows(n, threads, [&](int64_t row) {
            rms_norm(x + row * model.hidden, (const T*)layer.input_norm, model.hidden, eps, normed + row * model.hidden);
        });
        const Linear* const projections[] = {&layer.q, &layer.k, &layer.v};
        T* const projected[] = {q, k, v};
        three_linears(filled(normed, model.hidden), projections, projected, threads);
        for_rows(n, threads, [&](int64_t row) {
            auto turn_heads = [&](T* heads, int64_t count, const void* norm) {
                const int64_t at = batch.positions[row] * dim;
                for (int64_t head = 0; head < count; head++) {
                    T* one = heads + (row * count + head) * dim;
                    if (norm) rms_norm(one, (const T*)norm, dim, eps, one);
                    rotate(one, (const T*)model.cos + at, (const T*)model.sin + at, dim);
                }
            };
            turn_heads(q, model.heads, layer.q_norm);
            turn_heads(k, model.kv_heads, layer.k_norm);
            write_kv(kv, batch, l, row, k + row * kv_size, v + row * kv_size);
        });
        attend_all(kv, batch, l, q, mixed, model.heads, threads);
        linear(filled(mixed, q_size), layer.o, x, true, threads);
        for_rows(n, threads, [&](int64_t row) {
            rms_norm(x + row * model.hidden, (const T*)layer.post_norm, model.hidden, eps, normed + row * model.hidden);
        });
        gated_linear(filled(normed, model.hidden), layer.gate, layer.up, inner, threads);
        linear(inner, layer.down, x, true, threads);
    }
}

}  // namespace tandem
