// The scan of Mamba 2 over some tokens of one layer: convolution, state, output. See `engine/layers/mamba2.py`.
//
// Token by token, for prompts and decoding rows alike, each head for itself, its state in the cache of a core meanwhile:
// what a token gets does not depend on what else is computed, or in how many pieces.
#pragma once

#include <cmath>
#include <vector>

#include "pool.h"
#include "rows.h"

namespace tandem {

constexpr int64_t NO_PAGE = -1;

// Tokens [first, last) of the batch, which are in one page. Those of one request follow each other.
struct Stretch {
    int64_t first, last;
    int64_t source;  // page of the state before the first one; NO_PAGE: there is none
    int64_t target;  // page that gets the state behind the last one; may be the source
};

// Where states are: `page_stride` and `head_stride` floats from one page, or KV head in it, to the next.
struct States {
    float* at;
    int64_t page_stride, head_stride;
    int64_t scanned, convolved;  // of this layer: from the beginning of a KV head's
};

struct Scan {
    int64_t heads, heads_per_kv, dim, size, groups, width;  // of this shard; `width` of the convolution
    const float* conv_weight;  // [width, heads * dim + 2 * groups * size]
    const float* conv_bias;    // or null
    const float* decay;        // [heads], negative
    const float* dt_bias;
    const float* skip;
    const int64_t* group;  // of each head

