#pragma once
/// Signals between ranks: counters in symmetric memory that are added to and waited for.  Every function is called by
/// all threads of the role, converged.

#include "pk/comm/role.cuh"
#include "pk/ptx/tma.cuh"

namespace pk {

/// `pk.signals(*shape)`: where the array starts among the launch's counters, and its shape.
template <int DIMS>
struct signal_array {
    int offset;
    int shape[DIMS ? DIMS : 1];

    template <class... Extent>
    PK_DEVICE explicit signal_array(int first, Extent... extent) : offset(first), shape{extent...} {
        static_assert(sizeof...(Extent) == DIMS, "one extent a dimension");
    }

    /// Flat number of a counter inside the array, row-major.
    template <class... Index>
    PK_DEVICE int index(Index... index) const {
        static_assert(sizeof...(Index) == DIMS, "one index a dimension");
        const int at[] = {index..., 0};
        int flat = 0;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) flat = flat * shape[i] + at[i];
        return flat;
    }
};

/// Counter `number` of the launch on rank `rank`.
template <class Role>
PK_DEVICE s32* counter(const Role& role, int rank, int number) {
    return role.ctx.of(rank)->counters + counter_set(role.launch.gen) * role.ctx.capacity + number;
}

/// The leader's part of `wait`: polls until the counter is at least `value`.
template <class Role>
PK_DEVICE bool wait_counter(const Role& role, const s32* word, int index, s32 value, int site) {
    patience limit;
    while (true) {
        const s32 seen = ld_relaxed_sys(word);
        if (seen >= value) break;
        const u32 why = limit.exhausted(role);
        if (why != 0) {
            give_up(role, why, site, index, seen, value, role.ctx.rank, 0, limit.t_begin, limit.t_end);
            return false;
        }
        if (limit.failures > 256) __nanosleep(64);
    }
    fence_acquire_sys();
    fence_proxy_async_global();
    return true;
}

/// Until my counter is at least `value`; everything after sees what was signalled, bulk copies included.
template <class Role, int DIMS>
PK_DEVICE void wait(Role& role, const signal_array<DIMS>& array, int index, s32 value, int site) {
    const u32 since = role.log.comes(site, index);
    bool ok = true;
    if (role.issues()) ok = wait_counter(role, counter(role, role.ctx.rank, array.offset + index), index, value, site);
    if (!role.all(ok)) role.dead = true;
    fence_proxy_async_global();
    role.log.passed(since);
}

/// Before the adds of a signal: every store of the role is complete as far as its leader is concerned.  True in the
/// leader if it may signal.
template <class Role>
PK_DEVICE bool stores_complete(Role& role) {
    if constexpr (Role::threads == 32) store_commit();  // those of a stage that is still held, too
    if (role.lanes_store) store_wait<0>();  // each for its own copies, before the barrier
    role.dead = !role.all(!role.dead);  // of every thread, before the leader releases them
    const bool signals = role.issues() && !role.launch.dead;
    if (signals) store_wait<0>();
    return signals;
}

/// Adds `value` to a counter of rank `rank`, after all earlier stores of this role.
template <class Role, int DIMS>
PK_DEVICE void signal(Role& role, const signal_array<DIMS>& array, int index, int rank, s32 value, int site) {
    if (rank != static_cast<int>(role.ctx.rank)) enter(role, site);
    const u32 since = role.log.comes(site, index);
    if (stores_complete(role)) red_release_sys(counter(role, rank, array.offset + index), value);
    role.log.passed(since);
}

/// Adds `value` to that counter of every rank, after all earlier stores of this role: one release for all.
template <class Role, int DIMS>
PK_DEVICE void signal_all(Role& role, const signal_array<DIMS>& array, int index, s32 value, int site) {
    enter(role, site);
    const u32 since = role.log.comes(site, index);
    if (stores_complete(role)) {
        fence_release_sys();
#pragma unroll 1
        for (u32 r = 0; r < role.ctx.world; ++r) red_relaxed_sys(counter(role, r, array.offset + index), value);
    }
    __syncwarp();
    role.log.passed(since);
}

/// All ranks arrive.  The `use`-th call on one counter in a launch (1, 2, ...) waits for use * world arrivals.
template <class Role, int DIMS>
PK_DEVICE void barrier(Role& role, const signal_array<DIMS>& array, int index, int site, int use = 1) {
    signal_all(role, array, index, 1, site);
    wait(role, array, index, use * static_cast<int>(role.ctx.world), site);
}

}  // namespace pk
