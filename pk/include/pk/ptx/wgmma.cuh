#pragma once
/// The tensor core instruction: m64 x N x 32 bytes of k, float accumulators, every N from 8 to 256 by 8.
///
/// Operands: 16-bit floats in any layout, 8-bit floats and float (read as tf32) contiguous along k.
///
/// Each warpgroup multiplies 64 rows.  Thread t of its 128 holds, of every 8 columns, four accumulators: rows
/// 16 * (t / 32) + t % 32 / 4 (+ 8), columns 2 * (t % 4) (+ 1), the column varying fastest.

#include "pk/ptx/misc.cuh"

namespace pk {

/// Orders accumulators and shared memory before the first `wgmma` that follows.
PK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes the current group of `wgmma`.
PK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Until at most the newest N groups are unfinished.
template <int N>
PK_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

/// Where a matrix operand lies in shared memory, in the encoding of the hardware.
///
/// `leading`: bytes from one panel to the next (operands whose rows are k); `stride`: bytes from 8 rows to the next 8;
/// `swizzle`: 128, 64 or 32.  Adding bytes / 16 to the descriptor moves it.
PK_DEVICE u64 matrix_descriptor(u32 address, u32 leading, u32 stride, int swizzle) {
    const u64 mode = swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | mode << 62;
}

/// `wgmma<N>::ss<T, U, TA, TB>(d, a, b, accumulate)`: d = a @ b (+ d), a of type T and b of type U by descriptor; TA, TB
/// are 1 where the operand is not contiguous along k.  `wgmma<N>::rs<T, TB>(d, a0..a3, b, accumulate)`: a in registers.
template <int N> struct wgmma;

// PK_Dn names the accumulators %0 .. %(n/2 - 1) of the instruction, PK_Rn binds them to d[0 .. n/2 - 1].
#define PK_D8 "%0, %1, %2, %3"
#define PK_D16 PK_D8 ", %4, %5, %6, %7"
#define PK_D24 PK_D16 ", %8, %9, %10, %11"
#define PK_D32 PK_D24 ", %12, %13, %14, %15"
#define PK_D40 PK_D32 ", %16, %17, %18, %19"
#define PK_D48 PK_D40 ", %20, %21, %22, %23"
#define PK_D56 PK_D48 ", %24, %25, %26, %27"
#define PK_D64 PK_D56 ", %28, %29, %30, %31"
#define PK_D72 PK_D64 ", %32, %33, %34, %35"
#define PK_D80 PK_D72 ", %36, %37, %38, %39"
#define PK_D88 PK_D80 ", %40, %41, %42, %43"
#define PK_D96 PK_D88 ", %44, %45, %46, %47"
#define PK_D104 PK_D96 ", %48, %49, %50, %51"
#define PK_D112 PK_D104 ", %52, %53, %54, %55"
#define PK_D120 PK_D112 ", %56, %57, %58, %59"
#define PK_D128 PK_D120 ", %60, %61, %62, %63"
#define PK_D136 PK_D128 ", %64, %65, %66, %67"
#define PK_D144 PK_D136 ", %68, %69, %70, %71"
#define PK_D152 PK_D144 ", %72, %73, %74, %75"
#define PK_D160 PK_D152 ", %76, %77, %78, %79"
#define PK_D168 PK_D160 ", %80, %81, %82, %83"
#define PK_D176 PK_D168 ", %84, %85, %86, %87"
#define PK_D184 PK_D176 ", %88, %89, %90, %91"
#define PK_D192 PK_D184 ", %92, %93, %94, %95"
#define PK_D200 PK_D192 ", %96, %97, %98, %99"
#define PK_D208 PK_D200 ", %100, %101, %102, %103"
#define PK_D216 PK_D208 ", %104, %105, %106, %107"
#define PK_D224 PK_D216 ", %108, %109, %110, %111"
#define PK_D232 PK_D224 ", %112, %113, %114, %115"
#define PK_D240 PK_D232 ", %116, %117, %118, %119"
#define PK_D248 PK_D240 ", %120, %121, %122, %123"
#define PK_D256 PK_D248 ", %124, %125, %126, %127"

#define PK_R8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define PK_R16 PK_R8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define PK_R24 PK_R16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define PK_R32 PK_R24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define PK_R40 PK_R32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define PK_R48 PK_R40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define PK_R56 PK_R48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define PK_R64 PK_R56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define PK_R72 PK_R64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define PK_R80 PK_R72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define PK_R88 PK_R80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define PK_R96 PK_R88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define PK_R104 PK_R96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define PK_R112 PK_R104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define PK_R120 PK_R112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define PK_R128 PK_R120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PK_R136 PK_R128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define PK_R144 PK_R136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define PK_R152 PK_R144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define PK_R160 PK_R152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define PK_R168 PK_R160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define PK_R176 PK_R168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define PK_R184 PK_R176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define PK_R192 PK_R184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define PK_R200 PK_R192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define PK_R208 PK_R200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define PK_R216 PK_R208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define PK_R224 PK_R216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define PK_R232 PK_R224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define PK_R240 PK_R232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define PK_R248 PK_R240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define PK_R256 PK_R248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// One instruction.  O0 .. O6 name the operands behind the accumulators: ss: a, b, accumulate, TA, TB; rs: a0 .. a3, b,
// accumulate, TB.  PK_WGMMA_KK is ss for the types that have no transposed operands.
#define PK_WGMMA_SS(N, TYPE, O0, O1, O2, O3, O4)                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O2 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PK_D##N "}, " O0 ", " O1     \
                 ", p, 1, 1, " O3 ", " O4 ";\n}\n"                                                                 \
                 : PK_R##N : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)), "n"(TA), "n"(TB))
#define PK_WGMMA_KK(N, TYPES, O0, O1, O2)                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O2 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" PK_D##N "}, " O0 ", " O1 ", p, 1, 1;\n}\n"      \
                 : PK_R##N : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)))
#define PK_WGMMA_RS(N, TYPE, O0, O1, O2, O3, O4, O5, O6)                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O5 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PK_D##N "}, {" O0 ", " O1    \
                 ", " O2 ", " O3 "}, " O4 ", p, 1, 1, " O6 ";\n}\n"                                                \
                 : PK_R##N : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<u32>(accumulate)), "n"(TB))
#define PK_WGMMA(N, O0, O1, O2, O3, O4, O5, O6)                                                                    \
    template <> struct wgmma<N> {                                                                                  \
        template <class T, class U, int TA, int TB>                                                                \
        static PK_DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {                               \
            if constexpr (is_same<T, bf16>) PK_WGMMA_SS(N, "bf16", O0, O1, O2, O3, O4);                            \
            else if constexpr (is_same<T, f16>) PK_WGMMA_SS(N, "f16", O0, O1, O2, O3, O4);                         \
            else if constexpr (is_same<T, float>) PK_WGMMA_KK(N, "k8.f32.tf32.tf32", O0, O1, O2);                  \
            else if constexpr (is_same<T, e4m3> && is_same<U, e4m3>) PK_WGMMA_KK(N, "k32.f32.e4m3.e4m3", O0, O1, O2); \
            else if constexpr (is_same<T, e4m3>) PK_WGMMA_KK(N, "k32.f32.e4m3.e5m2", O0, O1, O2);                  \
            else if constexpr (is_same<U, e4m3>) PK_WGMMA_KK(N, "k32.f32.e5m2.e4m3", O0, O1, O2);                  \
            else PK_WGMMA_KK(N, "k32.f32.e5m2.e5m2", O0, O1, O2);                                                  \
        }                                                                                                          \
        template <class T, int TB>                                                                                 \
        static PK_DEVICE void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {      \
            if constexpr (is_same<T, bf16>) PK_WGMMA_RS(N, "bf16", O0, O1, O2, O3, O4, O5, O6);                    \
            else PK_WGMMA_RS(N, "f16", O0, O1, O2, O3, O4, O5, O6);                                                \
        }                                                                                                          \
    };

PK_WGMMA(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
PK_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
PK_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
PK_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
PK_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
PK_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
PK_WGMMA(56, "%28", "%29", "%30", "%31", "%32", "%33", "%34")
PK_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
PK_WGMMA(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
PK_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
PK_WGMMA(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
PK_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
PK_WGMMA(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
PK_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
PK_WGMMA(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
PK_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
PK_WGMMA(136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
PK_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
PK_WGMMA(152, "%76", "%77", "%78", "%79", "%80", "%81", "%82")
PK_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
PK_WGMMA(168, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
PK_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
PK_WGMMA(184, "%92", "%93", "%94", "%95", "%96", "%97", "%98")
PK_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
PK_WGMMA(200, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
PK_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
PK_WGMMA(216, "%108", "%109", "%110", "%111", "%112", "%113", "%114")
PK_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
PK_WGMMA(232, "%116", "%117", "%118", "%119", "%120", "%121", "%122")
PK_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
PK_WGMMA(248, "%124", "%125", "%126", "%127", "%128", "%129", "%130")
PK_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef PK_WGMMA
#undef PK_WGMMA_RS
#undef PK_WGMMA_KK
#undef PK_WGMMA_SS

}  // namespace pk
