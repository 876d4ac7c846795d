#pragma once
/// 1-D bulk copies: `bytes` in a row, a multiple of 16, both addresses multiples of 16.  Any thread may issue them; a
/// store belongs to the issuing thread's next `store_commit`.

#include "pk/ptx/mbarrier.cuh"

namespace pk {

/// Global to shared memory; the bytes count towards `bar`.
PK_DEVICE void bulk_load(u32 to, const void* from, u32 bytes, mbarrier& bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(shared_address(&bar)) : "memory");
}

/// Shared to global memory.
PK_DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

/// Stores 16 zero bytes to shared memory.
PK_DEVICE void st_shared_zero16(u32 address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(address), "r"(0) : "memory");
}

/// Stores one element of 1, 2 or 4 bytes to shared memory.
template <class T>
PK_DEVICE void st_shared_element(u32 address, const T& value) {
    if constexpr (sizeof(T) == 4)
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(reinterpret_cast<const u32&>(value)) : "memory");
    else if constexpr (sizeof(T) == 2)
        asm volatile("st.shared.b16 [%0], %1;" :: "r"(address), "h"(reinterpret_cast<const u16&>(value)) : "memory");
    else
        asm volatile("st.shared.b8 [%0], %1;" :: "r"(address), "r"(u32(reinterpret_cast<const u8&>(value))) : "memory");
}

/// Loads one element of 1, 2 or 4 bytes from shared memory.
template <class T>
PK_DEVICE T ld_shared_element(u32 address) {
    u32 word;
    if constexpr (sizeof(T) == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    else if constexpr (sizeof(T) == 2) {
        u16 half;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
        word = half;
    } else asm volatile("ld.shared.u8 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return reinterpret_cast<const T&>(word);
}

}  // namespace pk
