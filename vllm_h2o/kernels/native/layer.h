// What Python hands over: one layer's memory, and one step's work for all layers. The structures are
// mirrored in vllm_h2o/kernels/native/library.py; fields are 8 bytes each, so there is no padding.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace h2o {

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    return float(half);
#endif
  }
};

// What a token ranks by: vllm_h2o.config.RANKS, in that order.
enum Rank : int64_t { kSum = 0, kMean, kValue, kKeys, kRandom, kAge };

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Inside a block lie, per KV head, K and then V, as key_at and value_at say (vllm_h2o/layout.py); behind all
// heads the scores [num_kv_heads, block_size] float32, then (if tracked) positions int32 alike.
struct Layer {
  char* cache;
  int64_t block_bytes;
  int64_t scores_offset_bytes;
  int64_t positions_offset_bytes;  // 0 = not tracked
  int64_t dtype;
  int64_t for_amx;  // the layout of vLLM's AMX attention
  int64_t num_kv_heads;
  int64_t group;  // query heads per KV head
  int64_t head_size;
  int64_t block_size;
  char* ring;  // [num_slots * block_size, num_heads, head_size]
  const float* sinks;  // [num_heads] or null
  double scale;
  double softcap;  // 0 = off
  int64_t salt;    // tells layers apart where something is drawn

  int64_t element_bytes() const { return dtype == kFloat32 ? 4 : 2; }
  int64_t query_bytes() const { return num_kv_heads * group * head_size * element_bytes(); }
  template <typename T>
  T* keys(int64_t block, int64_t head) const {
    return reinterpret_cast<T*>(cache + block * block_bytes) + head * 2 * block_size * head_size;
  }
  template <typename T>
  T* values(int64_t block, int64_t head) const {
    return keys<T>(block, head) + block_size * head_size;
  }
  // Where element d of the key or value at this offset lies among those of its block and head.
  int64_t key_at(int64_t offset, int64_t d) const {
    if (!for_amx) return d * block_size + offset;
    return offset / 16 * 16 * head_size + d / 2 * 32 + offset % 16 * 2 + d % 2;
  }
  int64_t value_at(int64_t offset, int64_t d) const {
    if (!for_amx) return offset * head_size + d;
    return d / 16 * 16 * block_size + offset / 2 * 32 + d % 16 * 2 + offset % 2;
  }
  float* scores(int64_t block, int64_t head) const {
    return reinterpret_cast<float*>(cache + block * block_bytes + scores_offset_bytes) + head * block_size;
  }
  int32_t* positions(int64_t block, int64_t head) const {
    return reinterpret_cast<int32_t*>(cache + block * block_bytes + positions_offset_bytes) +
           head * block_size;
  }
};

// One row's queries that are scored now. Query i sees the first num_live - num_queries + 1 + i live slots.
struct ScoreRow {
  int64_t from_ring;    // else from the batch
  int64_t first_query;  // index in the ring or the batch
  int64_t num_queries;
  int64_t num_live;
  const int32_t* blocks;  // live blocks in order
  const float* weights;   // [num_queries]
  double decay;           // factor on what is stored
};

// One row that drops its lowest tokens.
struct DropRow {
  int64_t num_live;
  int64_t num_dropped;  // tokens, a multiple of the block size
  int64_t num_tokens;   // of the request so far, dropped ones too
  int64_t pinned_tokens;  // never dropped
  const int32_t* blocks;
};

struct Step {
  int64_t num_appended;
  const int64_t* append_tokens;  // indices of queries in the batch
  const int64_t* append_slots;   // and in the ring
  int64_t num_started;
  const int64_t* started_blocks;
  const int32_t* started_positions;  // [num_started, block_size]
  int64_t num_early_rows;            // leading score_rows that are done before the others
  int64_t num_score_rows;
  const ScoreRow* score_rows;
  int64_t num_drop_rows;
  const DropRow* drop_rows;
  int64_t pinned_tokens;  // of all rows: keep no scores
  int64_t recent_tokens;
  int64_t score_pool;
  int64_t by_block;
  int64_t rank_by;
  const float* total_weights;  // for kMean: [n - 1] is the weight of n queries
};

// The queries of the batch: [num_tokens, num_heads, head_size] with tokens some bytes apart.
struct Queries {
  const char* data;
  int64_t token_bytes;
};

}  // namespace h2o
