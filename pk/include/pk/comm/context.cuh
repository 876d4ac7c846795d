#pragma once
/// What a launch shares with other ranks and with the host: the context in the kernel's parameters, the header of a
/// rank in symmetric memory, the record page that the host watches.  `pk/runtime/context.py` packs the same bytes.

#include "pk/ptx/mbarrier.cuh"

namespace pk {

inline constexpr int max_ranks = 8;
inline constexpr int record_slots = 16;

/// Launches use sets of counters in turn.  Of the others, one may still be signalled by who is late, one is being
/// cleared, and one is signalled already by who is ahead and early.
inline constexpr u32 counter_sets = 4;
PK_DEVICE u32 counter_set(u32 launch) { return launch % counter_sets; }

/// Entry and exit words: {hash of the launch : 32, number of the launch + 1 : 32}.
PK_DEVICE u64 launch_word(u32 hash, u32 number) { return static_cast<u64>(hash) << 32 | number; }

/// One rank's words of the protocol.  Each group of words has its own line, by who writes it.
struct header {
    u64 entry[max_ranks];  // by source rank: that rank has begun the launch
    u64 unused0[8];
    u64 exit[max_ranks];   // by source rank: that rank has finished the launch
    u64 unused1[8];
    u32 abort;             // 0, or 1 + the rank that gave up first; anyone writes it
    u32 unused2[31];
    u32 gen;               // number of the current launch; this and the next words: this rank only
    u32 used[4];           // counters that the last launch of each set declared
    u32 done;              // blocks that have finished
    u32 record_slots;      // records taken
    u32 unused3[25];
    s32 counters[1];       // [4][capacity]
};
static_assert(PK_OFFSETOF(header, exit) == 128);
static_assert(PK_OFFSETOF(header, abort) == 256);
static_assert(PK_OFFSETOF(header, gen) == 384);
static_assert(PK_OFFSETOF(header, counters) == 512);

/// How ranks meet in a launch.
enum meeting : u32 {
    EXIT_WORDS = 1,  // they wait for each other at the end
    EARLY = 2,       // they reach only counters and scratch of each other, which alternate, and need not wait to begin
};

/// The launch as the host describes it; the same on all ranks but for `rank`, `records` and the mapped addresses.
struct context {
    u64 peers[max_ranks];  // address of rank r's header as mapped here
    u64 records;           // address of this rank's record page
    u64 timeout_ns;        // limit of a wait for a counter or an exit word
    u64 entry_timeout_ns;  // limit of a wait for a rank to begin
    u32 rank;
    u32 world;
    u32 hash;              // identity of this launch, the same on all ranks
    u32 kernel_id;
    u32 counters;          // how many this launch declares
    u32 capacity;          // of one set, a multiple of 4
    u32 meeting;           // sum of EXIT_WORDS, EARLY
    u32 trace_notes;       // room of one log; see trace.cuh
    u64 trace;             // where this launch's logs go, 0: nowhere

    /// Header of rank `r`.
    PK_DEVICE header* of(int r) const {
#ifdef PK_SANITIZE
        r &= max_ranks - 1;  // a rank that does not exist has been noted, and nothing goes there
#endif
        return reinterpret_cast<header*>(peers[r]);
    }
    /// This rank's header.
    PK_DEVICE header* own() const { return of(rank); }
    /// Whether roles must see every rank begin before they touch what peers touch.
    PK_DEVICE bool gated() const { return world > 1 && (meeting & EARLY) == 0; }
};
static_assert(sizeof(context) == 128);

/// Why a wait was given up.
enum reason : u32 {
    REASON_COUNTER = 1,
    REASON_ENTRY = 2,
    REASON_EXIT = 3,
    REASON_PIPELINE = 4,
    REASON_DISAGREE = 5,  // ranks launched different kernels or shapes
    REASON_ASSERT = 6,
    REASON_TOLD = 7,      // another wait failed first; this one was still waiting
    REASON_BOUNDS = 8,    // PK_SANITIZE: an index outside its bound
};

/// What the host reads of a failed wait; `state` becomes 1 when the rest is complete.
struct record {
    u32 state, reason, kernel_id, site, rank, block, index;
    s32 seen, needed;
    u32 gen, peer, hash_mine, hash_theirs, tile_entries;
    s32 tile[4];
    u64 t_begin, t_end;
    u64 unused[5];
};
static_assert(PK_OFFSETOF(record, tile) == 56);
static_assert(PK_OFFSETOF(record, t_begin) == 72);
static_assert(sizeof(record) == 128);

/// A failed wait or assertion of one role, until the launch warp makes a record of it.
struct failure {
    u8 why;
    u8 first;            // this rank's first: its abort word was still 0
    u8 tile_entries;
    int site;
    int index;           // counter (flat, within its array), stage or rank
    s32 seen, needed;
    u32 peer, hash_theirs;
    s32 tile[4];
    u64 t_begin, t_end;
};

/// What the roles of a block share, in shared memory.
struct launch_state {
    mbarrier entered;   // phase 0 ends when every rank has begun this launch (or this block has given up)
    u32 gen;            // number of this launch
    volatile u32 dead;  // a role of this block has given up, or the context was already aborted
    u32 failed;         // failures noted; each role notes at most one
    s32 found;          // what `fetch_add` of the role of several warps found
    failure failures[7];  // of three teams, loader, storer, communicator and launch warp
};
static_assert(sizeof(launch_state) <= 512);

}  // namespace pk
