#pragma once
/// Tiles in registers, spread over a warpgroup like the accumulators of the tensor core (`ptx/wgmma.cuh`), and the
/// arithmetic on them.  Every index is a compile-time constant after unrolling, so that elements stay in registers.

#include "pk/tile/element.cuh"

namespace pk {

template <bool SIXTEEN_BITS, class T> struct register_word { using type = T; };
template <class T> struct register_word<true, T> { using type = u32; };

/// R rows (a multiple of 64, all of one warpgroup) by C columns (a multiple of 8).
///
/// Slab s holds rows 64 s .. 64 s + 63.  Of every 8 columns a thread has four elements; 32-bit types keep one a
/// word, 16-bit types pack the two of a row into one word.
///
/// As every register tile it is a rectangle of slots in each thread: `tile(ri, ci)` is the element in row slot `ri` and
/// column slot `ci`, `row` and `col` say where in the whole tile that is.  A tile of one row or one column has the slots
/// of the tiles that it meets, all of them the same along the other axis.
template <class T, int R, int C>
struct register_tile {
    using element = T;
    static constexpr bool packed = sizeof(T) == 2;
    using word = typename register_word<packed, T>::type;
    static constexpr int rows = R;
    static constexpr int cols = C;
    static constexpr int slabs = R / 64;
    static constexpr int words = packed ? C / 4 : C / 2;  // of a slab, a thread
    static constexpr int row_slots = 2 * slabs;
    static constexpr int col_slots = C / 4;
    static constexpr int vector = 2;  // column slots that are neighbours in the tile
    static_assert(R % 64 == 0, "a register tile has a multiple of 64 rows a warpgroup");
    static_assert(C % 8 == 0, "a register tile has a multiple of 8 columns");

    word data[slabs][words];

    /// The element of a slot; of a 16-bit tile its value, which cannot be assigned to.
    PK_DEVICE decltype(auto) operator()(int ri, int ci) {
        if constexpr (packed) return half(data[ri / 2][ci / 2 * 2 + ri % 2], ci % 2);
        else return (data[ri / 2][ci / 2 * 4 + ri % 2 * 2 + ci % 2]);
    }
    PK_DEVICE decltype(auto) operator()(int ri, int ci) const {
        if constexpr (packed) return half(data[ri / 2][ci / 2 * 2 + ri % 2], ci % 2);
        else return (data[ri / 2][ci / 2 * 4 + ri % 2 * 2 + ci % 2]);
    }
    static PK_DEVICE float half(u32 word, int high) { return high ? unpack<T, 1>(word) : unpack<T, 0>(word); }

    /// Row and column, in the whole tile, of a slot.
    template <class Role> static PK_DEVICE int row(const Role& role, int ri) {
        return role.warpgroup() * R + threadIdx.x / 32 % 4 * 16 + lane_index() / 4 + ri / 2 * 64 + ri % 2 * 8;
    }
    template <class Role> static PK_DEVICE int col(const Role&, int ci) {
        return ci / 2 * 8 + lane_index() % 4 * 2 + ci % 2;
    }
    /// Rows of the whole tile.
    template <class Role> static constexpr PK_DEVICE int rows_of_role(const Role&) { return R * (Role::threads / 128); }
    /// Whether a slot holds an element (others are padding), and whether this thread is the one that writes its elements.
    template <class Role> static PK_DEVICE bool holds(const Role&, int, int) { return true; }
    template <class Role> static PK_DEVICE bool writes(const Role&) { return true; }
};

/// A vector over rows, equal in the four threads that share a row.
template <class T, int R>
struct register_tile<T, R, 1> {
    using element = T;
    static constexpr int rows = R, cols = 1, row_slots = R / 32, col_slots = 1, vector = 1;
    using whole = register_tile<T, R, 8>;

    T data[row_slots];

    PK_DEVICE decltype(auto) operator()(int ri, int) { return element_of(data[ri]); }
    PK_DEVICE decltype(auto) operator()(int ri, int) const { return element_of(data[ri]); }
    template <class Role> static constexpr PK_DEVICE int rows_of_role(const Role&) { return R * (Role::threads / 128); }
    template <class Role> static PK_DEVICE int row(const Role& role, int ri) { return whole::row(role, ri); }
    template <class Role> static PK_DEVICE int col(const Role&, int) { return 0; }
    template <class Role> static PK_DEVICE bool holds(const Role&, int, int) { return true; }
    template <class Role> static PK_DEVICE bool writes(const Role&) { return lane_index() % 4 == 0; }
};

/// A vector over columns, equal in all warps.
template <class T, int C>
struct register_tile<T, 1, C> {
    using element = T;
    static constexpr int rows = 1, cols = C, row_slots = 1, col_slots = C / 4, vector = 2;
    static_assert(C % 8 == 0, "a register tile has a multiple of 8 columns");
    using whole = register_tile<T, 64, C>;

