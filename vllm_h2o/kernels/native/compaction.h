// In-place compaction of one layer: vllm_h2o/kernels/plain/compaction.py says what and why.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "layer.h"
#include "ranks.h"
#include "vectors.h"

namespace h2o {

// Drops the lowest tokens of one row and head; one object per thread.
template <typename T>
class Compactor {
 public:
  void compact(const Layer& layer, const Step& step, const DropRow& row, int64_t head) {
    gather(layer, step, row, head);
    if (step.score_pool > 1) pool(layer, step, row, head);
    victims_.assign(row.num_live, 0);
    if (step.by_block)
      choose_blocks(layer.block_size, step, row);
    else
      choose_tokens(step, row);
    move(layer, row, head);
  }

 private:
  struct Ranked {
    double rank;
    int64_t order, slot;
    bool operator<(const Ranked& other) const {
      return rank < other.rank || (rank == other.rank && order < other.order);
    }
  };

  // A model that produced NaN must not make us drop what is pinned, and infinities must stay comparable.
  static double finite(double score) {
    constexpr double kMost = std::numeric_limits<float>::max();
    return score != score ? kMost : std::clamp(score, -kMost, kMost);
  }

  void gather(const Layer& layer, const Step& step, const DropRow& row, int64_t head) {
    ranks_.resize(row.num_live);
    order_.resize(row.num_live);
    ranker_.rank(layer, step, row, head, ranks_.data());
    for (int64_t slot = 0; slot < row.num_live; ++slot) {
      ranks_[slot] = float(finite(ranks_[slot]));
      order_[slot] = slot;
    }
  }

  // A token ranks by the highest score among its neighbours in the text; ties then go by age.
  void pool(const Layer& layer, const Step& step, const DropRow& row, int64_t head) {
    const int64_t n = row.num_live, reach = step.score_pool / 2;
    sort_by_age(layer, row, head);
    // Ranks by age with room on both sides, so that every window is whole. Pinned tokens are the oldest and
    // may be shared, so they keep no scores.
    const float none = -std::numeric_limits<float>::infinity();
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    aged_.assign(padded + 2 * reach + kLanes, none);
    for (int64_t age = row.pinned_tokens; age < n; ++age) aged_[reach + age] = ranks_[by_age_[age]];
    pooled_.resize(padded);
    for (int64_t age = 0; age < padded; age += kLanes) {
      Floats most = load(&aged_[age]);
      for (int64_t i = 1; i < step.score_pool; ++i) most = max(most, load(&aged_[age + i]));
      store(&pooled_[age], most);
    }
    for (int64_t age = 0; age < n; ++age) {
      ranks_[by_age_[age]] = pooled_[age];
      order_[by_age_[age]] = age;
    }
  }

  // by_age_: the slots, oldest token first. Positions are distinct, so marking them in a bitmap sorts them.
  void sort_by_age(const Layer& layer, const DropRow& row, int64_t head) {
    const int64_t bs = layer.block_size, n = row.num_live;
    slot_at_.resize(std::max<size_t>(slot_at_.size(), row.num_tokens));
    marks_.assign(row.num_tokens / 64 + 1, 0);
    for (int64_t slot = 0; slot < n; ++slot) {
      const int64_t stored = layer.positions(row.blocks[slot / bs], head)[slot % bs];
      const int64_t position = std::clamp<int64_t>(stored, 0, row.num_tokens - 1);
      slot_at_[position] = slot;
      marks_[position / 64] |= uint64_t(1) << position % 64;
    }
    by_age_.clear();
    for (size_t word = 0; word < marks_.size(); ++word)
      for (uint64_t marks = marks_[word]; marks; marks &= marks - 1)
        by_age_.push_back(slot_at_[word * 64 + __builtin_ctzll(marks)]);
    by_age_.resize(n, n - 1);  // wrong positions may cost the right choice, but never memory of others
  }

  void choose_tokens(const Step& step, const DropRow& row) {
    ranked_.clear();
    for (int64_t slot = row.pinned_tokens; slot < row.num_live - step.recent_tokens; ++slot)
      ranked_.push_back({ranks_[slot], order_[slot], slot});
    take_lowest(row.num_dropped, 1);
  }

  // Only blocks that are eligible as a whole; what is left of a block past that is recent.
  void choose_blocks(int64_t block_size, const Step& step, const DropRow& row) {
    ranked_.clear();
    const int64_t end = row.num_live - step.recent_tokens - block_size;
    for (int64_t slot = row.pinned_tokens; slot <= end; slot += block_size) {
      double sum = 0;
      for (int64_t i = slot; i < slot + block_size; ++i) sum += ranks_[i];
      ranked_.push_back({finite(sum), slot, slot});
    }
    take_lowest(row.num_dropped / block_size, block_size);
  }

  void take_lowest(int64_t count, int64_t width) {
    std::nth_element(ranked_.begin(), ranked_.begin() + (count - 1), ranked_.end());
    for (int64_t i = 0; i < count; ++i) std::fill_n(victims_.begin() + ranked_[i].slot, width, 1);
  }

  // The i-th survivor of the region about to be freed goes to the i-th hole outside of it.
  void move(const Layer& layer, const DropRow& row, int64_t head) const {
    const int64_t freed_end = row.pinned_tokens + row.num_dropped;
    int64_t hole = freed_end;
    for (int64_t slot = row.pinned_tokens; slot < freed_end; ++slot) {
      if (victims_[slot]) continue;
      while (!victims_[hole]) ++hole;
      copy(layer, row, head, slot, hole++);
    }
  }

  static void copy(const Layer& layer, const DropRow& row, int64_t head, int64_t from, int64_t to) {
    const int64_t bs = layer.block_size, size = layer.head_size;
    const int64_t source = row.blocks[from / bs], target = row.blocks[to / bs];
    from %= bs;
    to %= bs;
    const T *keys = layer.keys<T>(source, head), *values = layer.values<T>(source, head);
    T *keys_out = layer.keys<T>(target, head), *values_out = layer.values<T>(target, head);
    for (int64_t d = 0; d < size; ++d) keys_out[layer.key_at(to, d)] = keys[layer.key_at(from, d)];
    for (int64_t d = 0; d < size; ++d) values_out[layer.value_at(to, d)] = values[layer.value_at(from, d)];
    layer.scores(target, head)[to] = layer.scores(source, head)[from];
    if (layer.positions_offset_bytes)
      layer.positions(target, head)[to] = layer.positions(source, head)[from];
  }

  Ranker<T> ranker_;
  std::vector<float> ranks_, aged_, pooled_;
  std::vector<int64_t> order_, by_age_;
  std::vector<int32_t> slot_at_;
  std::vector<uint64_t> marks_;
  std::vector<Ranked> ranked_;
  std::vector<uint8_t> victims_;
};

template <typename T>
void drop_tokens(const Layer& layer, const Step& step) {
  const int64_t num_heads = layer.num_kv_heads, num_pieces = step.num_drop_rows * num_heads;
#pragma omp parallel
  {
    static thread_local Compactor<T> compactor;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_pieces; ++i) {
      compactor.compact(layer, step, step.drop_rows[i / num_heads], i % num_heads);
    }
  }
}

}  // namespace h2o
