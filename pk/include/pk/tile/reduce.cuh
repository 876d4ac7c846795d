#pragma once
/// Sums, maxima and minima along an axis of a register tile, after each thread has combined what it holds: first lanes
/// exchange (every one ends with the same value), then warps, through shared memory, in the order of the warps.

#include "pk/ptx/misc.cuh"
#include "pk/tile/linear.cuh"
#include "pk/tile/math.cuh"

namespace pk {

struct reduce_sum {
    template <class T> static PK_DEVICE T of(T x, T y) { return x + y; }
};
struct reduce_max {
    template <class T> static PK_DEVICE T of(T x, T y) { return greatest(x, y); }
};
struct reduce_min {
    template <class T> static PK_DEVICE T of(T x, T y) { return least(x, y); }
};

/// Combines the values of lanes that differ in bits FIRST, FIRST / 2, ..., LAST of their number.
template <class Op, int FIRST, int LAST, class T>
PK_DEVICE T reduce_lanes(T x) {
#pragma unroll
    for (int distance = FIRST; distance >= LAST; distance /= 2) x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

/// Words of shared memory in which warps exchange partial values: SLOTS a thread.
template <int WARPS, int SLOTS>
struct exchange {
    static constexpr int slots = SLOTS;
    u32 word[SLOTS][32 * WARPS];
};

/// Each thread's value to every thread, by slot.
template <class T>
PK_DEVICE void put(u32& word, T x) { word = reinterpret_cast<const u32&>(x); }
template <class T>
PK_DEVICE T got(const u32& word) { return reinterpret_cast<const T&>(word); }

/// Along rows, in a fragment: the four lanes of a row.
template <class Op, class T, int R, class Role>
PK_DEVICE void reduce_rows(register_tile<T, R, 1>& part, const Role&) {
#pragma unroll
    for (int ri = 0; ri < part.row_slots; ++ri) part.data[ri] = reduce_lanes<Op, 2, 1>(part.data[ri]);
}

/// Along rows, linear: the lanes of a warp ...
template <class Op, class T, int R, int WARPS, int SHARE, class Role>
PK_DEVICE void reduce_rows(linear_tile<T, R, 1, WARPS, SHARE>& part, const Role&) {
#pragma unroll
    for (int ri = 0; ri < part.row_slots; ++ri) part.data[ri] = reduce_lanes<Op, 16, 1>(part.data[ri]);
}

/// ... then the warps that share the row.
template <class Op, class T, int R, int WARPS, int SHARE, class Role, class Exchange>
PK_DEVICE void reduce_rows(linear_tile<T, R, 1, WARPS, SHARE>& part, const Role& role, Exchange& exchanged) {
    static_assert(linear_tile<T, R, 1, WARPS, SHARE>::row_slots == 1, "warps share a row only if there are fewer rows than warps");
    reduce_rows<Op>(part, role);
    role.sync();
    if (lane_index() == 0) put(exchanged.word[0][role.place()], part.data[0]);
    role.sync();
    const int first = part.set(role) * SHARE;
    T x = got<T>(exchanged.word[0][first]);
#pragma unroll
    for (int w = 1; w < SHARE; ++w) x = Op::of(x, got<T>(exchanged.word[0][first + w]));
    part.data[0] = x;
}

/// Along columns: COUNT warps, `first`, first + STRIDE, ..., hold the other rows of what this one has.
template <class Op, int COUNT, int STRIDE, class Tile, class Role, class Exchange>
PK_DEVICE void reduce_warps(Tile& part, const Role& role, Exchange& exchanged, int first) {
    using T = typename Tile::element;
#pragma unroll
    for (int at = 0; at < Tile::col_slots; at += Exchange::slots) {
        role.sync();
#pragma unroll
        for (int s = 0; s < Exchange::slots; ++s)
            if (at + s < Tile::col_slots) put(exchanged.word[s][role.thread()], part.data[at + s]);
        role.sync();
#pragma unroll
        for (int s = 0; s < Exchange::slots; ++s)
            if (at + s < Tile::col_slots) {
                T x = got<T>(exchanged.word[s][32 * first + lane_index()]);
#pragma unroll
                for (int w = 1; w < COUNT; ++w)
                    x = Op::of(x, got<T>(exchanged.word[s][32 * (first + w * STRIDE) + lane_index()]));
                part.data[at + s] = x;
            }
    }
}

/// Along columns, in a fragment: the eight lanes of a column, then all warps.
template <class Op, class T, int C, class Role, class Exchange>
PK_DEVICE void reduce_cols(register_tile<T, 1, C>& part, const Role& role, Exchange& exchanged) {
#pragma unroll
    for (int ci = 0; ci < part.col_slots; ++ci) part.data[ci] = reduce_lanes<Op, 16, 4>(part.data[ci]);
    reduce_warps<Op, Role::threads / 32, 1>(part, role, exchanged, 0);
}

/// Along columns, linear: the sets of warps that hold the other rows.
template <class Op, class T, int C, int WARPS, int SHARE, class Role, class Exchange>
PK_DEVICE void reduce_cols(linear_tile<T, 1, C, WARPS, SHARE>& part, const Role& role, Exchange& exchanged) {
    reduce_warps<Op, WARPS / SHARE, SHARE>(part, role, exchanged, role.place() % SHARE);
}

/// The same where one set holds all rows, as in a role of one warp.
template <class Op, class T, int C, int WARPS, class Role>
PK_DEVICE void reduce_cols(linear_tile<T, 1, C, WARPS, WARPS>&, const Role&) {}

/// The same of a single column, whose sum no lane shares.
template <class Op, class T, class Role, class Exchange>
PK_DEVICE void reduce_cols(register_tile<T, 1, 1>& part, const Role& role, Exchange& exchanged) {
    part.data[0] = reduce_lanes<Op, 16, 4>(part.data[0]);
    reduce_warps<Op, Role::threads / 32, 1>(part, role, exchanged, 0);
}

}  // namespace pk
