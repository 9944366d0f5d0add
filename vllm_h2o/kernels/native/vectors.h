// Sixteen floats at a time, in the compiler's vector extension: it lowers them to what the machine has.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace h2o {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline Floats splat(float x) { return x - Floats{}; }

// b where either is NaN.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);  // which the compiler doesn't find by itself
#else
  return a > b ? a : b;
#endif
}

inline float max_lane(Floats v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

inline float sum_lanes(Floats v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// 2^x for x <= 0 or so, relative error below 1e-7; 2^-126 for anything smaller, NaN stays NaN.
// Minimax polynomial of degree 5 on [-0.5, 0.5].
inline Floats exp2(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = max(splat(-126.0f), x);
  const Floats rounded = x + kRound;
  const Floats f = x - (rounded - kRound);
  Floats p = splat(0.0013276471985f);
  p = p * f + 0.0096755413344f;
  p = p * f + 0.0555071327352f;
  p = p * f + 0.2402211972384f;
  p = p * f + 0.6931469670648f;
  p = p * f + 1.0000000716547f;
  return (Floats)((Ints)p + ((Ints)rounded << 23));
}

}  // namespace h2o
