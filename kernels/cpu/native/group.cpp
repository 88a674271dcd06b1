// Collectives of the ranks of one model on one machine: processes that share a piece of memory.
//
// Every rank calls the same functions in the same order. Work goes in pieces. For each piece a rank fills a buffer of
// its own, counts up its `arrived`, and reads the others' buffers once they have arrived. It has `depth` buffers in
// turn, so it waits before it fills one only until all have read what lay there. `arrived` of n says that a rank has
// read all pieces before piece n, and that its own piece n is there. Pieces are numbered from step << STEP_BITS on in
// each step, so ranks that have left a step at different pieces meet again in the next one.
//
// A sum is computed by every rank, in fp32, in the order of the ranks. So all ranks get the same bits.
//
// No rank waits for ever: each wait ends with the deadline, once a rank has failed in this step, or once a rank aborts.
// After that every call of the step returns at once, and `status` says why. The caller checks it after a call, or after
// a replay of recorded calls.

#include <atomic>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"

// As in kernels/cpu/library.py.
constexpr int MAX_RANKS = 16, MAX_DEPTH = 8, STEP_BITS = 20;
enum Status : int64_t { SOUND = 0, ABORTED = 1, LATE = 2, MIXED_UP = 3, FAILED = 4 };

// A waiting rank spins, then lets others run, then sleeps. A rank that computes a layer beside this one ends within the
// first. Where ranks share a core, the second lets them run.
constexpr int64_t SPIN_NS = 30'000, YIELD_NS = 200'000, SLEEP_NS = 20'000'000;

struct alignas(64) Line {
    std::atomic<int64_t> arrived;
    std::atomic<uint32_t> bell;              // rung for sleeping ranks
    std::atomic<int64_t> first_sound_step;   // this rank has failed in the step before it
    std::atomic<int64_t> rounds[MAX_DEPTH];  // of the piece in each buffer, which tells whether a rank left without it
    std::atomic<int64_t> pieces[MAX_DEPTH];  // bytes of each piece, which tells a mix-up of calls
};

// What all ranks map. Begins as zeros. The buffers follow it.
struct Shared {
    alignas(64) std::atomic<uint32_t> aborted;
    alignas(64) std::atomic<uint32_t> num_sleeping;
    Line lines[MAX_RANKS];
};

// One rank's view of it. Fields as in kernels/cpu/library.py.
struct Group {
    Shared* shared;
    int64_t rank, size, depth, piece_bytes;
    int64_t deadline_ns;  // longest wait for another rank; 0: none
    int64_t round, status;
    int64_t first;  // the round at which the step began, which has no piece; 0 in a ring
};

