// Heavy-hitter scores of one layer: exact softmax column sums, recomputed from Q and K.
//
// A piece of work is one (row, KV head, segment of the row's queries). How a row is cut into segments
// depends on its number of queries alone, and segments are added up in order: a score is the same to the
// bit whatever else is in the batch and however many threads there are.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "buffer.h"
#include "layer.h"
#include "products.h"
#include "vectors.h"

namespace h2o {

constexpr int kTileRows = 16;         // query rows that use a panel of K while it is in the L1 cache
constexpr int64_t kMinSegment = 16;   // queries
constexpr int64_t kMaxSegments = 8;
constexpr int64_t kMaxSums = int64_t(4) << 20;  // floats of partial sums, but for a single longer row

inline int64_t segment_queries(int64_t num_queries) {
  return std::max(kMinSegment, (num_queries + kMaxSegments - 1) / kMaxSegments);
}

inline int64_t whole_panels(int64_t slots) { return (slots + kPanel - 1) / kPanel * kPanel; }

// The slots that a row's query sees.
inline int64_t seen_by(const ScoreRow& row, int64_t query) {
  return row.num_live - row.num_queries + query + 1;
}

template <typename T, typename Product>
class SegmentScorer {
 public:
  typedef typename Product::Element Element;

  // sums[0 .. whole_panels(seen_by(end - 1))) = what queries [begin, end) give to each slot.
  void score(const Layer& layer, const ScoreRow& row, const Queries& queries, int64_t head, int64_t begin,
             int64_t end, float* sums) {
    const int64_t num_slots = seen_by(row, end - 1), width = whole_panels(num_slots);
    const int64_t dims = Product::dims(layer.head_size), group = layer.group;
    const int64_t stride = width + kLanes;  // rows of a power of two bytes would share few lines of the cache
    queries_.reserve(kTileRows * dims);
    logits_.reserve(kTileRows * stride);
    find_keys(layer, row, head, num_slots);
    const typename Product::Setup setup;
    std::fill(sums, sums + width, 0.0f);
    // Row i of a head's query rows is its query head i % group of query i / group.
    for (int64_t first = begin * group; first < end * group; first += kTileRows) {
      const int64_t num_rows = std::min<int64_t>(kTileRows, end * group - first);
      const int64_t padded = whole_panels(seen_by(row, (first + num_rows - 1) / group));
      pack_queries(layer, queries, head, first, num_rows);
      for (int64_t slot = 0; slot < padded; slot += kPanel)
        for (int64_t r = 0; r < num_rows; r += Product::kRows)
          Product::multiply(panels_[slot / kPanel], &queries_[r * dims], dims, &logits_[r * stride + slot],
                            stride);
      float factors[kTileRows];
      for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t query = (first + r) / group, query_head = head * group + (first + r) % group;
        factors[r] = row.weights[query] /
                     exponentiate(layer, &logits_[r * stride], seen_by(row, query), padded, query_head);
      }
      for (int64_t slot = 0; slot < padded; slot += kLanes) {
        Floats sum = load(sums + slot);
        for (int64_t r = 0; r < num_rows; ++r) sum += factors[r] * load(&logits_[r * stride + slot]);
        store(sums + slot, sum);
      }
    }
  }

 private:
  // panels_: where the keys of each panel of slots are.
  void find_keys(const Layer& layer, const ScoreRow& row, int64_t head, int64_t num_slots) {
    const int64_t bs = layer.block_size, dims = Product::dims(layer.head_size);
    panels_.clear();
    if constexpr (Product::kInPlace) {
      // Blocks are whole panels. Keys behind the last slot may be anything: so are their logits, which are
      // not used.
      for (int64_t slot = 0; slot < num_slots; slot += kPanel) {
        const T* keys = layer.keys<T>(row.blocks[slot / bs], head) + layer.key_at(slot % bs, 0);
        panels_.push_back(reinterpret_cast<const Element*>(keys));
      }
      return;
    }
    keys_.reserve(whole_panels(num_slots) * dims);
    pack_keys(layer, row, head, num_slots);
    for (int64_t slot = 0; slot < num_slots; slot += kPanel) panels_.push_back(&keys_[slot * dims]);
  }

