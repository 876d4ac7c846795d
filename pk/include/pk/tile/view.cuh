#pragma once
/// Tensors that threads reach by pointer, one element at a time, and copies of single rows (1-D bulk copies).

#include "pk/ptx/tma.cuh"
#include "pk/tile/vector.cuh"

namespace pk {

/// Extents and strides (elements) of a tensor, outermost dimension first.
template <int DIMS>
struct tensor_shape {
    int extent[DIMS];
    int stride[DIMS];
};

/// This rank's copy of a tensor.
template <class T, int DIMS>
struct tensor_view {
    using element = T;
    static constexpr int dims = DIMS;
    T* base;
    tensor_shape<DIMS> shape;

    PK_DEVICE T* of(int) const { return base; }
};

/// A tensor that every rank has a copy of; `bases` lies in the parameters of the kernel.
template <class T, int DIMS>
struct peer_view {
    using element = T;
    static constexpr int dims = DIMS;
    T* const* bases;
    tensor_shape<DIMS> shape;

    PK_DEVICE T* of(int rank) const {
#ifdef PK_SANITIZE
        rank &= 7;  // of 8 addresses: see `context::of`
#endif
        return bases[rank];
    }
};

/// Offset of an element from the base of its tensor, or -1 if it lies outside.
template <int DIMS>
PK_DEVICE long long element_offset(const tensor_shape<DIMS>& shape, const int (&at)[DIMS]) {
    long long offset = 0;
    bool inside = true;
#pragma unroll
    for (int d = 0; d < DIMS; ++d) {
        inside = inside && 0 <= at[d] && at[d] < shape.extent[d];
        offset += static_cast<long long>(at[d]) * shape.stride[d];
    }
    return inside ? offset : -1;
}

/// Reads an element of 1, 2 or 4 bytes that another block or rank may have written earlier in this launch.
template <class T>
PK_DEVICE T ld_weak(const T* p) {
    u32 word;
    if constexpr (sizeof(T) == 4) asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    else if constexpr (sizeof(T) == 2) {
        u16 half;
        asm volatile("ld.global.b16 %0, [%1];" : "=h"(half) : "l"(p) : "memory");
        word = half;
    } else asm volatile("ld.global.u8 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return reinterpret_cast<const T&>(word);
}

/// Element i of the result is x[coord...] with element i of every coordinate (scalars stand for all), `other` outside.
template <int R, class View, class Rank, class... Coord>
PK_DEVICE index_vector<int, R> load_elements(const View& x, int world, int other, const Rank& rank, const Coord&... coord) {
    static_assert(sizeof...(Coord) == View::dims, "one coordinate a dimension");
    index_vector<int, R> result;
#pragma unroll
    for (int i = 0; i < result.words; ++i) {
        const int at[] = {element(coord, i)...};
        const int owner = element(rank, i);
        const long long offset = element_offset(x.shape, at);
        result.data[i] = other;
        if (result.holds(i) && offset >= 0 && 0 <= owner && owner < world) result.data[i] = ld_weak(x.of(owner) + offset);
    }
    return result;
}

}  // namespace pk
