// Threads that share loops. The thread that calls takes part, and waits only for those who came to help: one that
// sleeps, or whose core is busy, is not waited for.
//
// A helper that has nothing to do looks for work for a bounded time before it sleeps: within a step the next loop is
// microseconds away, and a wake-up costs tens of them.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace tandem {

class Pool {
  public:
    // Never ends: helpers may sleep in it when the process exits.
    static Pool& instance() {
        static Pool* pool = new Pool;
        return *pool;
    }

    void set_spin(int64_t nanoseconds) { spin_ns_.store(nanoseconds, std::memory_order_relaxed); }

    // body(i) for i in [0, count), in no order, on up to `threads` threads. One caller at a time.
    template <class Body>
    void run(int threads, int64_t count, const Body& body) {
        if (threads <= 1 || count <= 1) {
            for (int64_t i = 0; i < count; i++) body(i);
            return;
        }
        while (helpers_ < threads - 1) start_helper();
        call_ = [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); };
        context_ = &body;
        count_ = count;
        welcome_ = threads - 1;
        next_.store(0, std::memory_order_relaxed);
        state_.store((++job_ << JOB_SHIFT) | OPEN);
        signal_.store(uint32_t(job_));
        if (sleepers_.load() > 0) signal_.notify_all();
        work();
        state_.fetch_and(~OPEN);
        for (int spins = 0; state_.load(std::memory_order_acquire) & INSIDE; spins++) {
            _mm_pause();
            if (spins > PATIENCE) std::this_thread::yield();  // to a helper that has lost its core
        }
    }

  private:
    static constexpr uint64_t INSIDE = 0xffff, OPEN = 1 << 16, JOB_SHIFT = 17;
    static constexpr int PATIENCE = 2000;

    void work() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(context_, i);
    }

    void start_helper() {
        const int number = helpers_++;
        std::thread([this, number] { help(number); }).detach();
    }

    void help(int number) {
        uint64_t seen = 0;
        for (;;) {
            uint64_t state = awaited(seen);
            seen = state >> JOB_SHIFT;
            // Who is counted inside while the job is open may look at it: the caller does not change it before he left.
            while ((state & OPEN) && state >> JOB_SHIFT == seen)
                if (state_.compare_exchange_weak(state, state + 1)) {
                    if (number < welcome_) work();
                    state_.fetch_sub(1, std::memory_order_release);
                    break;
                }
        }
    }

    // The state once its job is another one than `seen`.
    uint64_t awaited(uint64_t seen) {
        using clock = std::chrono::steady_clock;
        const auto until = clock::now() + std::chrono::nanoseconds(spin_ns_.load(std::memory_order_relaxed));
        do {
            for (int i = 0; i < 64; i++) {
                const uint64_t state = state_.load(std::memory_order_acquire);
                if (state >> JOB_SHIFT != seen) return state;
                _mm_pause();
            }
        } while (clock::now() < until);
        sleepers_.fetch_add(1);
        while (state_.load() >> JOB_SHIFT == seen) signal_.wait(uint32_t(seen));
        sleepers_.fetch_sub(1);
        return state_.load();
    }

    alignas(64) std::atomic<uint64_t> state_{0};  // number of the job, whether it is open, helpers inside
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> signal_{0};  // the number again, to sleep on
    std::atomic<int> sleepers_{0};
    std::atomic<int64_t> spin_ns_{0};
    uint64_t job_ = 0;
    int helpers_ = 0;
    int welcome_ = 0;
    int64_t count_ = 0;
    const void* context_ = nullptr;
    void (*call_)(const void*, int64_t) = nullptr;
};

}  // namespace tandem