  void pack_keys(const Layer& layer, const ScoreRow& row, int64_t head, int64_t num_slots) {
    const int64_t bs = layer.block_size, dims = Product::dims(layer.head_size);
    for (int64_t slot = 0; slot < num_slots;) {
      // A run of slots inside one block and one panel.
      const int64_t offset = slot % bs, lane = slot % kPanel;
      const int64_t run = std::min({bs - offset, kPanel - lane, num_slots - slot});
      const T* in = layer.keys<T>(row.blocks[slot / bs], head);
      Element* out = &keys_[(slot - lane) * dims + lane];
      const auto pack = [&](auto key_at) {
        for (int64_t d = 0; d < dims; ++d)
          for (int64_t i = 0; i < run; ++i)
            out[d * kPanel + i] = Product::element(in, d, [&](int64_t at) { return key_at(offset + i, at); });
      };
      if (layer.for_amx)
        pack([&layer](int64_t at, int64_t d) { return layer.key_at(at, d); });
      else  // the same, but the compiler sees what is contiguous
        pack([bs](int64_t at, int64_t d) { return d * bs + at; });
      slot += run;
    }
    // The rest of the last panel: its logits are not used, but what is computed should be harmless.
    for (int64_t lane = num_slots % kPanel; lane % kPanel; ++lane)
      for (int64_t d = 0; d < dims; ++d) keys_[num_slots / kPanel * kPanel * dims + d * kPanel + lane] = 0;
  }

  void pack_queries(const Layer& layer, const Queries& queries, int64_t head, int64_t first,
                    int64_t num_rows) {
    constexpr int kRows = Product::kRows;
    const int64_t dims = Product::dims(layer.head_size), group = layer.group;
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t query = (first + r) / group, query_head = head * group + (first + r) % group;
      const char* token = queries.data + query * queries.token_bytes;
      const T* in = reinterpret_cast<const T*>(token) + query_head * layer.head_size;
      for (int64_t d = 0; d < dims; ++d)
        queries_[r / kRows * kRows * dims + Product::query_at(d, r % kRows, dims)] =
            Product::element(in, d, [](int64_t at) { return at; });
    }
    for (int64_t r = num_rows; r % kRows; ++r)
      for (int64_t d = 0; d < dims; ++d)
        queries_[r / kRows * kRows * dims + Product::query_at(d, r % kRows, dims)] = 0;
  }

  // Turns products into probabilities times the denominator, which is returned.
  static float exponentiate(const Layer& layer, float* logits, int64_t num_seen, int64_t padded,
                            int64_t query_head) {
    constexpr float kLog2E = 1.44269504088896f, kNone = -std::numeric_limits<float>::infinity();
    float scale = float(layer.scale) * kLog2E;
    if (layer.softcap != 0) {
      const float cap = float(layer.softcap), factor = float(layer.scale / layer.softcap);
      for (int64_t i = 0; i < num_seen; ++i) logits[i] = cap * std::tanh(logits[i] * factor);
      scale = kLog2E;
    }
    // Overwrites, so that nothing behind a row's end can spread.
    std::fill(logits + num_seen, logits + padded, kNone);
    // Two halves of a panel at a time: each waits for its own last result only.
    Floats low = load(logits), high = load(logits + kLanes);
    for (int64_t i = kPanel; i < padded; i += kPanel) {
      low = max(low, load(logits + i));
      high = max(high, load(logits + i + kLanes));
    }
    const float sink = layer.sinks ? layer.sinks[query_head] * kLog2E : kNone;
    const float top = std::max(max_lane(max(low, high)) * scale, sink);
    low = high = Floats{};
    for (int64_t i = 0; i < padded; i += kPanel) {
      const Floats p = exp2(load(logits + i) * scale - top), q = exp2(load(logits + i + kLanes) * scale - top);
      store(logits + i, p);
      store(logits + i + kLanes, q);
      low += p;
      high += q;
    }
    std::fill(logits + num_seen, logits + padded, 0.0f);
    return sum_lanes(low + high) + (layer.sinks ? std::exp2(sink - top) : 0.0f);
  }

  std::vector<const Element*> panels_;
  Buffer<Element> keys_, queries_;
  Buffer<float> logits_;
};

