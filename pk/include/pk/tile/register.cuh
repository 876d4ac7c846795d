#pragma once
/// Tiles in registers, spread over a warpgroup like the accumulators of the tensor core (`ptx/wgmma.cuh`), and the
/// arithmetic on them.  Every index is a compile-time constant after unrolling, so that elements stay in registers.

#include "pk/ptx/misc.cuh"

namespace pk {

template <bool SIXTEEN_BITS, class T> struct register_word { using type = T; };
template <class T> struct register_word<true, T> { using type = u32; };

/// R rows (a multiple of 64, all of one warpgroup) by C columns (a multiple of 8).
///
/// Slab s holds rows 64 s .. 64 s + 63.  Of every 8 columns a thread has four elements; 32-bit types keep one a
/// word, 16-bit types pack the two of a row into one word.
template <class T, int R, int C>
struct register_tile {
    using element = T;
    static constexpr bool packed = sizeof(T) == 2;
    using word = typename register_word<packed, T>::type;
    static constexpr int rows = R;
    static constexpr int cols = C;
    static constexpr int slabs = R / 64;
    static constexpr int words = packed ? C / 4 : C / 2;  // of a slab, a thread
    static_assert(R % 64 == 0, "a register tile has a multiple of 64 rows a warpgroup");
    static_assert(C % 8 == 0, "a register tile has a multiple of 8 columns");
    static_assert(sizeof(T) == 4 || packed, "register tiles are 32-bit or 16-bit");

    word data[slabs][words];
};

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

/// All elements take one value.
template <class T, int R, int C>
PK_DEVICE void fill(register_tile<T, R, C>& tile, T value) {
    static_assert(sizeof(T) == 4, "cast a 32-bit tile instead");
#pragma unroll
    for (int s = 0; s < tile.slabs; ++s)
#pragma unroll
        for (int i = 0; i < tile.words; ++i) tile.data[s][i] = value;
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
