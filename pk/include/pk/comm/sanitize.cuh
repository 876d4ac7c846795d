#pragma once
/// What kernels built with PK_SANITIZE do besides: indices are looked at before they are used, and shared memory is NaN
/// until something writes it.

#include "pk/comm/role.cuh"
#include "pk/tile/vector.cuh"

namespace pk {

/// By all threads of the block, before anything in shared memory is made: `bytes` (a multiple of 16) become NaN in every
/// floating-point type, for the tensor core too.
PK_DEVICE void poison_shared(unsigned char* memory, int bytes) {
#pragma unroll 1
    for (int i = 16 * static_cast<int>(threadIdx.x); i < bytes; i += 16 * static_cast<int>(blockDim.x))
        *reinterpret_cast<uint4*>(memory + i) = make_uint4(~0u, ~0u, ~0u, ~0u);
    fence_proxy_async_shared();
    __syncthreads();
}

/// Notes that `index` is none of 0 .. bound - 1.  One thread of the role.
template <class Role>
PK_DEVICE void out_of_bounds(const Role& role, int index, int bound, int site) {
    give_up(role, REASON_BOUNDS, site, index, index, bound, role.ctx.rank);
}

/// Unless least <= index < bound + slack: makes a record, aborts the launch and kills the role.
template <class Role>
PK_DEVICE void check_bounds(Role& role, int index, int bound, int site, int least = 0, int slack = 0) {
    if (role.all(role.dead || (least <= index && index < bound + slack))) return;
    if (role.issues()) out_of_bounds(role, index, bound, site);
    role.dead = true;
}

/// The same for every element of a vector; a negative one stands for nothing, and passes.
template <class Role, class T, int R>
PK_DEVICE void check_bounds(Role& role, const index_vector<T, R>& index, int bound, int site, int = 0, int slack = 0) {
    bool ok = true;
    int wrong = 0;
#pragma unroll
    for (int i = 0; i < index.words; ++i)
        if (index.holds(i) && index.data[i] >= bound + slack) {
            ok = false;
            wrong = index.data[i];
        }
    if (role.all(role.dead || ok)) return;
    const u32 lanes = __ballot_sync(0xffffffffu, !ok);
    if (!role.dead && role.first_warp() && lane_index() == __ffs(lanes) - 1) out_of_bounds(role, wrong, bound, site);
    role.dead = true;
}

}  // namespace pk
