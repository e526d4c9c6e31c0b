// Memory of a thread, or of one loop, that is asked for again and again.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

// Grows to what was asked for last, and stays. It begins a line of the cache.
class Buffer {
  public:
    void* get(int64_t bytes) {
        if (int64_t(memory_.size()) < bytes + 64) memory_.resize(bytes + bytes / 2 + 64);
        return (void*)(((uintptr_t)memory_.data() + 63) & ~uintptr_t(63));
    }

  private:
    std::vector<char> memory_;
};

}  // namespace tandem
