// What happens to one row between the products. Where torch stores a value in the model's type, so is it here.
#pragma once

#include <cmath>

#include "simd.h"

namespace tandem {

// Root mean square norm of `count` values, in fp32.
template <class T>
inline void rms_norm(const T* x, const T* weight, int64_t count, float eps, T* out) {
    F16 squares = zeros();
    for (int64_t i = 0; i < count; i += LANES) {
        const F16 v = load_at(x, i, count);
        squares = fma(v, v, squares);
    }
    const F16 scale = all(1.0f / std::sqrt(sum(squares) / float(count) + eps));
    for (int64_t i = 0; i < count; i += LANES) {
        const F16 normed = rounded_to<T>(load_at(x, i, count) * scale);
        store_at(out, normed * load_at(weight, i, count), i, count);
    }
}

// One head, in place. cos, sin: [dim], the sign of the first half of sin turned.
template <class T>
inline void rotate(T* head, const T* cos, const T* sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const F16 low = load_at(head, i, half), high = load_at(head + half, i, half);
        const F16 kept_low = rounded_to<T>(low * load_at(cos, i, half));
        const F16 kept_high = rounded_to<T>(high * load_at(cos + half, i, half));
        store_at(head, kept_low + high * load_at(sin, i, half), i, half);
        store_at(head + half, kept_high + low * load_at(sin + half, i, half), i, half);
    }
}

// silu(gate) * up
template <class T>
inline F16 gated(F16 gate, F16 up) {
    const F16 opened = gate / (all(1.0f) + exponential(zeros() - gate));
    return rounded_to<T>(opened) * up;
}

}  // namespace tandem
