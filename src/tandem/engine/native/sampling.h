// One token from the logits of a row: the largest, or the largest score with its noise, of those that top-k, top-p and
// min-p leave.
//
// `sampler.py` says what is drawn, `draws.py` does the same without a compiler. Noise comes from a hash of (seed, position, token),
// so any order of looking at tokens gives the same one: of most a bound of it is enough. What decides is exact (scores,
// their order, sums of shares in whole numbers) or of the math library (logarithms of the few that may win).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace tandem {

struct LargestLogit {
    int32_t token;    // of equals the lowest; any where one is NaN
    bool are_finite;  // all logits of the row
};

inline LargestLogit largest_logit(const float* logits, int64_t vocab) {
    constexpr int64_t PIECE = 64 * LANES;
    const int64_t whole = vocab - vocab % LANES;
    float best = -INFINITY;
    int64_t at = 0;      // it is there or behind, and the first
    F16 rest = zeros();  // NaN where a logit is not finite
    for (int64_t begin = 0; begin < whole; begin += PIECE) {
        F16 most = all(-INFINITY);
        for (int64_t i = begin; i < std::min(whole, begin + PIECE); i += LANES) {
            const F16 some = load(logits + i);
            most = larger(most, some), rest = fma(some, zeros(), rest);
        }
        if (const float its = largest(most); its > best) best = its, at = begin;
    }
    float last = sum(rest);
    for (int64_t i = whole; i < vocab; i++) {
        if (logits[i] > best) best = logits[i], at = i;
        last += logits[i] * 0;
    }
    while (at < vocab - 1 && logits[at] != best) at++;
    return {int32_t(at), last == last};
}

// Shared with Python, see `library.py`.
struct Draw {
    const float* logits;  // none is NaN or plus infinity
    uint64_t key;         // of seed and position
    int64_t top_k;        // 0: all
    double top_p;
    float temperature;
    float log_min_p;  // minus infinity: all
};

// Shares are whole numbers of 2^-40 of the best score's: their sums do not depend on their order.
constexpr float WHOLE_SHARE = float(int64_t(1) << 40);

struct Candidate {
    float score;
    int32_t token;
    int64_t share;
};

inline bool is_better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

class TokenDraw {
  public:
    TokenDraw(const Draw& draw, int64_t vocab) : draw_(draw), vocab_(vocab), maxima_(memory().maxima) {
        maxima_.resize(ceil_div(vocab, PIECE));
        for (int64_t piece = 0; piece < int64_t(maxima_.size()); piece++) {
            F16 most = all(-INFINITY);
            for (int64_t i = piece * PIECE; i < piece_end(piece); i += LANES) most = larger(most, scores_at(i));
            maxima_[piece] = largest(most);
        }
        best_ = *std::max_element(maxima_.begin(), maxima_.end());
    }

    int32_t token() {
        if (best_ == -INFINITY) return 0;
        const bool is_free = draw_.top_k <= 0 && draw_.top_p >= 1 && draw_.log_min_p == -INFINITY;
        return is_free ? of_all() : of_some();
    }

  private:
    static constexpr int64_t PIECE = 4 * LANES;  // of the vocabulary: those without a score that matters are passed over
    static constexpr float MOST_NOISE = 22.88f;  // of a hash of zeros
    static constexpr float FIRST_DEPTH = 8;      // below the best score: where the nucleus mostly ends
    static constexpr float LARGEST_V = 1 - 0x1p-24f;

    struct Memory {
        std::vector<float> maxima, some;
        std::vector<Candidate> candidates;
    };
    static Memory& memory() {
        static thread_local Memory memory;
        return memory;
    }

    int64_t piece_end(int64_t piece) const { return std::min(vocab_, (piece + 1) * PIECE); }

    // Minus infinity behind the last one
    F16 scores_at(int64_t i) const {
        if (i + LANES <= vocab_) return load(draw_.logits + i) / all(draw_.temperature);
        alignas(64) float some[LANES];
        std::fill(some, some + LANES, -INFINITY);
        std::copy(draw_.logits + i, draw_.logits + vocab_, some);
        return load(some) / all(draw_.temperature);
    }

    // body(first token, scores of LANES) of all pieces that have a score of at least what `least` says then
    template <class Least, class Body>
    void for_scores(const Least& least, const Body& body) const {
        for (int64_t piece = 0; piece < int64_t(maxima_.size()); piece++)
            if (maxima_[piece] >= least())
                for (int64_t i = piece * PIECE; i < piece_end(piece); i += LANES) body(i, scores_at(i));
    }

    // --- noise -------------------------------------------------------------------------------------------------------

    // Between 0 and 1: of LANES tokens from this one on
    void uniforms(int64_t first, float* to) const {
        for (int i = 0; i < LANES; i++) {
            uint64_t h = draw_.key + uint64_t(first + i) * 0x9E3779B97F4A7C15;
            h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9;
            h = (h ^ (h >> 27)) * 0x94D049BB133111EB;
            to[i] = std::min((float(uint32_t((h ^ (h >> 31)) >> 32)) + 0.5f) * 0x1p-32f, LARGEST_V);
        }
    }

    static float noise(float v) { return float(-std::log(-std::log1p(-double(v)))); }

    // The best so far of score and noise
    struct Winner {
        float sum = -INFINITY;
        Candidate of{-INFINITY, std::numeric_limits<int32_t>::max(), 0};

        void meet(Candidate one, float v) {
            const float total = one.score + noise(v);
            if (total < sum || (total == sum && !precedes(one))) return;
            sum = total, of = one;
        }
        // What a score with its noise has to reach: sums are rounded
        float least() const { return sum - 0.01f - 1e-6f * std::abs(sum); }

