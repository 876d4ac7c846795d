#pragma once
/// Functions of single elements that CUDA has no name for, or not in the form that the language promises.

#include "pk/ptx/misc.cuh"

namespace pk {

/// The greater and the lesser; NaN if either is.
PK_DEVICE float greatest(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
PK_DEVICE float least(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
PK_DEVICE int greatest(int x, int y) { return x < y ? y : x; }
PK_DEVICE int least(int x, int y) { return x < y ? x : y; }

/// 2 ** x, in one instruction: within 2 ulp; tiny results are 0.
PK_DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// x * y + z, rounded once.
PK_DEVICE float multiply_add(float x, float y, float z) { return __fmaf_rn(x, y, z); }

PK_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
PK_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
PK_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
PK_DEVICE float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

}  // namespace pk
