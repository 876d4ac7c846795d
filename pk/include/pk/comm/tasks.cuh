#pragma once
/// Tasks that blocks claim (`pk.tasks(dynamic=True)`): numbers from a counter of the launch, passed through a small ring
/// in shared memory, so that all roles of a block see one sequence.

#include "pk/comm/pipeline.cuh"
#include "pk/comm/signal.cuh"

namespace pk {

inline constexpr int task_slots = 4;

/// A role that queues no signals.
struct no_signals {
    template <class Role> PK_DEVICE void flush(const Role&) const {}
};

struct task_claims {
    mbarrier full[task_slots];
    mbarrier empty[task_slots];
    volatile int number[task_slots];

    /// By one thread of the block, before `launch_begin`: warps of all roles, each of which reads every number.
    PK_DEVICE void init(int warps) {
#pragma unroll
        for (int s = 0; s < task_slots; ++s) {
            mbarrier_init(full[s], 1);
            mbarrier_init(empty[s], warps);
        }
    }

    /// By one thread, when all roles have left.
    PK_DEVICE void retire() {
#pragma unroll
        for (int s = 0; s < task_slots; ++s) {
            mbarrier_invalidate(full[s]);
            mbarrier_invalidate(empty[s]);
        }
    }

    /// The number of the block's next task, counted over all task loops of the class; it may be past the last.
    ///
    /// CLAIMS: this role takes it from the launch's counter `work`, early, while the others are still at their tasks.
    /// Roles that have given up go on claiming and reading, so that none of them waits here for ever.
    template <bool CLAIMS, class Role>
    PK_DEVICE int next(cursor<task_slots>& at, Role& role, int work) {
        no_signals none;
        return next<CLAIMS>(at, role, work, none);
    }

    /// The same by a role whose signals wait for its stores: they leave before it blocks.
    template <bool CLAIMS, class Role, class Signals>
    PK_DEVICE int next(cursor<task_slots>& at, Role& role, int work, Signals& signals) {
        const int slot = at.stage;
        if (CLAIMS && role.first_warp()) {
            while (!mbarrier_try_wait(empty[slot], at.phase ^ 1)) {}
            if (elect_one()) {
                number[slot] = atomic_add_gpu(reinterpret_cast<u32*>(counter(role, role.ctx.rank, work)), 1);
                mbarrier_arrive(full[slot]);
            }
            __syncwarp();
        }
        if (!__all_sync(0xffffffffu, mbarrier_try_wait(full[slot], at.phase))) {
            signals.flush(role);
            while (!mbarrier_try_wait(full[slot], at.phase)) {}
        }
        const int found = number[slot];
        __syncwarp();
        if (elect_one()) mbarrier_arrive(empty[slot]);
        at.advance();
        return found;
    }
};

}  // namespace pk
