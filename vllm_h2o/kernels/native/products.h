// Q times K for a few query rows and one panel of slots, and how both are packed for it.
//
// Floats: any dtype, converted while packing. Pairs: bfloat16 with the machine's dot product; products of
// bfloat16 are exact in float32 and are summed there, so nothing is lost against float32.

#pragma once

#include <cstdint>

#include "layer.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace h2o {

constexpr int kPanel = 2 * kLanes;  // slots whose logits are computed together
constexpr int kRows = 8;            // query rows whose logits stay in registers

// Each product packs keys as [panel][dims()][kPanel] and queries as [dims()][kRows] of its Element.
struct FloatProduct {
  typedef float Element;
  static int64_t dims(int64_t head_size) { return head_size; }

  template <typename T>
  static Element key(const T* column, int64_t d, int64_t stride) {
    return float(column[d * stride]);
  }

  // logits[r * stride + i] = q_r . k_i
  static void multiply(const Element* keys, const Element* queries, int64_t dims, float* logits,
                       int64_t stride) {
    Floats low[kRows] = {}, high[kRows] = {};
    for (int64_t d = 0; d < dims; ++d) {
      const Floats k0 = load(keys + d * kPanel), k1 = load(keys + d * kPanel + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Floats q = splat(queries[d * kRows + r]);
        low[r] += q * k0;
        high[r] += q * k1;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store(logits + r * stride, low[r]);
      store(logits + r * stride + kLanes, high[r]);
    }
  }
};

#if defined(__AVX512BF16__)
struct PairProduct {
  typedef uint32_t Element;
  static int64_t dims(int64_t head_size) { return head_size / 2; }

  static Element key(const BFloat16* column, int64_t d, int64_t stride) {
    return column[2 * d * stride].bits | uint32_t(column[(2 * d + 1) * stride].bits) << 16;
  }

  static void multiply(const Element* keys, const Element* queries, int64_t dims, float* logits,
                       int64_t stride) {
    __m512 low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dims; ++d) {
      const __m512bh k0 = (__m512bh)_mm512_loadu_si512(keys + d * kPanel);
      const __m512bh k1 = (__m512bh)_mm512_loadu_si512(keys + d * kPanel + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh q = (__m512bh)_mm512_set1_epi32(int(queries[d * kRows + r]));
        low[r] = _mm512_dpbf16_ps(low[r], k0, q);
        high[r] = _mm512_dpbf16_ps(high[r], k1, q);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(logits + r * stride, low[r]);
      _mm512_storeu_ps(logits + r * stride + kLanes, high[r]);
    }
  }
};
#endif

template <typename T>
struct ProductOf {
  typedef FloatProduct Type;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<BFloat16> {
  typedef PairProduct Type;
};
#endif

}  // namespace h2o
