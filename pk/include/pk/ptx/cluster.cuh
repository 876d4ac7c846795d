#pragma once
/// Clusters of two blocks: who is who, their barrier, arrivals at the other's mbarriers, loads that go to both.

#include "pk/ptx/tma.cuh"

namespace pk {

/// Number of this block in its cluster.
PK_DEVICE int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

/// Waits for all threads of the cluster.  Relaxed: it orders no accesses but those that a fence or `bar.sync` has ordered,
/// and costs no fence of the whole GPU.
PK_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/// One arrival at the mbarrier that lies in block `rank` where `bar` lies in this one.
///
/// Without `.release.cluster`, which would be a fence of the whole GPU, about 1 us: what the arrival orders are reads
/// of shared memory that have been waited for.
PK_DEVICE void mbarrier_arrive_at(mbarrier& bar, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" :: "r"(shared_address(&bar)), "r"(rank) : "memory");
}

/// One box, tensor to the same place in the shared memory of every block in `mask`; its bytes count towards the mbarrier
/// at the same place in each.
template <int DIMS>
PK_DEVICE void tma_load_multicast(u32 to, const tensor_map& map, mbarrier& bar, const int (&at)[DIMS], u16 mask) {
    const u32 signal = shared_address(&bar);
    if constexpr (DIMS == 1)
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3}], [%2], %4;"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[0]), "h"(mask) : "memory");
    else if constexpr (DIMS == 2)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4}], [%2], %5;"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[1]), "r"(at[0]), "h"(mask) : "memory");
    else if constexpr (DIMS == 3)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5}], [%2], %6;"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[2]), "r"(at[1]), "r"(at[0]), "h"(mask) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[3]), "r"(at[2]), "r"(at[1]), "r"(at[0]), "h"(mask) : "memory");
}

}  // namespace pk
