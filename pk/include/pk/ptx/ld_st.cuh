#pragma once
/// Explicit loads, stores and atomics.  Memory that a peer or another block writes during the launch is read through
/// these only: the compiler may turn a plain read into one outside the memory model.

#include "pk/ptx/misc.cuh"

namespace pk {

// -- words of the protocol: global memory, stated order and scope --------------------------------------------
/// Relaxed read, system scope.
PK_DEVICE u32 ld_relaxed_sys(const u32* p) {
    u32 x;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

/// Relaxed read, system scope.
PK_DEVICE s32 ld_relaxed_sys(const s32* p) {
    s32 x;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

/// Relaxed read, system scope.
PK_DEVICE u64 ld_relaxed_sys(const u64* p) {
    u64 x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}

/// Relaxed read of a word that only this GPU writes.
PK_DEVICE u32 ld_relaxed_gpu(const u32* p) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

/// Relaxed write of a word that only this GPU reads.
PK_DEVICE void st_relaxed_gpu(u32* p, u32 x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}

/// Relaxed write, system scope.
PK_DEVICE void st_relaxed_sys(u32* p, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}

/// Release and write, system scope: one fence for the whole warp, then the stores.
PK_DEVICE void st_release_sys(u64* p, u64 x) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(x) : "memory");
}

/// Four zeros, 16-byte aligned.
PK_DEVICE void st_zero16(s32* p) {
    asm volatile("st.global.v4.s32 [%0], {%1, %1, %1, %1};" :: "l"(p), "r"(0) : "memory");
}

/// Release and add, system scope.
PK_DEVICE void red_release_sys(s32* p, s32 x) {
    asm volatile("red.release.sys.global.add.s32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}

/// Add, system scope; a release fence stands before it.
PK_DEVICE void red_relaxed_sys(s32* p, s32 x) {
    asm volatile("red.relaxed.sys.global.add.s32 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}

/// Replaces `expected` by `wanted`, system scope; the value found.
PK_DEVICE u32 atomic_cas_sys(u32* p, u32 expected, u32 wanted) {
    u32 found;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(found) : "l"(p), "r"(expected), "r"(wanted) : "memory");
    return found;
}

/// Adds, this GPU's scope, no order; the value found.
PK_DEVICE u32 atomic_add_gpu(u32* p, u32 x) {
    u32 found;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(found) : "l"(p), "r"(x) : "memory");
    return found;
}

/// Adds, system scope, no order; the value found.
PK_DEVICE s32 atomic_add_sys(s32* p, s32 x) {
    s32 found;
    asm volatile("atom.relaxed.sys.global.add.s32 %0, [%1], %2;" : "=r"(found) : "l"(p), "r"(x) : "memory");
    return found;
}

/// Adds with acquire and release, this GPU's scope; the value found.
PK_DEVICE u32 atomic_add_acq_rel_gpu(u32* p, u32 x) {
    u32 found;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(found) : "l"(p), "r"(x) : "memory");
    return found;
}

// -- shared memory -------------------------------------------------------------------------------------------
/// Adds to a word of shared memory; the value found.
PK_DEVICE u32 atomic_add_shared(u32* p, u32 x) {
    u32 found;
    asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;"
                 : "=r"(found) : "r"(shared_address(p)), "r"(x) : "memory");
    return found;
}

/// Stores 8 bytes.
PK_DEVICE void st_shared(u32 address, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(address), "r"(x), "r"(y) : "memory");
}

/// Stores 4 bytes.
PK_DEVICE void st_shared(u32 address, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(x) : "memory");
}

/// Loads 4 bytes.
PK_DEVICE void ld_shared(u32 address, u32& x) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
}

/// Loads 8 bytes.
PK_DEVICE void ld_shared(u32 address, u32& x, u32& y) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

/// Four 8x8 blocks of 16-bit elements, fragment to rows; lane l gives the address of row l % 8 of block l / 8.
PK_DEVICE void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// As `stmatrix_x4`, two blocks (addresses of lanes 0..15).
PK_DEVICE void stmatrix_x2(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" :: "r"(address), "r"(a), "r"(b) : "memory");
}

/// As `stmatrix_x4`, each block transposed: lane l gives the address of *column* l % 8 of block l / 8.
PK_DEVICE void stmatrix_x4_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// As `stmatrix_x4_transposed`, two blocks.
PK_DEVICE void stmatrix_x2_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :: "r"(address), "r"(a), "r"(b) : "memory");
}

/// Four 8x8 blocks of 16-bit elements, rows to fragment; addresses as in `stmatrix_x4`.
PK_DEVICE void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

/// As `ldmatrix_x4`, two blocks (addresses of lanes 0..15).
PK_DEVICE void ldmatrix_x2(u32 address, u32& a, u32& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

/// As `ldmatrix_x4`, each block transposed: lane l gives the address of *column* l % 8 of block l / 8.
PK_DEVICE void ldmatrix_x4_transposed(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

/// As `ldmatrix_x4_transposed`, two blocks.
PK_DEVICE void ldmatrix_x2_transposed(u32 address, u32& a, u32& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

}  // namespace pk
