// Q times K for a few query rows and one panel of slots, and how both are packed for it.
//
// Floats: any dtype, converted while packing. Pairs: bfloat16 with the machine's dot product; products of
// bfloat16 are exact in float32 and are summed there, so nothing is lost against float32. Tiles: the same by
// AMX, where vLLM has packed the keys for it already.

#pragma once

#include <cstdint>

#include "layer.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace h2o {

constexpr int kPanel = 2 * kLanes;  // slots whose logits are computed together

// Products take keys as [dims()][kPanel] and queries as [dims()][kRows] of their Element.
struct FloatProduct {
  typedef float Element;
  static constexpr int kRows = 8;  // query rows whose logits stay in registers
  static constexpr bool kInPlace = false;  // whether it takes keys as they lie in the cache
  struct Setup {  // exists while a thread multiplies
    Setup() {}
  };

  static int64_t dims(int64_t head_size) { return head_size; }
  static int64_t query_at(int64_t d, int64_t r, int64_t) { return d * kRows + r; }

  // Element d of a vector whose i-th number is vector[at(i)].
  template <typename T, typename At>
  static Element element(const T* vector, int64_t d, At at) {
    return float(vector[at(d)]);
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
struct PairProduct : FloatProduct {
  typedef uint32_t Element;

  static int64_t dims(int64_t head_size) { return head_size / 2; }

  template <typename At>
  static Element element(const BFloat16* vector, int64_t d, At at) {
    return vector[at(2 * d)].bits | uint32_t(vector[at(2 * d + 1)].bits) << 16;
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

#if defined(__AMX_BF16__)
// Keys lie as [2][dims()][kLanes] pairs: two tiles' worth of slots. Head sizes are multiples of 32, as vLLM
// sees to for this layout.
struct TileProduct : PairProduct {
  static constexpr int kRows = 16;
  static constexpr bool kInPlace = true;

  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16};
  };
  struct Setup {
    Setup() {
      alignas(64) static constexpr Config config;
      _tile_loadconfig(&config);
    }
    ~Setup() { _tile_release(); }
  };

  // Linux lets a process use tiles once it has asked. vLLM's attention has, where it uses them.
  static bool permitted() {
    constexpr int kRequest = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
  }

  static int64_t query_at(int64_t d, int64_t r, int64_t dims) { return r * dims + d; }

  static void multiply(const Element* keys, const Element* queries, int64_t dims, float* logits,
                       int64_t stride) {
    const int64_t query_bytes = dims * sizeof(Element);
    asm volatile("" ::: "memory");  // the compiler doesn't know that tiles are loaded from what it has to store
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < dims; d += kLanes) {
      _tile_loadd(2, queries + d, query_bytes);
      _tile_loadd(3, keys + d * kLanes, 64);
      _tile_loadd(4, keys + (dims + d) * kLanes, 64);
      _tile_dpbf16ps(0, 2, 3);
      _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, logits, stride * sizeof(float));
    _tile_stored(1, logits + kLanes, stride * sizeof(float));
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
