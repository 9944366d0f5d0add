// What one layer does after its attention kernel, in this order; Python calls this once per layer and step.

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "compaction.h"
#include "layer.h"
#include "scoring.h"

namespace h2o {

void append_queries(const Layer& layer, const Step& step, const Queries& batch) {
  const int64_t bytes = layer.query_bytes();
  for (int64_t i = 0; i < step.num_appended; ++i)
    std::memcpy(layer.ring + step.append_slots[i] * bytes,
                batch.data + step.append_tokens[i] * batch.token_bytes, bytes);
}

void start_blocks(const Layer& layer, const Step& step) {
  const int64_t bs = layer.block_size;
  for (int64_t i = 0; i < step.num_started; ++i)
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const int32_t* positions = step.started_positions + i * bs;
      float* scores = layer.scores(step.started_blocks[i], head);
      std::fill_n(scores, bs, 0.0f);
      if (step.rank_by == kRandom)
        for (int64_t j = 0; j < bs; ++j) scores[j] = drawn_score(layer, positions[j], head);
      if (layer.positions_offset_bytes)
        std::copy_n(positions, bs, layer.positions(step.started_blocks[i], head));
    }
}

template <typename T, typename Product = typename ProductOf<T>::Type>
void after_attention(const Layer& layer, const Step& step, const Queries& batch) {
  static RowScorer<T, Product> scorer;  // layers come one after the other; its buffers grow to the longest row
  const ScoreRow* rows = step.score_rows;
  scorer.score(layer, step, rows, rows + step.num_early_rows, batch);
  scorer.score(layer, step, rows + step.num_early_rows, rows + step.num_score_rows, batch);
  if (step.num_drop_rows) drop_tokens<T>(layer, step);
}

void after_attention_in_bfloat16(const Layer& layer, const Step& step, const Queries& batch) {
#if defined(__AMX_BF16__)
  if (layer.for_amx && layer.head_size % 32 == 0 && TileProduct::permitted())
    return after_attention<BFloat16, TileProduct>(layer, step, batch);
#endif
  after_attention<BFloat16>(layer, step, batch);
}

}  // namespace h2o

extern "C" {

// Changed whenever the structures or their meaning change; Python checks it.
int64_t h2o_abi_version() { return 4; }

int64_t h2o_scratch_bytes(int64_t num_live, int64_t num_kv_heads, int64_t head_size) {
  return h2o::scratch_bytes(num_live, num_kv_heads, head_size, omp_get_max_threads());
}

// queries: [num_tokens, num_heads, head_size] in the layer's dtype, tokens token_bytes apart.
void h2o_after_attention(const h2o::Layer* layer, const h2o::Step* step, const void* queries,
                         int64_t token_bytes) {
  const h2o::Queries batch{static_cast<const char*>(queries), token_bytes};
  h2o::append_queries(*layer, *step, batch);
  h2o::start_blocks(*layer, *step);
  switch (layer->dtype) {
    case h2o::kFloat32: return h2o::after_attention<float>(*layer, *step, batch);
    case h2o::kBFloat16: return h2o::after_attention_in_bfloat16(*layer, *step, batch);
    default: return h2o::after_attention<h2o::Float16>(*layer, *step, batch);
  }
}
}
