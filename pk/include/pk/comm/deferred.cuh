#pragma once
/// Signals of a storer that leave later than the program says, and never earlier: each when the bulk stores before it have
/// landed, while newer ones are still under way.  Without this a signal would wait for every store at once, and one tile
/// would be in flight instead of a ring of them.

#include "pk/comm/signal.cuh"

namespace pk {

inline constexpr int queued_signals = 8;

/// A signal that has not left: the counter, what to add, and how many bulk groups must have landed.
struct signal_slot {
    s32* word;
    s32 value;
    u32 groups;
};

/// The queue, of the role's leader: the other lanes call along.  All of it leaves (`flush`) before anything that may
/// block, because the peer that would end the wait may be waiting for one of these.  BEHIND: groups that may be under way
/// when an older one's signals leave.
template <int BEHIND>
struct signal_queue {
    signal_slot (&slots)[queued_signals];
    u32 first = 0, last = 0;  // signals in the queue: first .. last - 1
    u32 groups = 0;           // bulk groups that the leader has committed
    u32 turn = 0;             // bit of each slot: its signal is of another statement than the one before it
    int newest = -1;          // statement of the last signal

    PK_DEVICE explicit signal_queue(signal_slot (&s)[queued_signals]) : slots(s) {}

    /// After a bulk group has been committed: signals leave whose stores are older than the newest BEHIND groups.
    template <class Role>
    PK_DEVICE void committed(const Role& role) {
        if (!role.leader()) return;
        ++groups;
        if (first != last && due()) {
            store_wait<BEHIND>();
            send(role, false);
        }
    }

    /// All signals leave.
    template <class Role>
    PK_DEVICE void flush(const Role& role) {
        if (role.leader()) empty(role);
    }

    /// Adds `value` to a counter of rank `rank`, after all earlier stores of this role.
    template <class Role, int DIMS>
    PK_DEVICE void signal(Role& role, const signal_array<DIMS>& array, int index, int rank, s32 value, int site) {
        if (rank != static_cast<int>(role.ctx.rank)) meet(role, site);
        const u32 since = role.log.comes(site, index);
        if (role.leader()) {
            if (last - first == queued_signals) empty(role);
            const u32 bit = 1u << last % queued_signals;
            turn = site == newest ? turn & ~bit : turn | bit;
            newest = site;
            slots[last++ % queued_signals] = {counter(role, rank, array.offset + index), value, groups};
        }
        __syncwarp();
        role.log.passed(since);
    }

    /// Adds `value` to that counter of every rank.
    template <class Role, int DIMS>
    PK_DEVICE void signal_all(Role& role, const signal_array<DIMS>& array, int index, s32 value, int site) {
        meet(role, site);
#pragma unroll 1
        for (u32 r = 0; r < role.ctx.world; ++r) signal(role, array, index, r, value, site);
    }

    /// As `enter`, which may block.
    template <class Role>
    PK_DEVICE void meet(Role& role, int site) {
        if (role.entered) return;
        flush(role);
        enter(role, site);
    }

  private:
    PK_DEVICE bool due() const { return static_cast<s32>(groups - BEHIND - slots[first % queued_signals].groups) >= 0; }

    template <class Role>
    PK_DEVICE void empty(const Role& role) {
        if (first == last) return;
        store_wait<0>();
        send(role, true);
    }

    /// One release for all that leave together, and one more before each that must not overtake those of other
    /// statements.
    template <class Role>
    PK_DEVICE void send(const Role& role, bool everything) {
        const bool alive = !role.dead && !role.launch.dead;
        if (alive) fence_release_sys();
        const u32 begin = first;
#pragma unroll 1
        for (; first != last && (everything || due()); ++first) {
            const signal_slot& s = slots[first % queued_signals];
            if (alive && first != begin && (turn >> first % queued_signals & 1)) fence_release_sys();
            if (alive) red_relaxed_sys(s.word, s.value);
        }
    }
};

/// Before signals to several ranks in a row: one release for all of them.  True in the thread that adds.
template <class Role>
PK_DEVICE bool signals_begin(Role& role, int site) {
    enter(role, site);
    const u32 since = role.log.comes(site);
    const bool adds = stores_complete(role);
    if (adds) fence_release_sys();
    role.log.passed(since);
    return adds;
}

/// One of them.
template <class Role, int DIMS>
PK_DEVICE void signal_next(const Role& role, bool adds, const signal_array<DIMS>& array, int index, int rank, s32 value) {
    if (adds) red_relaxed_sys(counter(role, rank, array.offset + index), value);
}

}  // namespace pk