static int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}
static void pause_a_moment() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
static void sleep_on(std::atomic<uint32_t>* bell, uint32_t seen) {
    timespec most{0, SLEEP_NS};
    syscall(SYS_futex, (void*)bell, FUTEX_WAIT, seen, &most, nullptr, 0);
}
static void ring(std::atomic<uint32_t>* bell) {
    bell->fetch_add(1);
    syscall(SYS_futex, (void*)bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
static void ring_all(Group& g) {
    for (int64_t rank = 0; rank < g.size; rank++) ring(&g.shared->lines[rank].bell);
}

static char* buffer(const Group& g, int64_t rank, int64_t round) {
    return (char*)(g.shared + 1) + (rank * g.depth + round % g.depth) * g.piece_bytes;
}
// Note in `status` why no call of this step succeeds any more. Return whether one can. A rank that ran ahead and failed
// in a later step has done its part of this one, or lacks a piece of it: see piece_of.
static bool is_sound(Group& g) {
    if (g.shared->aborted.load(std::memory_order_relaxed)) g.status = ABORTED;
    const int64_t next = (g.round >> STEP_BITS) + 1;
    for (int64_t rank = 0; !g.status && rank < g.size; rank++)
        if (g.shared->lines[rank].first_sound_step.load(std::memory_order_relaxed) == next) g.status = FAILED;
    return !g.status;
}

// Wait until `rank` has arrived at a round. Return whether it has.
static bool wait_for(Group& g, int64_t rank, int64_t round) {
    Line& line = g.shared->lines[rank];
    const int64_t begun = now_ns();
    while (line.arrived.load(std::memory_order_acquire) < round) {
        const int64_t waited = now_ns() - begun;
        if (!g.status && g.deadline_ns && waited > g.deadline_ns) g.status = LATE;
        if (!is_sound(g)) return false;
        if (waited < SPIN_NS) {
            for (int i = 0; i < 16; i++) pause_a_moment();
        } else if (waited < YIELD_NS) {
            sched_yield();
        } else {
            // A rank that arrives after the second load sees that this one sleeps, and then rings a newer bell.
            g.shared->num_sleeping.fetch_add(1);
            const uint32_t seen = line.bell.load();
            if (line.arrived.load() < round && is_sound(g)) sleep_on(&line.bell, seen);
            g.shared->num_sleeping.fetch_sub(1);
        }
    }
    return is_sound(g);
}
static bool wait_for_all(Group& g, int64_t round) {
    for (int64_t rank = 0; rank < g.size; rank++)
        if (!wait_for(g, rank, round)) return false;
    return true;
}

// Begin the next piece: return this rank's buffer for it, or null where the group has failed.
static char* begin(Group& g) {
    if (!is_sound(g)) return nullptr;
    g.round++;
    return wait_for_all(g, std::max(g.first, g.round - g.depth + 1)) ? buffer(g, g.rank, g.round) : nullptr;
}
static void arrive(Group& g) {
    Line& line = g.shared->lines[g.rank];
    line.arrived.store(g.round);
    if (g.shared->num_sleeping.load()) ring(&line.bell);
}
static void arrive(Group& g, int64_t bytes) {
    Line& line = g.shared->lines[g.rank];
    line.rounds[g.round % g.depth].store(g.round, std::memory_order_relaxed);
    line.pieces[g.round % g.depth].store(bytes, std::memory_order_relaxed);
    arrive(g);
}
// Return another rank's piece of this round, or null where it does not come or is none of `bytes`. A rank that has
// failed arrives at the next step without its piece.
static const char* piece_of(Group& g, int64_t rank, int64_t bytes) {
    if (!wait_for(g, rank, g.round)) return nullptr;
    const Line& line = g.shared->lines[rank];
    if (line.rounds[g.round % g.depth].load(std::memory_order_relaxed) != g.round) g.status = FAILED;
    else if (line.pieces[g.round % g.depth].load(std::memory_order_relaxed) != bytes) g.status = MIXED_UP;
    return g.status ? nullptr : buffer(g, rank, g.round);
}

struct AllReduce {
    Group* group;
    void* x;
    int64_t count;
};

template <class T>
static void all_reduce(Group& g, T* x, int64_t count, int threads) {
    const int64_t most = g.piece_bytes / (int64_t)sizeof(T);
    for (int64_t first = 0; first < count; first += most) {
        const int64_t num = std::min(most, count - first), bytes = num * sizeof(T), blocks = (num + 1023) / 1024;
        T *own = (T*)begin(g), *out = x + first;
        if (!own) return;
        memcpy(own, out, bytes);
        arrive(g, bytes);
        const T* pieces[MAX_RANKS];
        for (int64_t rank = 0; rank < g.size; rank++)
            if (!(pieces[rank] = (const T*)piece_of(g, rank, bytes))) return;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && num >= PARALLEL_ELEMENTS)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t end = std::min(num, (block + 1) * 1024);
            for (int64_t i = block * 1024; i < end; i += WIDTH) {
                Floats sum = load_some_floats(pieces[0] + i, end - i);
                for (int64_t rank = 1; rank < g.size; rank++) sum += load_some_floats(pieces[rank] + i, end - i);
                store_some_floats(out + i, sum, end - i);
            }
        }
    }
}

