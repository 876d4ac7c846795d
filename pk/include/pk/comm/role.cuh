#pragma once
/// A role: the warps of a block that run one `with pk.<role>()`, and what they must remember to give up together.
///
/// A wait that fails does not leave the loop: it notes why, raises the abort word and sets `dead`.  A dead role
/// keeps its control flow, waits for nothing, moves nothing between memories and signals nobody, so it ends soon.

#include "pk/comm/trace.cuh"
#include "pk/ptx/fence.cuh"
#include "pk/ptx/ld_st.cuh"

namespace pk {

/// State of a role of WARPS warps from FIRST_WARP on.  BARRIER is the named barrier of a role of several warps.  TEAMS of
/// so many warps, one behind the other, take tasks in turn; each team is a role of its own (`turns.cuh`).
template <int WARPS, int FIRST_WARP, int BARRIER = 1, int TEAMS = 1>
struct role {
    static constexpr int threads = 32 * WARPS;
    const context& ctx;
    launch_state& launch;
    const int warp;        // number of this warp in the block, uniform
    const int team;        // number of this warp's team
    int turn = 0;          // the team that takes the next task
    bool dead = false;     // this thread has given up
    bool lanes_store = false;  // every lane issues bulk stores (`scatter_async`), not only the leader
    bool entered;          // every rank is known to have begun this launch, or need not be
    int tile_entries = 0;  // the task, for records
    int tile[4] = {};
    trace_log log;

    PK_DEVICE role(const context& c, launch_state& l)
        : ctx(c), launch(l), warp(warp_index()), team(TEAMS == 1 ? 0 : (warp - FIRST_WARP) / WARPS), entered(!c.gated()) {
        log.open(ctx, reports(), WARPS == 1 ? FIRST_WARP % 4 : 4 + team);
    }
    PK_DEVICE ~role() { log.close(); }

    /// The first warp of this thread's team.
    PK_DEVICE int first() const { return TEAMS == 1 ? FIRST_WARP : FIRST_WARP + WARPS * team; }
    /// Whether the next task is this team's.
    PK_DEVICE bool has_turn() const { return TEAMS == 1 || turn == team; }
    /// The task after is the next team's.
    PK_DEVICE void pass() { turn = turn + 1 == TEAMS ? 0 : turn + 1; }

    /// Number of this thread's warpgroup in the role.
    PK_DEVICE int warpgroup() const { return (warp - first()) / 4; }
    /// Number of this thread in the role.
    PK_DEVICE int thread() const { return static_cast<int>(threadIdx.x) - 32 * first(); }
    /// Number of this warp in the role.
    PK_DEVICE int place() const { return warp - first(); }
    /// Whether this is the role's first warp.
    PK_DEVICE bool first_warp() const { return WARPS == 1 || warp == first(); }
    /// Whether this thread writes the role's records.
    PK_DEVICE bool reports() const { return threadIdx.x == 32 * first(); }

    /// True in the one thread that issues the role's bulk copies and signals.  Called by converged warps.
    PK_DEVICE bool leader() const { return elect_one() && first_warp(); }
    /// The leader, while it is not dead.
    PK_DEVICE bool issues() const { return leader() && !dead; }

    /// Waits for all threads of the role.
    PK_DEVICE void sync() const {
        if constexpr (WARPS == 1) __syncwarp();
        else named_barrier(BARRIER + team, threads);
    }
    /// Waits for all threads of the role; true everywhere if `mine` is true in all.
    PK_DEVICE bool all(bool mine) const {
        if constexpr (WARPS == 1) {
            const bool everybody = __all_sync(0xffffffffu, mine);
            __syncwarp();  // a vote alone orders no memory
            return everybody;
        } else return named_barrier_all(BARRIER + team, threads, mine);
    }

    /// Names the task that the role works on, for records.
    template <class... Entry>
    PK_DEVICE void visit(Entry... entry) {
        static_assert(sizeof...(Entry) <= 4, "records hold 4 coordinates");
        const int values[] = {entry..., 0};
        tile_entries = sizeof...(Entry);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof...(Entry)); ++i) tile[i] = values[i];
        log.task(tile_entries, tile);
    }
};

