#pragma once
/// Multicast addresses: one access reaches the same place in the memory of every rank, combined or copied in the switch.
///
/// A multicast address and the plain address of the same memory are aliases.  `fence_proxy_alias` stands between accesses
/// through the one and through the other, beside the signal that orders them.

#include "pk/ptx/packet.cuh"

namespace pk {

/// Orders this thread's accesses through different addresses of the same memory.
PK_DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

/// How values of several ranks become one.
enum class combine { sum, min, max };

/// Whether the switch can combine elements of type T by OP.
template <class T, combine OP> inline constexpr bool in_network = sizeof(T) == 2 || OP == combine::sum;

/// 16 bytes of every rank, combined; 16-bit elements are added in float32.
template <combine OP, class T>
PK_DEVICE packet<T> multimem_ld_reduce(const T* p) {
    static_assert(in_network<T, OP>, "float32 can only be added in the network");
    packet<T> x;
#define PK_LD_REDUCE(INSTRUCTION)                                                                                   \
    asm volatile("multimem.ld_reduce.weak.global." INSTRUCTION " {%0, %1, %2, %3}, [%4];"                           \
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3]) : "l"(p) : "memory")
    if constexpr (is_same<T, float>) {
        float f[4];
        asm volatile("multimem.ld_reduce.weak.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3]) : "l"(p) : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) x.word[i] = __float_as_uint(f[i]);
    } else if constexpr (is_same<T, bf16>) {
        if constexpr (OP == combine::sum) PK_LD_REDUCE("add.acc::f32.v4.bf16x2");
        else if constexpr (OP == combine::min) PK_LD_REDUCE("min.v4.bf16x2");
        else PK_LD_REDUCE("max.v4.bf16x2");
    } else {
        if constexpr (OP == combine::sum) PK_LD_REDUCE("add.acc::f32.v4.f16x2");
        else if constexpr (OP == combine::min) PK_LD_REDUCE("min.v4.f16x2");
        else PK_LD_REDUCE("max.v4.f16x2");
    }
#undef PK_LD_REDUCE
    return x;
}

/// 16 bytes to every rank.
template <class T>
PK_DEVICE void multimem_st(T* p, const packet<T>& x) {
    if constexpr (is_same<T, float>)
        asm volatile("multimem.st.weak.global.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "f"(__uint_as_float(x.word[0])), "f"(__uint_as_float(x.word[1])),
                        "f"(__uint_as_float(x.word[2])), "f"(__uint_as_float(x.word[3])) : "memory");
    else if constexpr (is_same<T, bf16>)
        asm volatile("multimem.st.weak.global.v4.bf16x2 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]) : "memory");
    else
        asm volatile("multimem.st.weak.global.v4.f16x2 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]) : "memory");
}

/// Release and add on every rank, system scope.
PK_DEVICE void multimem_red_release_sys(s32* p, s32 x) {
    asm volatile("multimem.red.release.sys.global.add.s32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}

}  // namespace pk
