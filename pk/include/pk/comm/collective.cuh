#pragma once
/// Windows of all ranks combined: `reduce` into one copy of a tensor, `all_reduce` into every copy.  Called by all
/// threads of a role that knows that every rank has begun (`enter`).
///
/// 16 bytes a lane, several ranks' loads in flight; values are added in float32 in rank order and rounded once.  Where the
/// 16 bytes are not whole (edges of a tensor, odd strides) the same is done element by element.

#include "pk/comm/role.cuh"
#include "pk/comm/signal.cuh"
#include "pk/ptx/multimem.cuh"
#include "pk/tile/view.cuh"

namespace pk {

/// x and y made one; NaN wins.
template <combine OP>
PK_DEVICE float combined(float x, float y) {
    float z = x + y;
    if constexpr (OP == combine::min) asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    if constexpr (OP == combine::max) asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/// A matrix of a tensor, seen from a window's first element: the last two dimensions at the window's leading coordinates.
struct window {
    long long first;  // offset of the window's first element from the tensor's base
    int top, left;    // of the window, in the matrix
    int rows, cols;   // of the matrix; no rows if a leading coordinate lies outside
    int row_stride, col_stride;

    template <int DIMS>
    PK_DEVICE window(const tensor_shape<DIMS>& shape, const int (&at)[DIMS])
        : first(0), top(0), left(at[DIMS - 1]), rows(1), cols(shape.extent[DIMS - 1]), row_stride(0),
          col_stride(shape.stride[DIMS - 1]) {
        if constexpr (DIMS > 1) {
            top = at[DIMS - 2];
            rows = shape.extent[DIMS - 2];
            row_stride = shape.stride[DIMS - 2];
        }
#pragma unroll
        for (int d = 0; d < DIMS; ++d) {
            first += static_cast<long long>(at[d]) * shape.stride[d];
            if (d < DIMS - 2 && !(0 <= at[d] && at[d] < shape.extent[d])) rows = 0;
        }
    }

    /// Whether elements (row, col) .. (row, col + count - 1) of the window lie in the tensor.
    PK_DEVICE bool holds(int row, int col, int count = 1) const {
        return 0 <= top + row && top + row < rows && 0 <= left + col && left + col + count <= cols;
    }
    /// Whether all of a window of `height` rows and `width` columns lies in the tensor.
    PK_DEVICE bool holds_all(int height, int width) const { return holds(0, 0, width) && holds(height - 1, 0, width); }
    /// Offset of an element of the window from the tensor's base.
    PK_DEVICE long long offset(int row, int col) const {
        return first + static_cast<long long>(row) * row_stride + static_cast<long long>(col) * col_stride;
    }
    /// Whether accesses of `bytes` at multiples of so many from the window's rows on are aligned and whole.
    template <class T>
    PK_DEVICE bool aligned(const T* base, u32 bytes) const {
        const u32 address = static_cast<u32>(reinterpret_cast<u64>(base + first));
        return ((address | row_stride * static_cast<u32>(sizeof(T))) & (bytes - 1)) == 0 && col_stride == 1;
    }
    /// What keeps 16-byte accesses to the window's rows from being aligned and whole; 0: nothing.
    template <class T>
    PK_DEVICE u32 odd(const T* base) const {
        const u32 address = static_cast<u32>(reinterpret_cast<u64>(base + first));
        return (address | row_stride * static_cast<u32>(sizeof(T))) % 16 | (col_stride != 1);
    }
};

/// Where the combined values go: one copy of a tensor ...
template <class View>
struct one_copy {
    using element = typename View::element;
    const View& view;
    int rank;

    template <class Write> PK_DEVICE void each(int, Write write) const { write(view.of(rank)); }
};

/// ... or every rank's.
template <class View>
struct every_copy {
    using element = typename View::element;
    const View& view;

    template <class Write> PK_DEVICE void each(int world, Write write) const {
#pragma unroll 1
        for (int r = 0; r < world; ++r) write(view.of(r));
    }
};

// Writers for `each`.  Not lambdas: NVRTC 13.0 takes the call operator of a generic lambda for a host function.
template <class T> struct write_packet {
    long long offset;
    const packet<T>& value;
    PK_DEVICE void operator()(T* base) const { st_packet(base + offset, value); }
};
template <class T> struct write_element {
    long long offset;
    float value;
    PK_DEVICE void operator()(T* base) const { st_element(base + offset, value); }
};

/// One element of every rank, combined in rank order, to where it goes.
template <combine OP, class View, class To>
PK_DEVICE void reduce_element(int world, const View& from, const window& source, const To& to, const window& target, int row,
                              int col) {
    using T = typename View::element;
    if (!target.holds(row, col)) return;
    float value = 0.0f;
    if (source.holds(row, col)) {
        value = ld_element(from.of(0) + source.offset(row, col));
#pragma unroll 1
        for (int r = 1; r < world; ++r) value = combined<OP>(value, ld_element(from.of(r) + source.offset(row, col)));
    }
    to.each(world, write_element<T>{target.offset(row, col), value});
}

/// 16 bytes of each of up to RANKS ranks, combined in rank order.
template <combine OP, class T, int RANKS>
PK_DEVICE packet<T> combine_packets(const packet<T> (&from)[RANKS], int world) {
    float total[packet<T>::elements];
    widen(from[0], total);
#pragma unroll
    for (int r = 1; r < RANKS; ++r)
        if (r < world) {
            float next[packet<T>::elements];
            widen(from[r], next);
#pragma unroll
            for (int i = 0; i < packet<T>::elements; ++i) total[i] = combined<OP>(total[i], next[i]);
        }
    return narrowed<T>(total);
}

/// The whole packets of a window of R rows and C columns: DEPTH a thread, of up to RANKS ranks each, all in flight at once.
template <combine OP, int R, int C, int RANKS, int DEPTH, class Role, class View, class To>
PK_DEVICE void reduce_packets(const Role& role, const View& from, const window& source, const To& to, const window& target) {
    using T = typename View::element;
    constexpr int elements = packet<T>::elements, across = C < elements ? 1 : C / elements, packets = C < elements ? 0 : R * across;
    const int world = role.ctx.world;
#pragma unroll 1
    for (int first = role.thread(); first < packets; first += DEPTH * Role::threads) {
        packet<T> x[DEPTH][RANKS] = {};  // or registers that are not loaded would stay live from turn to turn
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int i = first + d * Role::threads, row = i / across, col = i % across * elements;
            const bool here = i < packets && source.holds(row, col, elements) && target.holds(row, col, elements);
            const long long offset = source.offset(row, col);
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (here && r < world) x[d][r] = ld_packet(from.of(r) + offset);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int i = first + d * Role::threads, row = i / across, col = i % across * elements;
            if (i < packets && source.holds(row, col, elements) && target.holds(row, col, elements)) {
                const packet<T> value = combine_packets<OP, T, RANKS>(x[d], world);
                to.each(world, write_packet<T>{target.offset(row, col), value});
            }
        }
    }
}

/// The rest of the window, element by element: all of it, or what packets leave out at edges.
template <combine OP, int R, int C, class Role, class View, class To>
PK_DEVICE void reduce_rest(const Role& role, bool packets, const View& from, const window& source, const To& to,
                           const window& target) {
    constexpr int elements = packet<typename View::element>::elements;
    if (packets && C % elements == 0 && source.holds_all(R, C) && target.holds_all(R, C)) return;
#pragma unroll 1
    for (int i = role.thread(); i < R * C; i += Role::threads) {
        const int row = i / C, col = i % C, start = col - col % elements;
        const bool done = packets && start + elements <= C && source.holds(row, start, elements) &&
                          target.holds(row, start, elements);
        if (!done) reduce_element<OP>(role.ctx.world, from, source, to, target, row, col);
    }
}

/// The window by loads from every rank, with loops for the number of ranks there is.
template <combine OP, int R, int C, class Role, class View, class To>
PK_DEVICE void reduce_by_loads(const Role& role, bool packets, const View& from, const window& source, const To& to,
                               const window& target) {
    if (packets) {
        if (role.ctx.world <= 2) reduce_packets<OP, R, C, 2, 4>(role, from, source, to, target);
        else if (role.ctx.world <= 4) reduce_packets<OP, R, C, 4, 2>(role, from, source, to, target);
        else reduce_packets<OP, R, C, 8, 1>(role, from, source, to, target);
    }
    reduce_rest<OP, R, C>(role, packets, from, source, to, target);
}

/// The window of R rows and C columns at `source_at` of every rank's copy, combined in rank order, to one copy of a tensor.
template <combine OP, int R, int C, class Role, class ToView, class View>
PK_DEVICE void reduce(const Role& role, const ToView& to, int rank, const int (&at)[ToView::dims], const View& from,
                      const int (&source_at)[View::dims]) {
    role.sync();  // the role's earlier stores are seen
    if (role.dead) return;
    const window target(to.shape, at), source(from.shape, source_at);
    u32 odd = target.odd(to.of(rank));
    for (int r = 0; r < static_cast<int>(role.ctx.world); ++r) odd |= source.odd(from.of(r));
    reduce_by_loads<OP, R, C>(role, odd == 0, from, source, one_copy<ToView>{to, rank}, target);
}

/// The same, to every rank's copy of that window.
template <combine OP, int R, int C, class Role, class View>
PK_DEVICE void all_reduce(const Role& role, const View& tensor, const int (&at)[View::dims]) {
    role.sync();
    if (role.dead) return;
    const window place(tensor.shape, at);
    u32 odd = 0;
    for (int r = 0; r < static_cast<int>(role.ctx.world); ++r) odd |= place.odd(tensor.of(r));
    reduce_by_loads<OP, R, C>(role, odd == 0, tensor, place, every_copy<View>{tensor}, place);
}

// -- through multicast addresses -----------------------------------------------------------------------------------
/// `reduce` with the ranks' values combined in the switch, in no defined order.  `multicast`: address that stands for every
/// rank's copy of `from`.  What is not whole packets is combined by loads.
template <combine OP, int R, int C, class Role, class ToView, class View>
PK_DEVICE void reduce_multicast(const Role& role, const ToView& to, int rank, const int (&at)[ToView::dims],
                                const View& from, const typename View::element* multicast,
                                const int (&source_at)[View::dims]) {
    using T = typename View::element;
    if constexpr (!in_network<T, OP>) {
        reduce<OP, R, C>(role, to, rank, at, from, source_at);
    } else {
        constexpr int elements = packet<T>::elements, across = C < elements ? 1 : C / elements;
        role.sync();
        if (role.dead) return;
        const window target(to.shape, at), source(from.shape, source_at);
        const bool packets = (target.odd(to.of(rank)) | source.odd(multicast)) == 0;
        fence_proxy_alias();
#pragma unroll 1
        for (int i = role.thread(); packets && C >= elements && i < R * across; i += Role::threads) {
            const int row = i / across, col = i % across * elements;
            if (source.holds(row, col, elements) && target.holds(row, col, elements))
                st_packet(to.of(rank) + target.offset(row, col),
                          multimem_ld_reduce<OP>(multicast + source.offset(row, col)));
        }
        reduce_rest<OP, R, C>(role, packets, from, source, one_copy<ToView>{to, rank}, target);
        fence_proxy_alias();
    }
}

/// `all_reduce`, combined and copied in the switch.
template <combine OP, int R, int C, class Role, class View>
PK_DEVICE void all_reduce_multicast(const Role& role, const View& tensor, typename View::element* multicast,
                                    const int (&at)[View::dims]) {
    using T = typename View::element;
    if constexpr (!in_network<T, OP>) {
        all_reduce<OP, R, C>(role, tensor, at);
    } else {
        constexpr int elements = packet<T>::elements, across = C < elements ? 1 : C / elements;
        role.sync();
        if (role.dead) return;
        const window place(tensor.shape, at);
        const bool packets = place.odd(multicast) == 0;
        fence_proxy_alias();
#pragma unroll 1
        for (int i = role.thread(); packets && C >= elements && i < R * across; i += Role::threads) {
            const int row = i / across, col = i % across * elements;
            if (!place.holds(row, col, elements)) continue;
            T* const p = multicast + place.offset(row, col);
            multimem_st(p, multimem_ld_reduce<OP>(p));
        }
        reduce_rest<OP, R, C>(role, packets, tensor, place, every_copy<View>{tensor}, place);
        fence_proxy_alias();
    }
}

/// `signal_all` by one add in the switch.  `multicast`: address that stands for every rank's header.
template <class Role, int DIMS>
PK_DEVICE void signal_all_multicast(Role& role, header* multicast, const signal_array<DIMS>& array, int index, s32 value,
                                    int site) {
    enter(role, site);
    const u32 since = role.log.comes(site, index);
    if (stores_complete(role)) {
        fence_proxy_alias();
        s32* const set = multicast->counters + counter_set(role.launch.gen) * role.ctx.capacity;
        multimem_red_release_sys(set + array.offset + index, value);
    }
    __syncwarp();
    role.log.passed(since);
}

/// `signal`, after what may have left through multicast addresses.
template <class Role, int DIMS>
PK_DEVICE void signal_multicast(Role& role, const signal_array<DIMS>& array, int index, int rank, s32 value, int site) {
    if (rank != static_cast<int>(role.ctx.rank)) enter(role, site);
    const u32 since = role.log.comes(site, index);
    if (stores_complete(role)) {
        fence_proxy_alias();
        red_release_sys(counter(role, rank, array.offset + index), value);
    }
    role.log.passed(since);
}

/// `wait`, for what may have arrived through multicast addresses.
template <class Role, int DIMS>
PK_DEVICE void wait_multicast(Role& role, const signal_array<DIMS>& array, int index, s32 value, int site) {
    wait(role, array, index, value, site);
    fence_proxy_alias();
}

/// `barrier`, signalled through the switch.
template <class Role, int DIMS>
PK_DEVICE void barrier_multicast(Role& role, header* multicast, const signal_array<DIMS>& array, int index, int site) {
    signal_all_multicast(role, multicast, array, index, 1, site);
    wait_multicast(role, array, index, static_cast<int>(role.ctx.world), site);
}

}  // namespace pk