struct Concatenation {
    Group* group;
    const void* x;  // [S, `row_bytes`], of the same shape in all ranks
    void* out;      // [S, ranks * `row_bytes`]; null but in rank 0
    int64_t num_rows, row_bytes;
};

static void concatenate(const Concatenation& c) {
    Group& g = *c.group;
    const int64_t total = c.num_rows * c.row_bytes;
    for (int64_t first = 0; first < total; first += g.piece_bytes) {
        const int64_t bytes = std::min(g.piece_bytes, total - first);
        char* own = begin(g);
        if (!own) return;
        memcpy(own, (const char*)c.x + first, bytes);
        arrive(g, bytes);
        for (int64_t rank = 0; c.out && rank < g.size; rank++) {
            const char* piece = piece_of(g, rank, bytes);
            if (!piece) return;
            for (int64_t at = first; at < first + bytes;) {
                const int64_t row = at / c.row_bytes, offset = at % c.row_bytes;
                const int64_t num = std::min(first + bytes - at, c.row_bytes - offset);
                memcpy((char*)c.out + (row * g.size + rank) * c.row_bytes + offset, piece + at - first, num);
                at += num;
            }
        }
    }
}

struct Broadcast {
    Group* group;
    void* x;
    int64_t bytes;
};

static void broadcast(const Broadcast& b) {
    Group& g = *b.group;
    for (int64_t first = 0; first < b.bytes; first += g.piece_bytes) {
        const int64_t bytes = std::min(g.piece_bytes, b.bytes - first);
        char *own = begin(g), *x = (char*)b.x + first;
        if (!own) return;
        if (g.rank == 0) memcpy(own, x, bytes);
        arrive(g, bytes);
        if (g.rank == 0) continue;
        const char* piece = piece_of(g, 0, bytes);
        if (!piece) return;
        memcpy(x, piece, bytes);
    }
}

constexpr int64_t MORE = int64_t(1) << 62;

extern "C" {
int64_t by_group_bytes(int64_t size, int64_t depth, int64_t piece_bytes) {
    return (int64_t)sizeof(Shared) + size * depth * piece_bytes;
}
void by_all_reduce(int is_bf16, int threads, const AllReduce* a) {
    is_bf16 ? all_reduce(*a->group, (bf16*)a->x, a->count, threads) : all_reduce(*a->group, (float*)a->x, a->count, threads);
}
void by_concatenate(int, int, const Concatenation* c) { concatenate(*c); }
void by_broadcast(int, int, const Broadcast* b) { broadcast(*b); }

// Send a message from rank 0 to all others, which call by_receive until no more of it follows.
void by_send(Group* g, const char* message, int64_t bytes) {
    for (int64_t first = 0; first < bytes; first += g->piece_bytes) {
        const int64_t num = std::min(g->piece_bytes, bytes - first);
        char* own = begin(*g);
        if (!own) return;
        memcpy(own, message + first, num);
        arrive(*g, num | (first + num < bytes ? MORE : 0));
    }
}
// Wait for a piece of a message, and set `start` to where it lies until the next call. Return its bytes, with MORE if
// another one follows.
int64_t by_receive(Group* g, const char** start) {
    if (!begin(*g)) return 0;
    arrive(*g, 0);
    if (!wait_for(*g, 0, g->round)) return 0;
    *start = buffer(*g, 0, g->round);
    return g->shared->lines[0].pieces[g->round % g->depth].load(std::memory_order_relaxed);
}
// Take part in a step, whose number is higher than that of every earlier one.
void by_enter(Group* g, int64_t step) {
    g->status = SOUND;
    g->round = g->first = step << STEP_BITS;
    if (is_sound(*g)) arrive(*g);
}
// Let every call of this step return at once, in every rank.
void by_fail(Group* g) {
    g->shared->lines[g->rank].first_sound_step.store((g->round >> STEP_BITS) + 1);
    ring_all(*g);
}
// Let every call of every rank return at once, now and later. Any thread of any rank may call this.
void by_abort(Group* g) {
    g->shared->aborted.store(1);
    ring_all(*g);
}
}
