#pragma once
/// Register tiles in the linear layout: rows dealt to the warps of a role, 16 bytes (of a 16-bit type) a lane along a row.

#include "pk/ptx/ld_st.cuh"
#include "pk/tile/register.cuh"
#include "pk/tile/shared.cuh"

namespace pk {

// -- tiles ------------------------------------------------------------------------------------------------------
/// Consecutive columns of a lane: the widest of 8, 4, 2, 1 that divides the columns and leaves no lane without any.
__host__ __device__ constexpr int linear_vector(int cols, int lanes) {
    for (int v = 8; v > 1; v /= 2)
        if (cols % v == 0 && v * lanes <= cols) return v;
    return 1;
}

/// R rows by C columns over WARPS warps, of which SHARE hold a row together.
///
/// Warp w belongs to set w / SHARE; set g holds rows g, g + sets, ...; along a row each of the 32 SHARE lanes has `vector`
/// columns, then the next lane.  A tile of one row is the same in every set, a tile of one column in all lanes of a set.
/// See `register_tile` for the slots.
template <class T, int R, int C, int WARPS, int SHARE>
struct linear_tile {
    using element = T;
    static constexpr int rows = R, cols = C, share = SHARE;
    static constexpr int sets = WARPS / SHARE, lanes = 32 * SHARE;
    static constexpr int vector = C == 1 ? 1 : linear_vector(C, lanes);
    static constexpr int row_slots = R == 1 ? 1 : ceil_div(R, sets);
    static constexpr int col_slots = C == 1 ? 1 : ceil_div(C, vector * lanes) * vector;
    static constexpr bool short_rows = C > 1 && C % (vector * lanes) != 0, short_cols = R > 1 && R % sets != 0;

    T data[row_slots * col_slots];

    PK_DEVICE decltype(auto) operator()(int ri, int ci) {
        return element_of(data[slot(ri, ci)]);
    }
    PK_DEVICE decltype(auto) operator()(int ri, int ci) const {
        return element_of(data[slot(ri, ci)]);
    }
    static PK_DEVICE int slot(int ri, int ci) { return (R == 1 ? 0 : ri) * col_slots + (C == 1 ? 0 : ci); }

    /// This thread's set, and its number among the lanes that hold a row.
    template <class Role> static PK_DEVICE int set(const Role& role) { return role.place() / SHARE; }
    template <class Role> static PK_DEVICE int lane(const Role& role) { return role.place() % SHARE * 32 + lane_index(); }

    template <class Role> static PK_DEVICE int row(const Role& role, int ri) { return R == 1 ? 0 : ri * sets + set(role); }
    template <class Role> static PK_DEVICE int col(const Role& role, int ci) {
        return C == 1 ? 0 : ci / vector * (vector * lanes) + lane(role) * vector + ci % vector;
    }
    template <class Role> static PK_DEVICE bool holds(const Role& role, int ri, int ci) {
        return (!short_cols || row(role, ri) < R) && (!short_rows || col(role, ci) < C);
    }
    template <class Role> static constexpr PK_DEVICE int rows_of_role(const Role&) { return R; }
    template <class Role> static PK_DEVICE bool writes(const Role& role) {
        return (R > 1 || set(role) == 0) && (C > 1 || lane(role) == 0);
    }
};

/// Columns START .. STOP - 1, which the same lanes hold.
template <int START, int STOP, class T, int R, int C, int WARPS, int SHARE>
PK_DEVICE auto columns(const linear_tile<T, R, C, WARPS, SHARE>& tile) {
    using Whole = linear_tile<T, R, C, WARPS, SHARE>;
    using Part = linear_tile<T, R, STOP - START, WARPS, SHARE>;
    static_assert(Part::vector == Whole::vector && START % (Whole::vector * Whole::lanes) == 0, "cut where lanes begin anew");
    Part part;
    PK_EACH(Part) part.data[part.slot(ri, ci)] = tile.data[tile.slot(ri, START / Whole::lanes + ci)];
    return part;
}

/// The same values in another element type.
template <class U, class T, int R, int C, int WARPS, int SHARE>
PK_DEVICE auto cast(const linear_tile<T, R, C, WARPS, SHARE>& tile) {
    linear_tile<U, R, C, WARPS, SHARE> result;
    PK_EACH(linear_tile<U, R, C, WARPS, SHARE>) result.data[result.slot(ri, ci)] = narrow_element<U>(tile(ri, ci));
    return result;
}

/// The same for the vectors of fragments.
template <class Result, class Tile>
PK_DEVICE Result cast_elements(const Tile& tile) {
    Result result;
    PK_EACH(Result) result.data[ri + ci] = narrow_element<typename Result::element>(tile(ri, ci));
    return result;
}
template <class U, class T, int R>
PK_DEVICE auto cast(const register_tile<T, R, 1>& tile) { return cast_elements<register_tile<U, R, 1>>(tile); }
template <class U, class T, int C>
PK_DEVICE auto cast(const register_tile<T, 1, C>& tile) { return cast_elements<register_tile<U, 1, C>>(tile); }
template <class U, class T>
PK_DEVICE auto cast(const register_tile<T, 1, 1>& tile) { return cast_elements<register_tile<U, 1, 1>>(tile); }

// -- 1, 2, 4, 8 or 16 bytes of elements ------------------------------------------------------------------------------
/// N neighbouring elements of type T as they lie in memory, at most 16 bytes.
template <class T, int N>
struct piece {
    static constexpr int bytes = N * static_cast<int>(sizeof(T));
    static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "a piece is one access");
    alignas(bytes) T element[N];
};

