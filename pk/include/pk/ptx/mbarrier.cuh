#pragma once
/// Shared-memory barriers that count arrivals and bytes.  A phase ends when the expected arrivals have come and all
/// expected bytes have landed; a waiter asks for the end of the phase with a given parity.

#include "pk/ptx/misc.cuh"

namespace pk {

struct alignas(8) mbarrier { u64 word; };

/// Sets a barrier up for `arrivals` a phase, phase parity 0.
PK_DEVICE void mbarrier_init(mbarrier& bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&bar)), "r"(arrivals) : "memory");
}

/// Its bytes may be used for something else, or for another barrier.
PK_DEVICE void mbarrier_invalidate(mbarrier& bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(shared_address(&bar)) : "memory");
}

/// One arrival; releases this thread's earlier accesses to the block.
PK_DEVICE void mbarrier_arrive(mbarrier& bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&bar)) : "memory");
}

/// `bytes` more must land before the current phase ends.
PK_DEVICE void mbarrier_expect(mbarrier& bar, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(&bar)), "r"(bytes) : "memory");
}

/// One arrival, and `bytes` more that must land before the current phase ends.
PK_DEVICE void mbarrier_arrive_expect(mbarrier& bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(&bar)), "r"(bytes) : "memory");
}

/// True once the phase with this parity has ended; sleeps a short, bounded time before it says no.  Acquires.
PK_DEVICE bool mbarrier_try_wait(mbarrier& bar, u32 parity) {
    u32 ended;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(ended) : "r"(shared_address(&bar)), "r"(parity) : "memory");
    return ended != 0;
}

}  // namespace pk
