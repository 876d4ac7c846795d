#pragma once
/// Bulk tensor copies (TMA) for 1 to 4 dimensions.  One thread issues; `at` counts elements, outermost dimension first.
/// What lies outside the tensor reads as zero and is dropped on writing.

#include "pk/ptx/mbarrier.cuh"

namespace pk {

/// A CUtensorMap, encoded by the host.  Must stay in kernel parameters (64-byte aligned, `__grid_constant__`).
struct alignas(64) tensor_map { u8 opaque[128]; };

/// Fetches the descriptor into the cache that TMA reads it from.
PK_DEVICE void prefetch(const tensor_map& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

/// One box, tensor to shared memory; its bytes count towards `bar`.
template <int DIMS>
PK_DEVICE void tma_load(u32 to, const tensor_map& map, mbarrier& bar, const int (&at)[DIMS]) {
    const u32 signal = shared_address(&bar);
    if constexpr (DIMS == 1)
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3}], [%2];"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 2)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4}], [%2];"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[1]), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 3)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5}], [%2];"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                     :: "r"(to), "l"(&map), "r"(signal), "r"(at[3]), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
}

/// One box, shared memory to tensor; belongs to this thread's next `store_commit`.
template <int DIMS>
PK_DEVICE void tma_store(const tensor_map& map, u32 from, const int (&at)[DIMS]) {
    if constexpr (DIMS == 1)
        asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 2)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[1]), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 3)
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[3]), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
}

/// As `tma_store`, but each element is added to the tensor's, atomically.
template <int DIMS>
PK_DEVICE void tma_store_add(const tensor_map& map, u32 from, const int (&at)[DIMS]) {
    if constexpr (DIMS == 1)
        asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%2}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 2)
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[1]), "r"(at[0]) : "memory");
    else if constexpr (DIMS == 3)
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
    else
        asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     :: "l"(&map), "r"(from), "r"(at[3]), "r"(at[2]), "r"(at[1]), "r"(at[0]) : "memory");
}

/// Closes this thread's current group of bulk stores.
PK_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Until at most the newest N groups of this thread are unfinished: the others' writes are visible to it.
template <int N>
PK_DEVICE void store_wait() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }

/// Until at most the newest N groups of this thread still read shared memory.
template <int N>
PK_DEVICE void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }

}  // namespace pk
