#pragma once
/// Small things every layer needs: integer and element types, the warp's place in its block, named barriers,
/// register budgets, the clock.  NVRTC's built-ins only, no other header.

#define PK_DEVICE __device__ __forceinline__

/// offsetof as a constant.  NVRTC 13.0 has neither <stddef.h> nor `__builtin_offsetof`; every NVRTC has this intrinsic
/// of its front end.
#define PK_OFFSETOF(type, member) __INTADDR__(&(((type*)0)->member))

namespace pk {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using s32 = int;
using u64 = unsigned long long;

// -- element types: storage only, arithmetic is float ------------------------------------------------------
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };

/// `is_same<T, U>`: whether two types are one.
template <class T, class U> inline constexpr bool is_same = false;
template <class T> inline constexpr bool is_same<T, T> = true;

/// Two floats rounded to nearest even and packed, `low` in the low half.
template <class T>
PK_DEVICE u32 pack(float low, float high) {
    static_assert(is_same<T, bf16> || is_same<T, f16>, "only 16-bit floats are packed in pairs");
    u32 word;
    if constexpr (is_same<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

/// The low (`HALF` 0) or high (`HALF` 1) element of a packed pair, widened.
template <class T, int HALF>
PK_DEVICE float unpack(u32 word) {
    static_assert(is_same<T, bf16> || is_same<T, f16>, "only 16-bit floats are packed in pairs");
    if constexpr (is_same<T, bf16>) {
        return __uint_as_float(HALF ? word & 0xffff0000u : word << 16);
    } else {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(HALF ? word >> 16 : word)));
        return value;
    }
}

// -- the stream --------------------------------------------------------------------------------------------
/// Blocks of a launch may be there before the one in front of it on the stream has ended: until then, they wait here.
PK_DEVICE void stream_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// When all blocks have come here, those of the launch behind this one may take their room, if they will wait.
PK_DEVICE void stream_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// -- integers ----------------------------------------------------------------------------------------------
/// Ceiling of a / b, for b > 0 and a >= 0.
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Python's a // b: rounds towards minus infinity.
PK_DEVICE int floor_div(int a, int b) {
    const int q = a / b;
    return q - (a % b != 0 && (a < 0) != (b < 0));
}

/// Python's a % b: has the sign of b.
PK_DEVICE int floor_mod(int a, int b) {
    const int r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

/// Step `step` of `pk.ranks_from(start)`: (start + step) modulo world.
PK_DEVICE int rank_from(int start, int step, int world) { return floor_mod(start + step, world); }

// -- threads -----------------------------------------------------------------------------------------------
/// This warp's number in the block, known to be uniform (so that what depends on it can be, too).
PK_DEVICE int warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

/// This thread's number in its warp.
PK_DEVICE int lane_index() { return threadIdx.x % 32; }

/// True in one thread of a converged warp, always the same one.
PK_DEVICE bool elect_one() {
    u32 chosen;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(chosen));
    return chosen != 0;
}

/// Waits for `threads` threads at named barrier `id` (0 is the block's own).
PK_DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

/// Named barrier and verdict in one instruction: true everywhere if `mine` is true in all threads.
PK_DEVICE bool named_barrier_all(int id, int threads, bool mine) {
    u32 all;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "bar.red.and.pred q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}\n" : "=r"(all) : "r"(static_cast<u32>(mine)), "r"(id), "r"(threads) : "memory");
    return all != 0;
}

/// Raises this warp's register budget; waits until the block's pool has them.
template <int REGISTERS>
PK_DEVICE void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

/// Gives registers of this warp back to the block's pool.
template <int REGISTERS>
PK_DEVICE void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

/// Nanoseconds; comparable inside one GPU only.
PK_DEVICE u64 global_timer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/// Low word of the SM's cycle counter.
PK_DEVICE u32 clock_low() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now) :: "memory");
    return now;
}

/// Address of an object in shared memory, as PTX wants it.
PK_DEVICE u32 shared_address(const void* object) { return static_cast<u32>(__cvta_generic_to_shared(object)); }

}  // namespace pk
