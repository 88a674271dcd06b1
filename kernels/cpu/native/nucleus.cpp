// Finds which tokens top-k and top-p keep, without sorting the vocabulary. Weights of at least 0 have the order of
// their bits. So one pass puts each into a bin by its highest bits, and only the bin with the threshold is sorted.
//
// F rows, V vocabulary.

#include <omp.h>

#include "lanes.h"

// All but these many bits of a weight choose its bin: a sixteenth of an octave.
constexpr int REST_BITS = 19;
constexpr int NUM_BINS = 1 << (32 - 1 - REST_BITS);

// Fields as in kernels/cpu/library.py.
struct Nuclei {
    const float* weights;  // [F, V], at least 0
    const int64_t* top_k;  // V means no top-k
    const double* top_p;
    const bool* pending;
    float* threshold;
    float* members;  // [threads, V], workspace
    int64_t stride, num_rows, vocab_size;
};

static int32_t bits_of(float weight) {
    int32_t bits;
    memcpy(&bits, &weight, 4);
    return bits;
}

// NaN and negative weights fall into some bin too. The threshold of such a row is arbitrary.
static int bin_of(float weight) { return (bits_of(weight) >> REST_BITS) & (NUM_BINS - 1); }

// The weights of one row in bins.
class Bins {
    struct Bin {
        int64_t count;
        double mass;
    };
    const float* weights;
    const int64_t vocab_size;
    float* const members;  // of one bin, largest first
    int64_t num_members = 0;
    int held = -1;
    Bin bins[NUM_BINS] = {};

   public:
    struct Kept {
        float least;
        double mass;
    };

    Bins(const float* weights, int64_t vocab_size, float* members)
        : weights(weights), vocab_size(vocab_size), members(members) {
        for (int64_t i = 0; i < vocab_size; i++) {
            Bin& bin = bins[bin_of(weights[i])];
            bin.count++;
            bin.mass += weights[i];
        }
    }

    // Keep the largest weights: at most `most`, each with less than `most_mass` before it. The very largest is always
    // kept. Return the least kept weight, and the sum.
    Kept largest(int64_t most, double most_mass) {
        int bin = NUM_BINS - 1;
        while (!bins[bin].count) bin--;
        int64_t count = 0;
        double mass = 0.0;
        for (int next = bin; next >= 0; next--) {
            if (!bins[next].count) continue;
            if (next != bin) count += bins[bin].count, mass += bins[bin].mass;
            bin = next;
            if (count + bins[bin].count >= most || !(mass + bins[bin].mass < most_mass)) break;
        }
        hold(bin);
        int64_t i = 0;
        do mass += members[i++];
        while (i < num_members && count + i < most && mass < most_mass);
        return {members[i - 1], mass};
    }

   private:
    void hold(int bin) {
        if (bin == held) return;
        held = bin;
        num_members = 0;
        for (int64_t i = 0; i < vocab_size; i++) {
            members[num_members] = weights[i];
            num_members += bin_of(weights[i]) == bin;
        }
        // By their bits, which order NaN too.
        std::sort(members, members + num_members, [](float a, float b) { return bits_of(a) > bits_of(b); });
    }
};

static void find_threshold(const Nuclei& n, int64_t row) {
    Bins bins(n.weights + row * n.stride, n.vocab_size, n.members + omp_get_thread_num() * n.vocab_size);
    const int64_t top_k = n.top_k[row];
    const double mass = top_k < n.vocab_size ? bins.largest(top_k, INFINITY).mass : 1.0;
    n.threshold[row] = bins.largest(top_k, n.top_p[row] * mass).least;
}

extern "C" void by_top_k_top_p_thresholds(int, int threads, const Nuclei* n) {
    const bool is_worth_it = n->num_rows > 1 && n->num_rows * n->vocab_size >= PARALLEL_ELEMENTS;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (is_worth_it)
    for (int64_t row = 0; row < n->num_rows; row++)
        if (n->pending[row]) find_threshold(*n, row);
}