/// One thread of a role gives up: raises this rank's abort word and notes why.  The caller sets `dead` in all threads of
/// the role; the launch warp writes the record and tells the peers when the roles of this block have ended, which is soon.
template <class Role>
PK_DEVICE void give_up(const Role& role, u32 why, int site, int index = 0, s32 seen = 0, s32 needed = 0, u32 peer = 0,
                       u32 hash_theirs = 0, u64 t_begin = 0, u64 t_end = 0) {
    launch_state& launch = role.launch;
    launch.dead = 1;
    u32 first = 0;
    if (why != REASON_TOLD) first = atomic_cas_sys(&role.ctx.own()->abort, 0, 1 + role.ctx.rank) == 0;
    const u32 slot = atomic_add_shared(&launch.failed, 1);
    if (slot >= sizeof(launch.failures) / sizeof(failure)) return;
    failure& f = launch.failures[slot];
    f.why = why;
    f.site = site;
    f.index = index;
    f.seen = seen;
    f.needed = needed;
    f.peer = peer;
    f.hash_theirs = hash_theirs;
    f.first = first;
    f.tile_entries = role.tile_entries;
#pragma unroll
    for (int i = 0; i < 4; ++i) f.tile[i] = role.tile[i];
    f.t_begin = t_begin;
    f.t_end = t_end;
}

/// Bounds one wait.  Every 32nd failed poll looks at the abort word and, from then on, at the clock.
struct patience {
    u32 failures = 0;
    u64 t_begin = 0, t_end = 0;

    /// Called after a failed poll: 0 to go on, else why to give up (`late`, or REASON_TOLD).
    PK_DEVICE u32 exhausted(const context& ctx, u64 limit, u32 late) {
        if (++failures % 32 != 0) return 0;
        t_end = global_timer();
        if (t_begin == 0) t_begin = t_end;
        if (ld_relaxed_sys(&ctx.own()->abort) != 0) return REASON_TOLD;
        return t_end - t_begin > limit ? late : 0;
    }

    /// The same of a wait for a counter.  Its time begins when every rank has begun; until then the launch warp's runs.
    template <class Role>
    PK_DEVICE u32 exhausted(const Role& role) {
        if (failures % 32 == 31 && !mbarrier_try_wait(role.launch.entered, 0)) t_begin = 0;
        return exhausted(role.ctx, role.ctx.timeout_ns, REASON_COUNTER);
    }
};

/// The rest of `wait_phase`, when the phase has not ended yet.
template <class Role>
PK_DEVICE void wait_phase_on(Role& role, mbarrier& bar, u32 parity, int index, int site) {
    patience limit;
    do {
        const u32 why = limit.exhausted(role.ctx, role.ctx.timeout_ns + role.ctx.entry_timeout_ns, REASON_PIPELINE);
        // Only the reporting thread may time out; the others then find the abort word.
        if (why == REASON_TOLD || (why != 0 && role.reports())) {
            if (role.reports())
                give_up(role, why, site, index, 0, 0, role.ctx.rank, 0, limit.t_begin, limit.t_end);
            role.dead = true;
        }
    } while (!role.dead && !mbarrier_try_wait(bar, parity));
}

/// Waits, bounded, for the end of a barrier's phase.  Never the first to time out: a pipeline starves because some
/// other wait does, whose record names the cause.
template <class Role>
PK_DEVICE void wait_phase(Role& role, mbarrier& bar, u32 parity, int index, int site) {
    const u32 since = role.log.comes(site, index);
    if (!role.dead && !mbarrier_try_wait(bar, parity)) wait_phase_on(role, bar, parity, index, site);
    role.log.passed(since);
}

/// The same by a storer whose signals wait for its stores: they leave before it blocks.
template <class Role, class Signals>
PK_DEVICE void wait_phase(Role& role, mbarrier& bar, u32 parity, int index, int site, Signals& signals) {
    role.log.comes(site, index);
    if (__all_sync(0xffffffffu, role.dead || mbarrier_try_wait(bar, parity))) return;
    signals.flush(role);
    wait_phase(role, bar, parity, index, site);
}

/// Every rank has begun this launch, so that its buffers and counters may be touched.  Stands before the first access of
/// a role to a peer; free after the first call.
template <class Role>
PK_DEVICE void enter(Role& role, int site) {
    if (role.entered) return;
    role.entered = true;
    wait_phase(role, role.launch.entered, 0, 0, site);
    if (role.launch.dead) role.dead = true;
    fence_proxy_async_global();
    __syncwarp();
}

/// An assertion of the user's: a false condition makes a record, aborts the launch and kills the role.
template <class Role>
PK_DEVICE void device_assert(Role& role, bool condition, int site) {
    if (role.all(condition || role.dead)) return;
    if (role.issues()) give_up(role, REASON_ASSERT, site);
    role.dead = true;
}

}  // namespace pk
