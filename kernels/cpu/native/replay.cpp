// Replays recorded calls of the other kernels one after the other, without Python between them.
//
// Also has the one operation that a step needs besides them: reading rows of a table.

#include "lanes.h"

// As in kernels/cpu/library.py.
struct Call {
    void (*function)(int is_bf16, int threads, const void* work);
    int64_t is_bf16;
    const void* work;
};

struct Gather {
    const void* table;  // [V, `row_bytes`]
    const int64_t* rows;
    void* out;
    int64_t table_rows, num_rows, row_bytes;
};

extern "C" {
void by_replay(int threads, const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].is_bf16, threads, calls[i].work);
}

// A row beyond the table is NaN.
void by_gather(int, int, const Gather* g) {
    for (int64_t i = 0; i < g->num_rows; i++) {
        char* out = (char*)g->out + i * g->row_bytes;
        const int64_t row = g->rows[i];
        if (row < 0 || row >= g->table_rows)
            memset(out, 0xff, g->row_bytes);
        else
            memcpy(out, (const char*)g->table + row * g->row_bytes, g->row_bytes);
    }
}
}
