#pragma once
/// Register tiles and scalars to and from tensors, by the threads of a role.  Memory that a peer or another block may
/// write is read by explicit loads only: relaxed at system scope, never through a cache that does not see the write.

#include "pk/comm/collective.cuh"
#include "pk/tile/linear.cuh"

namespace pk {

template <class T, int N>
PK_DEVICE piece<T, N> ld_global_piece(const T* p) {
    piece<T, N> x;
    u32* w = reinterpret_cast<u32*>(&x);
    if constexpr (piece<T, N>::bytes == 16) {
        asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
    } else if constexpr (piece<T, N>::bytes == 8) {
        asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
    } else if constexpr (piece<T, N>::bytes == 4) {
        asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
    } else if constexpr (piece<T, N>::bytes == 2) {
        asm volatile("ld.relaxed.sys.global.b16 %0, [%1];" : "=h"(*reinterpret_cast<u16*>(&x)) : "l"(p) : "memory");
    } else {
        u32 byte;
        asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(byte) : "l"(p) : "memory");
        *reinterpret_cast<u8*>(&x) = byte;
    }
    return x;
}

template <class T, int N>
PK_DEVICE void st_global_piece(T* p, const piece<T, N>& x) {
    const u32* w = reinterpret_cast<const u32*>(&x);
    if constexpr (piece<T, N>::bytes == 16)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    else if constexpr (piece<T, N>::bytes == 8)
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(p), "r"(w[0]), "r"(w[1]) : "memory");
    else if constexpr (piece<T, N>::bytes == 4)
        asm volatile("st.global.b32 [%0], %1;" :: "l"(p), "r"(w[0]) : "memory");
    else if constexpr (piece<T, N>::bytes == 2)
        asm volatile("st.global.b16 [%0], %1;" :: "l"(p), "h"(*reinterpret_cast<const u16*>(&x)) : "memory");
    else
        asm volatile("st.global.u8 [%0], %1;" :: "l"(p), "r"(static_cast<u32>(*reinterpret_cast<const u8*>(&x))) : "memory");
}

// -- tiles ------------------------------------------------------------------------------------------------------
/// Where a thread's slots of a tile lie in a tensor: rows one after the other, from a hidden first address.
template <class Tile, class T, class Role>
struct slots {
    const int first_row, first_col;
    const int row_stride, col_stride;
    T* line;  // column 0 of the window, in the row of the current row slot

    PK_DEVICE slots(const Role& role, T* base, const window& place)
        : first_row(hidden(Tile::row(role, 0))), first_col(hidden(Tile::col(role, 0))), row_stride(place.row_stride),
          col_stride(place.col_stride), line(hidden(base + place.offset(Tile::row(role, 0), 0))) {}

    PK_DEVICE int row(const Role& role, int ri) const { return first_row + (Tile::row(role, ri) - Tile::row(role, 0)); }
    PK_DEVICE int col(const Role& role, int ci) const { return first_col + (Tile::col(role, ci) - Tile::col(role, 0)); }
    /// From row slot `ri` to the next.
    PK_DEVICE void next(const Role& role, int ri) {
        if (ri + 1 < Tile::row_slots) line += static_cast<long long>(Tile::row(role, ri + 1) - Tile::row(role, ri)) * row_stride;
    }
    PK_DEVICE T* element(const Role& role, int ci) const { return line + static_cast<long long>(col(role, ci)) * col_stride; }
};

/// Whether the whole window lies in the tensor and accesses of `bytes` to it are aligned: nearly always, and asked once.
template <class Tile, class Role, class T>
PK_DEVICE bool whole_window(const Role& role, const window& place, const T* base, int bytes) {
    return place.holds(0, 0) && place.holds(Tile::rows_of_role(role) - 1, Tile::cols - 1) && place.aligned(base, bytes);
}

