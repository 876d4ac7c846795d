#pragma once
/// Single elements: as they lie in memory and as arithmetic takes them.

#include "pk/ptx/misc.cuh"

namespace pk {

/// An element as arithmetic takes it: narrow floats widen, others stay.
PK_DEVICE float widen_element(float x) { return x; }
PK_DEVICE int widen_element(int x) { return x; }
PK_DEVICE bool widen_element(bool x) { return x; }
PK_DEVICE float widen_element(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
PK_DEVICE float widen_element(f16 x) { return unpack<f16, 0>(x.bits); }
PK_DEVICE float widen_element(e4m3 x) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(x.bits)));
    return unpack<f16, 0>(pair);
}
PK_DEVICE float widen_element(e5m2 x) {
    u32 pair;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(x.bits)));
    return unpack<f16, 0>(pair);
}

/// An element of a tile: itself, or the value of a narrow one, which cannot be assigned to.
template <class T>
PK_DEVICE decltype(auto) element_of(T& x) {
    if constexpr (sizeof(T) == 4 || is_same<T, bool> || is_same<T, const bool>) return (x);
    else return widen_element(x);
}

/// A value as an element of type T: to nearest even, 8-bit floats saturate; floats to int by truncation.
template <class T, class U>
PK_DEVICE T narrow_element(U x) {
    if constexpr (sizeof(T) == 2) {
        return T{static_cast<u16>(pack<T>(static_cast<float>(x), 0.0f))};
    } else if constexpr (is_same<T, e4m3> || is_same<T, e5m2>) {
        u16 pair;
        const float value = static_cast<float>(x);
        if constexpr (is_same<T, e4m3>) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
        else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
        return T{static_cast<u8>(pair)};
    } else {
        return static_cast<T>(x);
    }
}

}  // namespace pk
