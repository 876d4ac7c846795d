#pragma once
/// Teams of warpgroups that take tasks in turn (`consumer(pingpong=True)`), and warpgroups that multiply in turn
/// (`stagger=True`).
///
/// Each turn has a named barrier a team: `bar.sync` to take it, `bar.arrive` on the next team's to give it.  The teams
/// pass every turn once a task, in the same order, so that no team can be more than a turn ahead.

#include "pk/comm/pipeline.cuh"

namespace pk {

/// Lets the threads at named barrier `id` go when `threads` have arrived there, without waiting.
PK_DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

/// A pipeline that TEAMS teams use in turn.  The turn carries the ring's position: a team goes on where the one before
/// it stopped, and its loader or storer sees task order and notices nothing.  NUMBER: of the turn in its block.
template <int TEAMS, int NUMBER>
struct team_turn {
    static constexpr int first_barrier = 1 + TEAMS + TEAMS * NUMBER;
    volatile u32 place;

    /// By one thread of the block, before `launch_begin`.
    PK_DEVICE void init() { place = 0; }

    /// At the role's begin: the last team lets the first one go.
    template <class Role>
    PK_DEVICE void open(const Role& role) const {
        if (role.team == TEAMS - 1) named_barrier_arrive(first_barrier, 2 * Role::threads);
    }

    /// Before the first use of the pipeline in a task.
    template <class Role, int STAGES>
    PK_DEVICE void take(const Role& role, cursor<STAGES>& at) const {
        named_barrier(first_barrier + role.team, 2 * Role::threads);
        at.stage = place >> 1;
        at.phase = place & 1;
    }

    /// After the last use in a task.  A stage that an mma still reads is released later all the same.
    template <class Role, int STAGES>
    PK_DEVICE void give(const Role& role, const cursor<STAGES>& at) {
        if (role.reports()) place = static_cast<u32>(at.stage) << 1 | at.phase;
        const int next = role.team + 1 == TEAMS ? 0 : role.team + 1;
        named_barrier_arrive(first_barrier + next, 2 * Role::threads);
    }

    /// At the role's end: the team whose turn it would be takes what was given to nobody.
    template <class Role>
    PK_DEVICE void close(const Role& role) const {
        if (role.has_turn()) named_barrier(first_barrier + role.team, 2 * Role::threads);
    }
};

/// The warpgroups of one role issue their mma one after the other, so that one multiplies while another computes.
template <int WARPGROUPS>
struct stagger {
    static constexpr int first_barrier = 2;  // 1 is the role's
    static constexpr int threads = 2 * 128;

    /// At the role's begin.
    template <class Role>
    PK_DEVICE void open(const Role& role) const {
        if (role.warpgroup() == WARPGROUPS - 1) named_barrier_arrive(first_barrier, threads);
    }
    /// Before a section of mma.
    template <class Role>
    PK_DEVICE void take(const Role& role) const { named_barrier(first_barrier + role.warpgroup(), threads); }
    /// After it has been issued.
    template <class Role>
    PK_DEVICE void give(const Role& role) const {
        const int after = role.warpgroup() + 1 == WARPGROUPS ? 0 : role.warpgroup() + 1;
        named_barrier_arrive(first_barrier + after, threads);
    }
    /// At the role's end: every section was given to all, so that the first is next.
    template <class Role>
    PK_DEVICE void close(const Role& role) const {
        if (role.warpgroup() == 0) named_barrier(first_barrier, threads);
    }
};

}  // namespace pk