/// The tile's window at `at` of a tensor; what lies outside the tensor becomes `other`.  Narrow floats widen.
template <class Tile, class Role, class View>
PK_DEVICE void load(Tile& tile, const Role& role, const View& from, int rank, typename Tile::element other,
                    const int (&at)[View::dims]) {
    using T = typename View::element;
    constexpr int n = piece_elements<T, Tile::vector>;
    const window place(from.shape, at);
    const T* base = from.of(rank);
    slots<Tile, const T, Role> slot(role, base, place);
    if (!role.dead && whole_window<Tile>(role, place, base, n * static_cast<int>(sizeof(T)))) {
#pragma unroll
        for (int ri = 0; ri < Tile::row_slots; ++ri) {
#pragma unroll
            for (int ci = 0; ci < Tile::col_slots; ci += n)
                if (Tile::holds(role, ri, ci)) {
                    const auto x = ld_global_piece<T, n>(slot.line + slot.col(role, ci));
#pragma unroll
                    for (int i = 0; i < n; ++i) tile(ri, ci + i) = widen_element(x.element[i]);
                }
            slot.next(role, ri);
        }
        return;
    }
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri) {
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ++ci) {
            tile(ri, ci) = other;
            if (!role.dead && Tile::holds(role, ri, ci) && place.holds(slot.row(role, ri), slot.col(role, ci)))
                tile(ri, ci) = widen_element(ld_global_piece<T, 1>(slot.element(role, ci)).element[0]);
        }
        slot.next(role, ri);
    }
}

/// The first `rows` rows of the tile to its window at `at` of a tensor, rounded to its element type; what lies outside the
/// tensor is dropped.
template <class Tile, class Role, class View>
PK_DEVICE void store(const View& to, int rank, const Tile& tile, const Role& role, int rows, const int (&at)[View::dims]) {
    using T = typename View::element;
    constexpr int n = piece_elements<T, Tile::vector>;
    if (role.dead || !Tile::writes(role)) return;
    const window place(to.shape, at);
    T* base = to.of(rank);
    slots<Tile, T, Role> slot(role, base, place);
    if (rows >= Tile::rows_of_role(role) && whole_window<Tile>(role, place, base, n * static_cast<int>(sizeof(T)))) {
#pragma unroll
        for (int ri = 0; ri < Tile::row_slots; ++ri) {
#pragma unroll
            for (int ci = 0; ci < Tile::col_slots; ci += n)
                if (Tile::holds(role, ri, ci)) {
                    piece<T, n> x;
#pragma unroll
                    for (int i = 0; i < n; ++i) x.element[i] = narrow_element<T>(tile(ri, ci + i));
                    st_global_piece(slot.line + slot.col(role, ci), x);
                }
            slot.next(role, ri);
        }
        return;
    }
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri) {
        const int row = slot.row(role, ri);
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ++ci)
            if (row < rows && Tile::holds(role, ri, ci) && place.holds(row, slot.col(role, ci)))
                st_global_piece(slot.element(role, ci), piece<T, 1>{{narrow_element<T>(tile(ri, ci))}});
        slot.next(role, ri);
    }
}

/// The same to every rank's copy.
template <class Tile, class Role, class View>
PK_DEVICE void store_everywhere(const View& to, const Tile& tile, const Role& role, int rows, const int (&at)[View::dims]) {
#pragma unroll 1
    for (int rank = 0; rank < static_cast<int>(role.ctx.world); ++rank) store(to, rank, tile, role, rows, at);
}

// -- scalars ------------------------------------------------------------------------------------------------------
/// One element, in every thread; 0 outside the tensor.
template <class Role, class View>
PK_DEVICE auto load_element(const Role& role, const View& from, int rank, const int (&at)[View::dims]) {
    using T = typename View::element;
    const long long offset = element_offset(from.shape, at);
    auto value = widen_element(T{});
    if (!role.dead && offset >= 0) value = widen_element(ld_global_piece<T, 1>(from.of(rank) + offset).element[0]);
    return value;
}

/// One element := `value`, by the leader; outside the tensor it is dropped.
template <class Role, class View, class Value>
PK_DEVICE void store_element(const Role& role, const View& to, int rank, Value value, const int (&at)[View::dims]) {
    using T = typename View::element;
    const long long offset = element_offset(to.shape, at);
    if (role.issues() && offset >= 0) st_global_piece(to.of(rank) + offset, piece<T, 1>{{narrow_element<T>(value)}});
    __syncwarp();
}

/// The same in every rank's copy.
template <class Role, class View, class Value>
PK_DEVICE void store_element_everywhere(const Role& role, const View& to, Value value, const int (&at)[View::dims]) {
#pragma unroll 1
    for (int rank = 0; rank < static_cast<int>(role.ctx.world); ++rank) store_element(role, to, rank, value, at);
}

}  // namespace pk