    T data[col_slots];

    PK_DEVICE decltype(auto) operator()(int, int ci) { return element_of(data[ci]); }
    PK_DEVICE decltype(auto) operator()(int, int ci) const { return element_of(data[ci]); }
    template <class Role> static constexpr PK_DEVICE int rows_of_role(const Role&) { return 1; }
    template <class Role> static PK_DEVICE int row(const Role&, int) { return 0; }
    template <class Role> static PK_DEVICE int col(const Role& role, int ci) { return whole::col(role, ci); }
    template <class Role> static PK_DEVICE bool holds(const Role&, int, int) { return true; }
    template <class Role> static PK_DEVICE bool writes(const Role& role) { return role.first_warp() && lane_index() < 4; }
};

/// One element, equal in all threads.
template <class T>
struct register_tile<T, 1, 1> {
    using element = T;
    static constexpr int rows = 1, cols = 1, row_slots = 1, col_slots = 1, vector = 1;

    T data[1];

    PK_DEVICE decltype(auto) operator()(int, int) { return element_of(data[0]); }
    PK_DEVICE decltype(auto) operator()(int, int) const { return element_of(data[0]); }
    template <class Role> static constexpr PK_DEVICE int rows_of_role(const Role&) { return 1; }
    template <class Role> static PK_DEVICE int row(const Role&, int) { return 0; }
    template <class Role> static PK_DEVICE int col(const Role&, int) { return 0; }
    template <class Role> static PK_DEVICE bool holds(const Role&, int, int) { return true; }
    template <class Role> static PK_DEVICE bool writes(const Role& role) { return role.first_warp() && lane_index() == 0; }
};

/// A statement for every slot of tiles of a type: `PK_EACH(type) x(ri, ci) = y(ri, ci) + z(ri, ci);`
#define PK_EACH(...)                                                                                                \
    _Pragma("unroll") for (int ri = 0; ri < __VA_ARGS__::row_slots; ++ri)                                            \
        _Pragma("unroll") for (int ci = 0; ci < __VA_ARGS__::col_slots; ++ci)

/// A float tile that `mma` adds to.  After `zero` it is `empty`: the first mma overwrites it, and nothing is cleared.
/// Its elements may be read only after `finish_mma`.
template <int R, int C>
struct accumulator : register_tile<float, R, C> {
    bool empty = false;

