#pragma once
/// Fences, each naming its state space and scope: unqualified forms cost 15 to 30 times as much.

#include "pk/ptx/misc.cuh"

namespace pk {

/// Makes this thread's earlier writes to shared memory visible to bulk copies issued after a barrier.
PK_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Orders this thread's earlier generic accesses to global memory against its later bulk copies, both directions.
PK_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Turns an earlier relaxed read into an acquire (one L1 invalidate, whatever the number of polls).
PK_DEVICE void fence_acquire_sys() { asm volatile("fence.acquire.sys;" ::: "memory"); }

/// Releases this thread's earlier accesses (and what it has itself acquired) to every GPU and the host.
PK_DEVICE void fence_release_sys() { asm volatile("fence.release.sys;" ::: "memory"); }

/// Makes initialised mbarriers visible to bulk copies; a block barrier makes them visible to threads.
PK_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_proxy_async_shared();
}

}  // namespace pk
