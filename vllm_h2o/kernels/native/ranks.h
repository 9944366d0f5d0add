// What tokens rank by when some have to go: vllm_h2o/kernels/plain/ranks.py says what and why.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "layer.h"

namespace h2o {

// In [0, 1): a hash of position, layer and head.
inline float drawn_score(const Layer& layer, int32_t position, int64_t head) {
  uint32_t x = uint32_t(position) * 0x9E3779B1u +
               uint32_t(head + layer.salt * layer.num_kv_heads) * 0x85EBCA77u;
  for (uint32_t factor : {0x7FEB352Du, 0x846CA68Bu}) x = (x ^ x >> 16) * factor;
  return float((x ^ x >> 16) >> 8) / float(1 << 24);
}

// Sum of term(0) .. term(count - 1), in lanes that the compiler can keep in one register.
template <typename Term>
float sum_of(int64_t count, Term term) {
  constexpr int kParts = 16;
  float parts[kParts] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kParts <= count; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] += term(i + j);
  for (; i < count; ++i) sum += term(i);
  for (float part : parts) sum += part;
  return sum;
}

template <typename T>
class Ranker {
 public:
  // ranks[slot] of one row and head.
  void rank(const Layer& layer, const Step& step, const DropRow& row, int64_t head, float* ranks) {
    if (step.rank_by == kKeys) return key_differences(layer, row, head, ranks);
    const int64_t bs = layer.block_size;
    for (int64_t slot = 0; slot < row.num_live; ++slot) {
      const int64_t block = row.blocks[slot / bs], offset = slot % bs;
      const float score = layer.scores(block, head)[offset];
      switch (step.rank_by) {
        case kAge: ranks[slot] = 0; break;
        case kMean: {
          const int64_t num_queries = row.num_tokens - layer.positions(block, head)[offset];
          ranks[slot] = score / step.total_weights[num_queries - 1];
          break;
        }
        case kValue: ranks[slot] = score * value_norm(layer, block, head, offset); break;
        default: ranks[slot] = score;
      }
    }
  }

 private:
  static float value_norm(const Layer& layer, int64_t block, int64_t head, int64_t offset) {
    const T* value = layer.values<T>(block, head) + layer.value_at(offset, 0);
    if (!layer.for_amx) return sum_of(layer.head_size, [value](int64_t d) { return std::abs(float(value[d])); });
    constexpr int kRow = 16;  // numbers of a token that a tile's rows hold
    float parts[kRow] = {};
    for (int64_t d = 0; d < layer.head_size; d += kRow)
      for (int i = 0; i < kRow; ++i) parts[i] += std::abs(float(value[d * layer.block_size + 2 * i]));
    return sum_of(kRow, [&parts](int64_t i) { return parts[i]; });
  }

  // 1 - cos(key, mean of the normalised keys).
  void key_differences(const Layer& layer, const DropRow& row, int64_t head, float* ranks) {
    const int64_t bs = layer.block_size, size = layer.head_size;
    anchor_.assign(size, 0.0f);
    directions_.resize(row.num_live * size);
    for (int64_t slot = 0; slot < row.num_live; ++slot) {
      const T* keys = layer.keys<T>(row.blocks[slot / bs], head);
      float* direction = &directions_[slot * size];
      for (int64_t d = 0; d < size; ++d) direction[d] = keys[layer.key_at(slot % bs, d)];
      normalise(direction, size);
      for (int64_t d = 0; d < size; ++d) anchor_[d] += direction[d];
    }
    normalise(anchor_.data(), size);
    for (int64_t slot = 0; slot < row.num_live; ++slot) {
      const float *direction = &directions_[slot * size], *anchor = anchor_.data();
      ranks[slot] = 1 - sum_of(size, [=](int64_t d) { return direction[d] * anchor[d]; });
    }
  }

  static void normalise(float* vector, int64_t size) {
    const float squares = sum_of(size, [vector](int64_t d) { return vector[d] * vector[d]; });
    const float norm = std::max(std::sqrt(squares), 1e-12f);  // as torch's normalize
    for (int64_t d = 0; d < size; ++d) vector[d] /= norm;
  }

  std::vector<float> anchor_, directions_;
};

}  // namespace h2o