// Scores rows in groups whose partial sums fit kMaxSums.
template <typename T, typename Product>
class RowScorer {
 public:
  // Adds the attention of all rows' queries to the stored scores. No two rows may have blocks in common.
  void score(const Layer& layer, const Step& step, const ScoreRow* row, const ScoreRow* end,
             const Queries& batch) {
    while (row < end) {
      heads_.clear();
      pieces_.clear();
      num_sums_ = 0;
      do add(layer, *row++);
      while (row < end && num_sums_ + sums_of(layer, *row) <= kMaxSums);
      run(layer, step, batch);
    }
  }

  static int64_t sums_of(const Layer& layer, const ScoreRow& row) {
    const int64_t length = segment_queries(row.num_queries);
    return layer.num_kv_heads * ((row.num_queries + length - 1) / length) * whole_panels(row.num_live);
  }

 private:
  struct Head {  // of a row; its pieces follow each other
    const ScoreRow* row;
    int64_t head, first_piece, end_piece;
  };
  struct Piece {
    int64_t owner, begin, end, sums;
  };

  void add(const Layer& layer, const ScoreRow& row) {
    const int64_t length = segment_queries(row.num_queries);
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const int64_t first_piece = pieces_.size(), owner = heads_.size();
      for (int64_t begin = 0; begin < row.num_queries; begin += length) {
        const int64_t end = std::min(begin + length, row.num_queries);
        pieces_.push_back({owner, begin, end, num_sums_});
        num_sums_ += whole_panels(seen_by(row, end - 1));
      }
      heads_.push_back({&row, head, first_piece, int64_t(pieces_.size())});
    }
  }

  void run(const Layer& layer, const Step& step, const Queries& batch) {
    sums_.reserve(num_sums_);
    const int64_t num_heads = heads_.size(), num_pieces = pieces_.size();
#pragma omp parallel
    {
      static thread_local SegmentScorer<T, Product> scorer;
      // Last first: under a causal mask a prompt's last segment is its longest.
#pragma omp for schedule(dynamic)
      for (int64_t i = num_pieces - 1; i >= 0; --i) {
        const Piece& piece = pieces_[i];
        const Head& owner = heads_[piece.owner];
        Queries queries = batch;
        if (owner.row->from_ring) queries = {layer.ring, layer.query_bytes()};
        queries.data += owner.row->first_query * queries.token_bytes;
        scorer.score(layer, *owner.row, queries, owner.head, piece.begin, piece.end, &sums_[piece.sums]);
      }
#pragma omp for schedule(static)
      for (int64_t h = 0; h < num_heads; ++h) store_sums(layer, step, heads_[h]);
    }
  }

  void store_sums(const Layer& layer, const Step& step, const Head& owner) const {
    const ScoreRow& row = *owner.row;
    const int64_t bs = layer.block_size;
    for (int64_t first = step.pinned_tokens; first < row.num_live; first += bs) {
      float* scores = layer.scores(row.blocks[first / bs], owner.head);
      const int64_t count = std::min(bs, row.num_live - first);
      for (int64_t i = 0; i < count; ++i) scores[i] *= float(row.decay);
      for (int64_t p = owner.first_piece; p < owner.end_piece; ++p) {
        const int64_t seen = std::min(count, seen_by(row, pieces_[p].end - 1) - first);
        for (int64_t i = 0; i < seen; ++i) scores[i] += sums_[pieces_[p].sums + first + i];
      }
    }
  }

  std::vector<Head> heads_;
  std::vector<Piece> pieces_;
  Buffer<float> sums_;
  int64_t num_sums_ = 0;
};

// Most bytes that scoring one layer takes: partial sums, and per thread the packed keys and logits.
inline int64_t scratch_bytes(int64_t num_live, int64_t num_kv_heads, int64_t head_size, int64_t threads) {
  const int64_t slots = whole_panels(num_live);
  const int64_t sums = std::max(kMaxSums, num_kv_heads * kMaxSegments * slots);
  return int64_t(sizeof(float)) * (sums + threads * (slots * (head_size + kTileRows) + kTileRows * kLanes));
}

}  // namespace h2o