/// Elements of a chunk of `COUNT` that one access moves.
template <class T, int COUNT>
inline constexpr int piece_elements = COUNT * sizeof(T) <= 16 ? COUNT : 16 / static_cast<int>(sizeof(T));

template <class T, int N>
PK_DEVICE piece<T, N> ld_shared_piece(u32 address) {
    piece<T, N> x;
    if constexpr (piece<T, N>::bytes == 16) {
        u32* w = reinterpret_cast<u32*>(&x);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address) : "memory");
    } else if constexpr (piece<T, N>::bytes == 8) {
        u32* w = reinterpret_cast<u32*>(&x);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address) : "memory");
    } else if constexpr (piece<T, N>::bytes == 4) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(*reinterpret_cast<u32*>(&x)) : "r"(address) : "memory");
    } else if constexpr (piece<T, N>::bytes == 2) {
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(*reinterpret_cast<u16*>(&x)) : "r"(address) : "memory");
    } else {
        u32 byte;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
        *reinterpret_cast<u8*>(&x) = byte;
    }
    return x;
}

template <class T, int N>
PK_DEVICE void st_shared_piece(u32 address, const piece<T, N>& x) {
    const u32* w = reinterpret_cast<const u32*>(&x);
    if constexpr (piece<T, N>::bytes == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    else if constexpr (piece<T, N>::bytes == 8)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(address), "r"(w[0]), "r"(w[1]) : "memory");
    else if constexpr (piece<T, N>::bytes == 4)
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(w[0]) : "memory");
    else if constexpr (piece<T, N>::bytes == 2)
        asm volatile("st.shared.b16 [%0], %1;" :: "r"(address), "h"(*reinterpret_cast<const u16*>(&x)) : "memory");
    else
        asm volatile("st.shared.u8 [%0], %1;" :: "r"(address), "r"(static_cast<u32>(*reinterpret_cast<const u8*>(&x)))
                     : "memory");
}

// -- registers <-> shared: called by every thread of the role ---------------------------------------------------------
/// Columns FIRST, FIRST + 1, ... of a shared tile to registers, element by element of what this thread holds; narrow floats
/// widen.
template <int FIRST, class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void load_columns(Tile& tile, const shared_tile<T, R, C, ROWS>& from, const Role& role) {
    static_assert(FIRST + Tile::cols <= C && (Tile::rows == R || Tile::rows < R), "the columns must lie in the tile");
    constexpr int n = piece_elements<T, Tile::vector>;
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri)
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ci += n)
            if (Tile::holds(role, ri, ci)) {
                const auto x = ld_shared_piece<T, n>(from.element_address(Tile::row(role, ri), FIRST + Tile::col(role, ci)));
#pragma unroll
                for (int i = 0; i < n; ++i) tile(ri, ci + i) = widen_element(x.element[i]);
            }
}

/// A shared tile to registers.
template <class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void load(Tile& tile, const shared_tile<T, R, C, ROWS>& from, const Role& role) {
    static_assert(Tile::cols == C, "shapes must be equal");
    load_columns<0>(tile, from, role);
}

/// As `load_columns`, of the transposed view of a shared tile: element (r, c) is that in row c, column r.
template <int FIRST, class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void load_columns(Tile& tile, transposed_tile<shared_tile<T, R, C, ROWS>> from, const Role& role) {
    static_assert(FIRST + Tile::cols <= R && (Tile::rows == C || Tile::rows < C), "the columns must lie in the tile");
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri)
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ++ci)
            if (Tile::holds(role, ri, ci)) {
                const u32 address = from.stored.element_address(FIRST + Tile::col(role, ci), Tile::row(role, ri));
                tile(ri, ci) = widen_element(ld_shared_piece<T, 1>(address).element[0]);
            }
}

/// The transposed view of a shared tile to registers.
template <class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void load(Tile& tile, transposed_tile<shared_tile<T, R, C, ROWS>> from, const Role& role) {
    static_assert(Tile::cols == R, "shapes must be equal");
    load_columns<0>(tile, from, role);
}

/// Registers to a shared tile, rounded to its element type.
template <class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void store(shared_tile<T, R, C, ROWS>& to, const Tile& tile, const Role& role) {
    static_assert(Tile::cols == C && (Tile::rows == R || Tile::rows < R), "shapes must be equal");
    constexpr int n = piece_elements<T, Tile::vector>;
    if (!Tile::writes(role)) return;
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri)
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ci += n)
            if (Tile::holds(role, ri, ci)) {
                piece<T, n> x;
#pragma unroll
                for (int i = 0; i < n; ++i) x.element[i] = narrow_element<T>(tile(ri, ci + i));
                st_shared_piece(to.element_address(Tile::row(role, ri), Tile::col(role, ci)), x);
            }
}

/// Registers to the transposed view of a shared tile: element (r, c) goes to row c, column r.
template <class Tile, class T, int R, int C, bool ROWS, class Role>
PK_DEVICE void store(transposed_tile<shared_tile<T, R, C, ROWS>> to, const Tile& tile, const Role& role) {
    static_assert(Tile::cols == R && (Tile::rows == C || Tile::rows < C), "shapes must be equal");
    if (!Tile::writes(role)) return;
#pragma unroll
    for (int ri = 0; ri < Tile::row_slots; ++ri)
#pragma unroll
        for (int ci = 0; ci < Tile::col_slots; ++ci)
            if (Tile::holds(role, ri, ci)) {
                const piece<T, 1> x = {{narrow_element<T>(tile(ri, ci))}};
                st_shared_piece(to.stored.element_address(Tile::col(role, ci), Tile::row(role, ri)), x);
            }
}

}  // namespace pk