    int64_t own() const { return heads * dim; }
    int64_t shared() const { return 2 * groups * size; }
    int64_t features() const { return own() + shared(); }
};

inline float* head_state(const States& states, const Scan& scan, int64_t page, int64_t head) {
    return states.at + page * states.page_stride + head / scan.heads_per_kv * states.head_stride + states.scanned +
           head % scan.heads_per_kv * scan.dim * scan.size;
}

// [width - 1, heads_per_kv * dim + shared] of one KV head
inline float* conv_state(const States& states, const Scan& scan, int64_t page, int64_t kv_head) {
    return states.at + page * states.page_stride + kv_head * states.head_stride + states.convolved;
}

template <class T>
struct Seen {
    const T* own;     // [tokens, heads * dim]
    const T* shared;  // [tokens, 2 * groups * size]
};

// What the convolution makes of one token; `back` tokens before it are in the batch, those before them in `source`.
template <class T>
void convolve(const Scan& scan, const States& states, const Seen<T>& seen, int64_t token, int64_t back, int64_t source,
              float* out) {
    const int64_t part = scan.heads_per_kv * scan.dim, kept = part + scan.shared(), before = scan.width - 1;
    for (int64_t kv = 0; kv <= scan.heads / scan.heads_per_kv; kv++) {  // the last one stands for what is shared
        const bool is_shared = kv == scan.heads / scan.heads_per_kv;
        const int64_t begin = kv * part, count = is_shared ? scan.shared() : part, stride = is_shared ? count : scan.own();
        const T* rows = is_shared ? seen.shared : seen.own + begin;
        const float* state = source == NO_PAGE ? nullptr : conv_state(states, scan, source, is_shared ? 0 : kv);
        if (state != nullptr && is_shared) state += part;
        for (int64_t i = 0; i < count; i += LANES) {
            F16 total = scan.conv_bias == nullptr ? zeros() : load_at(scan.conv_bias + begin, i, count);
            for (int64_t tap = 0; tap < scan.width; tap++) {
                const int64_t ago = before - tap;
                F16 x = zeros();
                if (ago <= back)
                    x = load_at(rows + (token - ago) * stride, i, count);
                else if (state != nullptr)
                    x = load_at(state + (before - (ago - back)) * kept, i, count);
                total = fma(x, load_at(scan.conv_weight + tap * scan.features() + begin, i, count), total);
            }
            store_at(out + begin, gated<float>(total, all(1.0f)), i, count);
        }
    }
}

// Leave the last `width - 1` inputs behind a stretch. Its source may be its target: what is read lies behind what is
// written.
template <class T>
void leave_inputs(const Scan& scan, const States& states, const Seen<T>& seen, const Stretch& at, int64_t kv_head) {
    const int64_t part = scan.heads_per_kv * scan.dim, kept = part + scan.shared(), before = scan.width - 1;
    float* to = conv_state(states, scan, at.target, kv_head);
    const float* from = at.source == NO_PAGE ? nullptr : conv_state(states, scan, at.source, kv_head);
    for (int64_t row = 0; row < before; row++) {
        const int64_t token = at.last - before + row;
        if (token >= at.first) {
            for (int64_t i = 0; i < part; i++)
                to[row * kept + i] = to_float(seen.own[token * scan.own() + kv_head * part + i]);
            for (int64_t i = 0; i < scan.shared(); i++)
                to[row * kept + part + i] = to_float(seen.shared[token * scan.shared() + i]);
        } else {
            const int64_t old = row + at.last - at.first;
            for (int64_t i = 0; i < kept; i++) to[row * kept + i] = from == nullptr ? 0.0f : from[old * kept + i];
        }
    }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One head over one stretch. convolved: [tokens, features], dt: [tokens, heads], out: [tokens, heads * dim]
template <class T>
void scan_head(const Scan& scan, const States& states, const Stretch& at, int64_t head, const float* convolved,
               const T* dt, float* out) {
    float* to = head_state(states, scan, at.target, head);
    const float* from = at.source == NO_PAGE ? nullptr : head_state(states, scan, at.source, head);
    const int64_t group = scan.group[head], size = scan.size;
    for (int64_t token = at.first; token < at.last; token++) {
        const float* row = convolved + token * scan.features();
        const float* b = row + scan.own() + group * size;
        const float* c = b + scan.groups * size;
        const float step = softplus(to_float(dt[token * scan.heads + head]) + scan.dt_bias[head]);
        const F16 left = all(std::exp(step * scan.decay[head]));
        for (int64_t p = 0; p < scan.dim; p++) {
            const float x = row[head * scan.dim + p];
            const F16 written = all(step * x);
            F16 read = zeros();
            for (int64_t i = 0; i < size; i += LANES) {
                const F16 old = from == nullptr ? zeros() : load_at(from + p * size, i, size);
                const F16 state = fma(written, load_at(b, i, size), old * left);
                store_at(to + p * size, state, i, size);
                read = fma(state, load_at(c, i, size), read);
            }
            out[token * scan.own() + head * scan.dim + p] = sum(read) + scan.skip[head] * x;
        }
        from = to;
    }
}

// Stretches of one request are [begins[i], begins[i + 1]) of `stretches`; a later one begins where one before it left.
template <class T>
void scan_all(const Scan& scan, const States& states, const Stretch* stretches, const int64_t* begins, int64_t count,
              const Seen<T>& seen, const T* dt, float* out, int64_t tokens, int threads) {
    std::vector<float> convolved(tokens * scan.features());
    std::vector<int64_t> request_of(tokens);
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = stretches[begins[i]].first; t < stretches[begins[i + 1] - 1].last; t++) request_of[t] = i;
    Pool& pool = Pool::instance();
    pool.run(threads, tokens, [&](int64_t token) {  // all, before any state is overwritten
        const Stretch& first = stretches[begins[request_of[token]]];
        float* to = convolved.data() + token * scan.features();
        convolve(scan, states, seen, token, token - first.first, first.source, to);
    });
    const int64_t kv_heads = scan.heads / scan.heads_per_kv;
    pool.run(threads, count * kv_heads, [&](int64_t job) {
        const int64_t i = job / kv_heads, kv = job % kv_heads;
        for (int64_t at = begins[i]; at < begins[i + 1]; at++) {
            for (int64_t head = kv * scan.heads_per_kv; head < (kv + 1) * scan.heads_per_kv; head++)
                scan_head(scan, states, stretches[at], head, convolved.data(), dt, out);
            leave_inputs(scan, states, seen, stretches[at], kv);
        }
    });
}

}  // namespace tandem