        bool precedes(Candidate one) const { return ordered ? is_better(one, of) : one.token < of.token; }
        bool ordered;  // of equal sums the better score wins, then the lower token; or the lower token at once
    };

    // Of tokens [first, first + LANES), those whose noise may be enough. It is at most -log(v).
    void meet(Winner& winner, int64_t first, F16 scores) const {
        alignas(64) float v[LANES], bounds[LANES], some[LANES];
        uniforms(first, v);
        const F16 bound = exponential(scores - all(winner.least()));
        if (!any_larger(bound, load(v))) return;
        store(bounds, bound);
        store(some, scores);
        for (int i = 0; i < LANES; i++)
            if (v[i] < bounds[i] && first + i < vocab_) winner.meet({some[i], int32_t(first + i), 0}, v[i]);
    }

    float uniform_of(int64_t token) const {
        float v[LANES];
        uniforms(token, v);
        return v[0];
    }

    int32_t of_all() const {
        const auto piece = std::max_element(maxima_.begin(), maxima_.end()) - maxima_.begin();
        Winner winner{.ordered = false};
        for (int64_t i = piece * PIECE; i < piece_end(piece); i++) {
            const float score = draw_.logits[i] / draw_.temperature;
            if (score == best_) winner.meet({score, int32_t(i), 0}, uniform_of(i));
        }
        for_scores([&] { return winner.least() - MOST_NOISE; },
                   [&](int64_t first, F16 scores) { meet(winner, first, scores); });
        return winner.of.token;
    }

    // --- of some -----------------------------------------------------------------------------------------------------

    int32_t of_some() {
        auto& found = memory().candidates;
        const float least = best_ + draw_.log_min_p;
        if (draw_.top_k > 0 && draw_.top_k < vocab_) {
            of_the_best(draw_.top_k, found);
            if (draw_.top_p < 1) cut_at(found, limit_of(share_of(found)));
        } else if (draw_.top_p < 1) {
            nucleus(found);
        } else {
            gather(least, found);
        }
        Winner winner{.ordered = draw_.top_k > 0 || draw_.top_p < 1};
        for (const Candidate& one : found)
            if (one.score >= least) {
                const float v = uniform_of(one.token);
                if (v <= std::exp(one.score - winner.least())) winner.meet(one, v);
            }
        return winner.of.token;
    }

    // All of at least this score
    void gather(float least, std::vector<Candidate>& to) const {
        to.clear();
        for_scores([&] { return least; }, [&](int64_t first, F16 scores) {
            alignas(64) float some[LANES];
            int64_t shares[LANES];
            store(some, scores);
            shares_of(scores, shares);
            const int count = int(std::min<int64_t>(LANES, vocab_ - first));
            for (int i = 0; i < count; i++)
                if (some[i] >= least) to.push_back({some[i], int32_t(first + i), shares[i]});
        });
    }

    void of_the_best(int64_t count, std::vector<Candidate>& to) const {
        float least = -INFINITY;
        if (count <= int64_t(maxima_.size())) {  // so many pieces have each one of at least this
            auto& some = memory().some;
            some = maxima_;
            std::nth_element(some.begin(), some.begin() + count - 1, some.end(), std::greater<float>());
            least = some[count - 1];
        }
        gather(least, to);
        if (int64_t(to.size()) <= count) return;
        std::nth_element(to.begin(), to.begin() + count, to.end(), is_better);
        to.resize(count);
    }

    // The smallest set of best ones that holds the share that is asked for
    void nucleus(std::vector<Candidate>& to) const {
        int64_t sums[LANES] = {};
        for_scores([] { return -INFINITY; }, [&](int64_t, F16 scores) {
            int64_t shares[LANES];
            shares_of(scores, shares);
            for (int i = 0; i < LANES; i++) sums[i] += shares[i];
        });
        const int64_t total = std::accumulate(sums, sums + LANES, int64_t(0));
        const int64_t limit = limit_of(total);
        float depth = FIRST_DEPTH;
        for (gather(best_ - depth, to); share_of(to) < limit && depth < 64; gather(best_ - depth, to)) depth *= 2;
        cut_at(to, limit);
    }

    int64_t limit_of(int64_t total) const { return std::min(total, int64_t(std::ceil(draw_.top_p * double(total)))); }

    void shares_of(F16 scores, int64_t* to) const {
        alignas(64) float shares[LANES];
        store(shares, exponential(scores - all(best_)) * all(WHOLE_SHARE));
        for (int i = 0; i < LANES; i++) to[i] = int64_t(shares[i]);
    }

    static int64_t share_of(const Candidate* begin, const Candidate* end) {
        return std::accumulate(begin, end, int64_t(0), [](int64_t sum, const Candidate& one) { return sum + one.share; });
    }
    static int64_t share_of(const std::vector<Candidate>& some) { return share_of(some.data(), some.data() + some.size()); }

    // Leaves those for whom the better ones before them do not hold the limit yet; at least the best. In no order.
    void cut_at(std::vector<Candidate>& some, int64_t limit) const {
        Candidate *low = some.data(), *high = low + some.size();
        while (high - low > 1) {
            Candidate* middle = low + (high - low) / 2;
            std::nth_element(low, middle, high, is_better);
            const int64_t before = share_of(low, middle);
            if (before >= limit) {
                high = middle;
            } else {
                limit -= before;
                low = middle;
            }
        }
        some.resize(high - some.data());
    }

    const Draw& draw_;
    int64_t vocab_;
    std::vector<float>& maxima_;  // the best score of each piece
    float best_;
};

}  // namespace tandem
