#pragma once
/// 16 bytes at a time between registers and global memory that other ranks may write, and single elements of it.

#include "pk/ptx/misc.cuh"

namespace pk {

/// 16 bytes of elements of type T, as they lie in memory.
template <class T>
struct packet {
    static constexpr int elements = 16 / static_cast<int>(sizeof(T));
    u32 word[4];
};

/// Reads 16 bytes, aligned; relaxed, system scope: never from this SM's own cache.
template <class T>
PK_DEVICE packet<T> ld_packet(const T* p) {
    packet<T> x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3]) : "l"(p) : "memory");
    return x;
}

/// Writes 16 bytes, aligned.
template <class T>
PK_DEVICE void st_packet(T* p, const packet<T>& x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]) : "memory");
}

/// Reads one element and widens it; relaxed, system scope.
template <class T>
PK_DEVICE float ld_element(const T* p) {
    if constexpr (sizeof(T) == 4) {
        float x;
        asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
        return x;
    } else {
        u16 x;
        asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
        return unpack<T, 0>(x);
    }
}

/// Writes one element, rounded to nearest even.
template <class T>
PK_DEVICE void st_element(T* p, float x) {
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.global.f32 [%0], %1;" :: "l"(p), "f"(x) : "memory");
    } else {
        asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"(static_cast<u16>(pack<T>(x, 0.0f))) : "memory");
    }
}

/// The elements of a packet, widened.
template <class T>
PK_DEVICE void widen(const packet<T>& from, float (&to)[packet<T>::elements]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            to[i] = __uint_as_float(from.word[i]);
        } else {
            to[2 * i] = unpack<T, 0>(from.word[i]);
            to[2 * i + 1] = unpack<T, 1>(from.word[i]);
        }
    }
}

/// A packet of the elements, rounded to nearest even.
template <class T>
PK_DEVICE packet<T> narrowed(const float (&from)[packet<T>::elements]) {
    packet<T> to;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) to.word[i] = __float_as_uint(from[i]);
        else to.word[i] = pack<T>(from[2 * i], from[2 * i + 1]);
    }
    return to;
}

}  // namespace pk