    PK_DEVICE accumulator& operator=(const register_tile<float, R, C>& value) {
        register_tile<float, R, C>::operator=(value);
        empty = false;
        return *this;
    }
};

/// All elements of any register tile take one value.
template <class Tile, class Value>
PK_DEVICE void fill(Tile& tile, Value value) {
    PK_EACH(Tile) tile(ri, ci) = static_cast<typename Tile::element>(value);
}

/// `x`, hidden from the compiler, which would otherwise compute what follows from it ahead of a loop and keep all the
/// results in registers: comparisons with every row number, addresses of every row.
PK_DEVICE int hidden(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T>
PK_DEVICE T* hidden(T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

/// Row numbers, or column numbers, of a vector.
template <class Tile, class Role>
PK_DEVICE void count_rows(Tile& tile, const Role& role) {
    const int first = hidden(Tile::row(role, 0));
    PK_EACH(Tile) tile(ri, ci) = first + (Tile::row(role, ri) - Tile::row(role, 0));
}
template <class Tile, class Role>
PK_DEVICE void count_cols(Tile& tile, const Role& role) {
    const int first = hidden(Tile::col(role, 0));
    PK_EACH(Tile) tile(ri, ci) = first + (Tile::col(role, ci) - Tile::col(role, 0));
}

/// A tile of one value, as an operand: `filled<register_tile<float, 64, 64>>(1.0f)`.
template <class Tile>
PK_DEVICE Tile filled(typename Tile::element value) {
    Tile tile;
    fill(tile, value);
    return tile;
}

/// acc = 0, lazily.
template <int R, int C>
PK_DEVICE void zero(accumulator<R, C>& acc) { acc.empty = true; }

/// Columns START .. STOP - 1, a copy that costs nothing.
template <int START, int STOP, class T, int R, int C>
PK_DEVICE register_tile<T, R, STOP - START> columns(const register_tile<T, R, C>& tile) {
    static_assert(0 <= START && START < STOP && STOP <= C && START % 8 == 0, "columns are cut at multiples of 8");
    register_tile<T, R, STOP - START> part;
    constexpr int first = START / 8 * (sizeof(T) == 2 ? 2 : 4);
#pragma unroll
    for (int s = 0; s < part.slabs; ++s)
#pragma unroll
        for (int i = 0; i < part.words; ++i) part.data[s][i] = tile.data[s][first + i];
    return part;
}

/// The same of a vector over columns.
template <int START, int STOP, class T, int C>
PK_DEVICE register_tile<T, 1, STOP - START> columns(const register_tile<T, 1, C>& tile) {
    static_assert(0 <= START && START < STOP && STOP <= C && START % 8 == 0, "columns are cut at multiples of 8");
    register_tile<T, 1, STOP - START> part;
#pragma unroll
    for (int i = 0; i < part.col_slots; ++i) part.data[i] = tile.data[START / 4 + i];
    return part;
}

/// Elements of slab s, 8-column group j, row half i (rows + 8 i): the two neighbours, packed as 16-bit T.
template <class T, class U, int R, int C>
PK_DEVICE u32 pair(const register_tile<U, R, C>& tile, int s, int j, int i) {
    if constexpr (is_same<T, U>) {
        return tile.data[s][2 * j + i];
    } else if constexpr (sizeof(U) == 2) {
        const u32 word = tile.data[s][2 * j + i];
        return pack<T>(unpack<U, 0>(word), unpack<U, 1>(word));
    } else {
        return pack<T>(static_cast<float>(tile.data[s][4 * j + 2 * i]), static_cast<float>(tile.data[s][4 * j + 2 * i + 1]));
    }
}

/// The same values in another element type; floats round to nearest even.
template <class T, class U, int R, int C>
PK_DEVICE register_tile<T, R, C> cast(const register_tile<U, R, C>& tile) {
    register_tile<T, R, C> result;
#pragma unroll
    for (int s = 0; s < tile.slabs; ++s) {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int i = 0; i < result.words; ++i) result.data[s][i] = pair<T>(tile, s, i / 2, i % 2);
        } else if constexpr (sizeof(U) == 2) {
#pragma unroll
            for (int i = 0; i < tile.words; ++i) {
                result.data[s][2 * i] = static_cast<T>(unpack<U, 0>(tile.data[s][i]));
                result.data[s][2 * i + 1] = static_cast<T>(unpack<U, 1>(tile.data[s][i]));
            }
        } else {
#pragma unroll
            for (int i = 0; i < tile.words; ++i) result.data[s][i] = static_cast<T>(tile.data[s][i]);
        }
    }
    return result;
}

// -- arithmetic: element by element; a scalar stands for a tile of its value -----------------------------------
PK_DEVICE float minimum(float x, float y) { return fminf(x, y); }
PK_DEVICE float maximum(float x, float y) { return fmaxf(x, y); }
PK_DEVICE int minimum(int x, int y) { return x < y ? x : y; }
PK_DEVICE int maximum(int x, int y) { return x < y ? y : x; }

#define PK_ELEMENTWISE(NAME, EXPRESSION)                                                                            \
    template <class T, int R, int C>                                                                                \
    PK_DEVICE register_tile<T, R, C> NAME(const register_tile<T, R, C>& a, const register_tile<T, R, C>& b) {        \
        static_assert(sizeof(T) == 4, "arithmetic is 32-bit: cast first");                                           \
        register_tile<T, R, C> result;                                                                              \
        _Pragma("unroll") for (int s = 0; s < a.slabs; ++s)                                                         \
            _Pragma("unroll") for (int i = 0; i < a.words; ++i) {                                                   \
                const T x = a.data[s][i], y = b.data[s][i];                                                         \
                result.data[s][i] = EXPRESSION;                                                                     \
            }                                                                                                       \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int R, int C>                                                                                \
    PK_DEVICE register_tile<T, R, C> NAME(const register_tile<T, R, C>& a, T y) {                                    \
        register_tile<T, R, C> b;                                                                                   \
        fill(b, y);                                                                                                 \
        return NAME(a, b);                                                                                          \
    }                                                                                                               \
    template <class T, int R, int C>                                                                                \
    PK_DEVICE register_tile<T, R, C> NAME(T x, const register_tile<T, R, C>& b) {                                    \
        register_tile<T, R, C> a;                                                                                   \
        fill(a, x);                                                                                                 \
        return NAME(a, b);                                                                                          \
    }

PK_ELEMENTWISE(operator+, x + y)
PK_ELEMENTWISE(operator-, x - y)
PK_ELEMENTWISE(operator*, x * y)
PK_ELEMENTWISE(operator/, x / y)
PK_ELEMENTWISE(min, minimum(x, y))
PK_ELEMENTWISE(max, maximum(x, y))
#undef PK_ELEMENTWISE

/// -tile.
template <class T, int R, int C>
PK_DEVICE register_tile<T, R, C> operator-(const register_tile<T, R, C>& tile) { return tile * static_cast<T>(-1); }

/// |tile|.
template <class T, int R, int C>
PK_DEVICE register_tile<T, R, C> abs(const register_tile<T, R, C>& tile) { return max(tile, -tile); }

}  // namespace pk
