#pragma once
/// Index vectors: up to 128 integers, element i in register i / 32 of lane i % 32, equal in every warp that runs the
/// code.  Lanes past the end hold anything: what acts on elements asks `holds`.

#include "pk/ptx/misc.cuh"

namespace pk {

template <class T, int R>
struct index_vector {
    using element = T;
    static constexpr int extent = R;
    static constexpr int words = ceil_div(R, 32);
    static_assert(1 <= R && R <= 128, "an index vector has 1 to 128 elements");

    T data[words];

    /// Whether this lane has an element in register `word`.
    static PK_DEVICE bool holds(int word) { return R % 32 == 0 || 32 * word + lane_index() < R; }
};

/// Element in register `word` of a vector, or a scalar, which stands for a vector of its value.
template <class T, int R>
PK_DEVICE T element(const index_vector<T, R>& x, int word) { return x.data[word]; }
PK_DEVICE int element(int x, int) { return x; }

/// 0, 1, ..., R - 1.
template <int R>
PK_DEVICE index_vector<int, R> iota() {
    index_vector<int, R> result;
#pragma unroll
    for (int i = 0; i < result.words; ++i) result.data[i] = 32 * i + lane_index();
    return result;
}

/// One value everywhere.
template <class T, int R>
PK_DEVICE index_vector<T, R> filled_vector(T value) {
    index_vector<T, R> result;
#pragma unroll
    for (int i = 0; i < result.words; ++i) result.data[i] = value;
    return result;
}

#define PK_VECTOR_BINARY(NAME, RESULT, EXPRESSION)                                                                  \
    template <class T, int R>                                                                                       \
    PK_DEVICE index_vector<RESULT, R> NAME(const index_vector<T, R>& a, const index_vector<T, R>& b) {               \
        index_vector<RESULT, R> result;                                                                             \
        _Pragma("unroll") for (int i = 0; i < result.words; ++i) {                                                  \
            const T x = a.data[i], y = b.data[i];                                                                   \
            result.data[i] = EXPRESSION;                                                                            \
        }                                                                                                           \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int R>                                                                                       \
    PK_DEVICE index_vector<RESULT, R> NAME(const index_vector<T, R>& a, typename index_vector<T, R>::element y) {    \
        return NAME(a, filled_vector<T, R>(y));                                                                     \
    }                                                                                                               \
    template <class T, int R>                                                                                       \
    PK_DEVICE index_vector<RESULT, R> NAME(typename index_vector<T, R>::element x, const index_vector<T, R>& b) {    \
        return NAME(filled_vector<T, R>(x), b);                                                                     \
    }

PK_VECTOR_BINARY(operator+, T, x + y)
PK_VECTOR_BINARY(operator-, T, x - y)
PK_VECTOR_BINARY(operator*, T, x * y)
PK_VECTOR_BINARY(operator/, T, x / y)
PK_VECTOR_BINARY(operator%, T, x % y)
PK_VECTOR_BINARY(floor_div, T, floor_div(x, y))
PK_VECTOR_BINARY(floor_mod, T, floor_mod(x, y))
PK_VECTOR_BINARY(min, T, x < y ? x : y)
PK_VECTOR_BINARY(max, T, x < y ? y : x)
PK_VECTOR_BINARY(operator<, bool, x < y)
PK_VECTOR_BINARY(operator<=, bool, x <= y)
PK_VECTOR_BINARY(operator>, bool, x > y)
PK_VECTOR_BINARY(operator>=, bool, x >= y)
PK_VECTOR_BINARY(operator==, bool, x == y)
PK_VECTOR_BINARY(operator!=, bool, x != y)
PK_VECTOR_BINARY(operator&&, bool, x && y)
PK_VECTOR_BINARY(operator||, bool, x || y)
#undef PK_VECTOR_BINARY

/// Ceiling of x / y, for y > 0 and x >= 0.
template <int R>
PK_DEVICE index_vector<int, R> ceil_div(const index_vector<int, R>& x, int y) { return (x + (y - 1)) / y; }

/// -x.
template <int R>
PK_DEVICE index_vector<int, R> operator-(const index_vector<int, R>& x) { return 0 - x; }

/// |x|.
template <int R>
PK_DEVICE index_vector<int, R> abs(const index_vector<int, R>& x) { return max(x, -x); }

/// Not x.
template <int R>
PK_DEVICE index_vector<bool, R> operator!(const index_vector<bool, R>& x) { return x == false; }

/// Element by element: x where `chosen`, else y.  x and y are vectors or scalars.
template <int R, class X, class Y>
PK_DEVICE index_vector<int, R> where(const index_vector<bool, R>& chosen, const X& x, const Y& y) {
    index_vector<int, R> result;
#pragma unroll
    for (int i = 0; i < result.words; ++i) result.data[i] = chosen.data[i] ? element(x, i) : element(y, i);
    return result;
}

}  // namespace pk
