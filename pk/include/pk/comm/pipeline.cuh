#pragma once
/// A ring of stages between two roles of a block: `full` ends a phase when a stage has been filled, `empty` when it has
/// been drained.  Every function is called by all threads of the role, converged; the last one advances the cursor.

#include "pk/comm/role.cuh"
#include "pk/tile/cluster.cuh"
#include "pk/tile/mma.cuh"

namespace pk {

/// Where a role stands in a ring.
template <int STAGES>
struct cursor {
    int stage = 0;
    u32 phase = 0;      // parity of the current turn through the ring
    bool held = false;  // the previous stage is not yet released
    bool wrapped = false;  // at least one turn is complete

    /// The stage before this one.
    PK_DEVICE int previous() const { return stage == 0 ? STAGES - 1 : stage - 1; }
    /// On to the next stage.
    PK_DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
            wrapped = true;
        }
    }
};

/// SHARERS: blocks of a cluster that load each other's stages, so that a stage is free when all have drained theirs.
template <int STAGES, int SHARERS = 1>
struct pipeline {
    mbarrier full[STAGES];
    mbarrier empty[STAGES];

    /// By one thread of the block, before `launch_begin`: arrivals that fill and that drain a stage.
    PK_DEVICE void init(int fill_arrivals, int drain_arrivals) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full[s], fill_arrivals);
            mbarrier_init(empty[s], drain_arrivals);
        }
    }

    /// By one thread, when all roles have left: the bytes of the barriers are free.
    PK_DEVICE void retire() {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_invalidate(full[s]);
            mbarrier_invalidate(empty[s]);
        }
    }

    // -- filling ----------------------------------------------------------------------------------------------
    /// Until the current stage may be filled.  Passes at once in the first turn.
    template <class Role>
    PK_DEVICE void wait_empty(cursor<STAGES>& at, Role& role, int site) {
        wait_phase(role, empty[at.stage], at.phase ^ 1, at.stage, site);
    }

    /// The same by a storer whose signals wait for its stores: they leave before it blocks.
    template <class Role, class Signals>
    PK_DEVICE void wait_empty(cursor<STAGES>& at, Role& role, int site, Signals& signals) {
        wait_phase(role, empty[at.stage], at.phase ^ 1, at.stage, site, signals);
    }

    /// Loader leaves a stage: it is full when the loads issued into it have landed.
    PK_DEVICE void publish_loads(cursor<STAGES>& at) {
        if (elect_one()) mbarrier_arrive(full[at.stage]);
        at.advance();
    }

    /// Loader leaves a stage that it has filled behind `expect_loads`, or not at all if it has given up.
    template <class Role>
    PK_DEVICE void publish_expected(cursor<STAGES>& at, const Role& role) {
        if (role.dead && elect_one()) mbarrier_arrive(full[at.stage]);
        at.advance();
    }

    /// Consumer leaves a stage that it has stored to: visible to bulk copies, one arrival a warp.
    PK_DEVICE void publish_stores(cursor<STAGES>& at) {
        fence_proxy_async_shared();
        __syncwarp();
        if (elect_one()) mbarrier_arrive(full[at.stage]);
        at.advance();
    }

    /// End of a loader: its loads have landed, drained or not, before the block may end.  They depend on no peer.
    PK_DEVICE void finish_loads(const cursor<STAGES>& at, const launch_state& launch) {
        // A stage that another block helps to fill may take as long as that block does, unless one of them gave up.
        const int patience = SHARERS == 1 ? 1 << 22 : 1 << 10;
#pragma unroll 1
        for (int s = 0; s < STAGES; ++s) {
            const bool filled_this_turn = s < at.stage;
            if (!filled_this_turn && !at.wrapped) return;
            const u32 parity = filled_this_turn ? at.phase : at.phase ^ 1;
            int tries = 0;
            while (tries < patience && !mbarrier_try_wait(full[s], parity)) tries += SHARERS == 1 || launch.dead;
        }
    }

    // -- draining ---------------------------------------------------------------------------------------------
    /// Until the current stage has been filled.
    template <class Role>
    PK_DEVICE void wait_full(cursor<STAGES>& at, Role& role, int site) {
        wait_phase(role, full[at.stage], at.phase, at.stage, site);
    }

    /// The same by a storer whose signals wait for its stores: they leave before it blocks.
    template <class Role, class Signals>
    PK_DEVICE void wait_full(cursor<STAGES>& at, Role& role, int site, Signals& signals) {
        wait_phase(role, full[at.stage], at.phase, at.stage, site, signals);
    }

    /// Leaves a stage that has been read: one arrival a warp.
    PK_DEVICE void release(cursor<STAGES>& at) {
        release_held(at);
        __syncwarp();
        free(at.stage, true);
        at.advance();
    }

    /// Leaves a stage that an mma reads: commits it and, once all older ones are done, frees the stage before.
    PK_DEVICE void release_after_mma(cursor<STAGES>& at) {
        wgmma_commit();
        wgmma_wait<(STAGES > 1)>();  // a ring of one stage has no stage before: it is freed here
        release_held(at);
        at.held = true;
        at.advance();
        if constexpr (STAGES == 1) release_held(at);
    }

    /// After the last mma of a loop: waits for it and frees its stage; the elements of `acc` may then be used.
    template <int R, int C>
    PK_DEVICE void finish_mma(cursor<STAGES>& at, accumulator<R, C>& acc) {
        mma_finish(acc);
        release_held(at);
    }

    /// Storer leaves a stage: commits its stores and, once the previous ones have been read, frees the stage before.
    PK_DEVICE void release_after_store(cursor<STAGES>& at) {
        store_commit();
        store_wait_read<(STAGES > 1)>();
        release_held(at);
        at.held = true;
        at.advance();
        if constexpr (STAGES == 1) release_held(at);
    }

    /// Storer before anything that may block: all stages have been read and are free.
    PK_DEVICE void finish_stores(cursor<STAGES>& at) {
        store_wait_read<0>();
        release_held(at);
    }

    /// Frees the stage that a deferred release still holds: one arrival a warp.
    PK_DEVICE void release_held(cursor<STAGES>& at) {
        __syncwarp();
        free(at.previous(), at.held);
        at.held = false;
    }

    /// One arrival of this warp at the empty barrier of `stage`, in every block that loads it.
    PK_DEVICE void free(int stage, bool held) {
        if constexpr (SHARERS == 1) {
            if (elect_one() && held) mbarrier_arrive(empty[stage]);
        } else {
            if (lane_index() < SHARERS && held) mbarrier_arrive_at(empty[stage], lane_index());
        }
    }
};

}  // namespace pk
