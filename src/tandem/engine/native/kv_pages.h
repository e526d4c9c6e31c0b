// The KV memory, as kernels read and write it: rows of keys and values in pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace tandem {

// [pages, kv_heads, layers, 2 (key, value), page_size] rows of head_dim values: of T, or int8 and behind them their scale
template <class T>
struct KvPages {
    char* base;
    int64_t page_size, kv_heads, layers, head_dim;
    bool is_int8;

    int64_t row_bytes() const { return head_dim * (is_int8 ? 1 : sizeof(T)) + (is_int8 ? sizeof(float) : 0); }
    char* key(int64_t page, int64_t slot, int64_t head, int64_t layer) const {
        return base + (((page * kv_heads + head) * layers + layer) * 2 * page_size + slot) * row_bytes();
    }
    char* value(int64_t page, int64_t slot, int64_t head, int64_t layer) const {
        return key(page, slot, head, layer) + page_size * row_bytes();
    }

    // To a row of the memory, rounded to the nearest of 255 multiples of a scale where it is int8.
    void put(char* row, const T* values) const {
        if (!is_int8) return (void)std::memcpy(row, values, head_dim * sizeof(T));
        float most = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) most = std::max(most, std::fabs(to_float(values[d])));
        const float scale = most / 127.0f;
        std::memcpy(row + head_dim, &scale, sizeof scale);
        for (int64_t d = 0; d < head_dim; d++)
            row[d] = scale > 0.0f ? char(int8_t(std::nearbyintf(to_float(values[d]) / scale))) : 0;
    }

    // What stands in a row, in `room` where it has to be made.
    const T* get(const char* row, T* room) const {
        if (!is_int8) return (const T*)row;
        float scale;
        std::memcpy(&scale, row + head_dim, sizeof scale);
        for (int64_t d = 0; d < head_dim; d += LANES)
            store_at(room, load_at((const int8_t*)row, d, head_dim) * all(scale), d, head_dim);
        return room;
    }
};

// What the tokens of a batch see; shared with Python, see `library.py`.
struct BatchView {
    int64_t num_tokens;
    const int64_t* positions;  // [num_tokens]
    const int64_t* slots;      // [num_tokens] page * page_size + slot: where its key and value go
    const int64_t* tables;     // [num_tokens] where in `pages` its request's begin; equal for tokens of one request
    const int64_t* pages;
    int64_t window;  // tokens that a query sees, itself included; 0: all
};

// Tokens [first, last) of a batch: positions that follow each other in one request.
struct Span {
    int64_t first, last;
};

// The span that begins with this token.
inline Span span_at(const BatchView& batch, int64_t first, int64_t most) {
    int64_t last = first + 1;
    while (last < batch.num_tokens && last - first < most && batch.tables[last] == batch.tables[first] &&
           batch.positions[last] == batch.positions[last - 1] + 1)
        last++;
    return {first, last};
}

// What a unit of work reads: of one head and layer the positions [least, last] of a request.
struct SeenKeys {
    const int64_t* pages;
    int64_t head, layer, least, last;
};

// Those that the tokens of a span see
inline SeenKeys seen_by(const BatchView& batch, Span span, int64_t head, int64_t layer) {
    const int64_t first = batch.positions[span.first];
    const int64_t least = batch.window ? std::max<int64_t>(0, first + 1 - batch.window) : 0;
    return {batch.pages + batch.tables[span.first], head, layer, least, batch.positions[span.last - 1]};
}

// Their rows from position `at` on, one after the other: to divide for each would take longer than its products.
template <class T>
class KeyRows {
  public:
    KeyRows(const KvPages<T>& kv, const SeenKeys& seen, int64_t at)
        : kv_(kv), pages_(seen.pages + at / kv.page_size), head_(seen.head), layer_(seen.layer), at_(at),
          last_(seen.last), size_(kv.row_bytes()) {
        begin(at % kv.page_size);
    }

    bool is_at(int64_t position) const { return at_ == position && has_more(); }
    bool has_more() const { return at_ <= last_; }
    const char* key() const { return row_; }
    const char* value() const { return row_ + kv_.page_size * size_; }
    int64_t size() const { return size_; }
    void next() {
        row_ += size_;
        if (++at_ > last_ || --left_ > 0) return;
        pages_++;
        begin(0);
    }

  private:
    void begin(int64_t slot) {
        row_ = kv_.key(*pages_, slot, head_, layer_);
        left_ = kv_.page_size - slot;
    }

    const KvPages<T>& kv_;
    const int64_t* pages_;  // from that of `at_` on
    int64_t head_, layer_, at_, last_, size_, left_;
    const char* row_;
};

}  // namespace tandem
