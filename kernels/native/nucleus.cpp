// Which tokens top-k and top-p keep, without a sort of the vocabulary: weights of at least 0 are ordered as their bits
// are, so one pass puts each into a bin by its highest bits, and only the bin that holds the threshold is sorted.
//
// F rows, V vocabulary.

#include <algorithm>
#include <memory>

#include "lanes.h"

// Of each weight's bits all but these many choose its bin: a sixteenth of an octave.
constexpr int REST_BITS = 19;
constexpr int NUM_BINS = 1 << (32 - 1 - REST_BITS);

// Fields as in kernels/cpu_library.py.
struct Nuclei {
    const float* weights;  // [F, V], at least 0
    const int64_t* top_k;  // V where there is none
    const double* top_p;
    const bool* unsettled;
    float* threshold;
    int64_t stride, num_rows, vocab_size;
};

// Bins count NaN and what is below 0 somewhere among them: of such a row any threshold will do.
static int bin_of(uint32_t bits) { return (bits >> REST_BITS) & (NUM_BINS - 1); }

// One row's weights by bins, largest first.
class Bins {
    struct Bin {
        int64_t count;
        double mass;
    };
    const float* weights;
    int64_t vocab_size;
    Bin bins[NUM_BINS] = {};
    std::unique_ptr<float[]> members;

   public:
    Bins(const float* weights, int64_t vocab_size)
        : weights(weights), vocab_size(vocab_size), members(new float[vocab_size]) {
        for (int64_t i = 0; i < vocab_size; i++) {
            uint32_t bits;
            memcpy(&bits, weights + i, 4);
            Bin& bin = bins[bin_of(bits)];
            bin.count++;
            bin.mass += weights[i];
        }
    }

    // The last weight before which there are fewer than `most` weights and less than `most_mass` of them, the largest
    // of all at least; `mass` becomes what there is up to it, itself among it.
    float last_within(int64_t most, double most_mass, double& mass) {
        int64_t count = 0;
        int last = -1;
        double before = mass = 0.0;
        for (int bin = NUM_BINS - 1; bin >= 0 && count < most && (last < 0 || mass < most_mass); bin--) {
            if (!bins[bin].count) continue;
            last = bin;
            before = mass;
            count += bins[bin].count;
            mass += bins[bin].mass;
        }
        count -= bins[last].count;
        mass = before;
        const int64_t size = take_members(last);
        int64_t i = 0;
        do mass += members[i++];
        while (i < size && count + i < most && mass < most_mass);
        return members[i - 1];
    }

   private:
    int64_t take_members(int bin) {
        int64_t size = 0;
        for (int64_t i = 0; i < vocab_size; i++) {
            uint32_t bits;
            memcpy(&bits, weights + i, 4);
            members[size] = weights[i];
            size += bin_of(bits) == bin;
        }
        // As numbers, but NaN has its place too.
        auto is_larger = [](float one, float other) {
            int32_t one_bits, other_bits;
            memcpy(&one_bits, &one, 4);
            memcpy(&other_bits, &other, 4);
            return one_bits > other_bits;
        };
        std::sort(members.get(), members.get() + size, is_larger);
        return size;
    }
};

static void settle_row(const Nuclei& n, int64_t row) {
    Bins bins(n.weights + row * n.stride, n.vocab_size);
    double mass = 1.0;
    if (n.top_k[row] < n.vocab_size) bins.last_within(n.top_k[row], INFINITY, mass);
    double kept;
    n.threshold[row] = bins.last_within(n.top_k[row], n.top_p[row] * mass, kept);
}

extern "C" void by_settle_nuclei(int, int threads, const Nuclei* n) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n->num_rows > 1)
    for (int64_t row = 0; row < n->num_rows; row++)
        if (n->unsettled[row]) settle_row(*n, row);
}
