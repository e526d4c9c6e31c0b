// What is fetched into the second cache while something else is computed.
//
// The processor's own prefetching ends with a page of the system, and a row of a weight is half of one or little more.
// A line that is asked for takes one of few places until it is there, and whatever is read meanwhile and is not in the
// first cache waits for another one: so lines are asked for evenly over all of the work, and not as soon as possible.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tandem {

constexpr int LINE_BYTES = 64;  // of a cache
constexpr int64_t NEAR_BYTES = 8 << 10;  // how far ahead is fetched where a block is read once

class Ahead {
  public:
    // Of `block`, `bytes` that are computed now: what is `distance` away, and as much of `next`, which comes then or is
    // null. times: of how many reads a line is due; as many as there are of each line of the block.
    Ahead(const void* block, const void* next, int64_t bytes, int64_t distance, int times)
        : at_((const char*)block + distance), end_((const char*)block + bytes), next_((const char*)next),
          distance_(distance), times_(times) {}

    void read(int times) {
        for (owed_ += times; owed_ >= times_; owed_ -= times_) {
            if (at_ >= end_ && !turn()) return;
            _mm_prefetch(at_, _MM_HINT_T1);
            at_ += LINE_BYTES;
        }
    }

  private:
    bool turn() {
        at_ = next_;
        end_ = next_ ? next_ + distance_ : next_;
        next_ = nullptr;
        return at_;
    }

    const char *at_, *end_, *next_;
    int64_t distance_;
    int times_, owed_ = 0;
};

}  // namespace tandem
