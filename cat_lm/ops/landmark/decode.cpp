// Attention of the newest tokens to near keys and chosen blocks, for CPUs (see decode.py):
//
//   s_j = q . K_j of the blocks before the near ones;  the top_k highest, of equal ones the first;
//   softmax of q . k * scaling over the near keys and those of the chosen blocks, times v
//
// Three loops follow each other: heads of keys score landmarks, choices choose, queries attend.
// Nothing is read but the landmarks, the near keys and the chosen blocks. Sums are in fp32.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "threads.h"

// What Python hands over; mirrored in decode.py. Strides count numbers; channels lie side by side.
struct DecodeCall {
  int64_t dtype, threads;                         // 0 fp32, 1 bf16, 2 fp16
  int64_t batch, heads, shared, choices;          // B, H, heads of keys, choices a row: shared or 1
  int64_t time, width, past;                      // T, D, the first query's slot
  int64_t block, top_k, local, sink;
  int64_t most, room;                             // of candidates, and of a choice
  int64_t query_strides[3], key_strides[3], value_strides[3], landmarks_strides[3];
  float scaling;
  const void *query, *key, *value, *landmarks;    // [B,H,T,D], [B,shared,S,D] twice, [B,shared,n,D]
  const int64_t* padding;                         // [B], slots of padding that rows begin with
  float* scores;                                  // [B, H, T, most]
  int32_t* places;                                // [B, choices, T, room], -1 behind the last
  void* out;                                      // [B, H, T, D]
  void* parallel;                                 // GOMP_parallel, or null
};

namespace {

// Turns numbers into e^(x - their maximum) and gives the sum of these.
inline float exponentials(float* x, int64_t count) {
  float highest = x[0], sum = 0;
  for (int64_t i = 1; i < count; ++i) highest = std::max(highest, x[i]);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] = exponential(x[i] - highest);
  return sum;
}

template <class E> inline float dot(const float* x, const E* y, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] * convert<float, E>(y[i]);
  return sum;
}

// to += factor * from.
template <class E> inline void add_row(float factor, const E* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += factor * convert<float, E>(from[i]);
}

template <class E> class Decode {
  const DecodeCall& c;
  const int64_t group = c.heads / c.shared;  // heads of queries that share keys

  static const E* row(const void* x, const int64_t* strides, int64_t b, int64_t h, int64_t s) {
    return static_cast<const E*>(x) + b * strides[0] + h * strides[1] + s * strides[2];
  }
  const E* key(int64_t b, int64_t h, int64_t s) const { return row(c.key, c.key_strides, b, h, s); }
  const E* value(int64_t b, int64_t h, int64_t s) const {
    return row(c.value, c.value_strides, b, h, s);
  }
  void take_query(int64_t b, int64_t head, int64_t t, float* to) const {
    convert_row<float, E>(row(c.query, c.query_strides, b, head, t), to, c.width);
  }
  float* scores(int64_t b, int64_t head, int64_t t) const {
    return c.scores + ((b * c.heads + head) * c.time + t) * c.most;
  }
  int32_t* places(int64_t b, int64_t choice, int64_t t) const {
    return c.places + ((b * c.choices + choice) * c.time + t) * c.room;
  }
  E* out(int64_t b, int64_t head, int64_t t) const {
    return static_cast<E*>(c.out) + ((b * c.heads + head) * c.time + t) * c.width;
  }
  // Blocks before those near the query at slot past + t; none where that is padding.
  int64_t candidates(int64_t b, int64_t t) const {
    const int64_t position = c.past + t - c.padding[b];
    return position < 0 ? 0 : std::max<int64_t>(0, position / c.block - c.local + 1);
  }
  bool takes_all(int64_t count) const { return count - (c.sink && count) <= c.top_k; }
  bool wants_scores(int64_t count) const { return c.top_k > 0 && !takes_all(count); }

 public:
  explicit Decode(const DecodeCall& call) : c(call) {}

  // Of one head of keys: the landmarks pass once, whatever the number of queries.
  void score(int64_t item) const {
    const int64_t b = item / c.shared, h = item % c.shared, queries = group * c.time;
    std::vector<float> query(queries * c.width);
    std::vector<float*> to(queries);
    std::vector<int64_t> wanted(queries);
    int64_t last = 0;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t head = h * group + i / c.time, t = i % c.time, count = candidates(b, t);
      take_query(b, head, t, &query[i * c.width]);
      to[i] = scores(b, head, t);
      wanted[i] = wants_scores(count) ? count : 0;
      last = std::max(last, wanted[i]);
    }
    for (int64_t j = 0; j < last; ++j) {
      const E* landmark = row(c.landmarks, c.landmarks_strides, b, h, j);
      for (int64_t i = 0; i < queries; ++i)
        if (j < wanted[i]) to[i][j] = dot(&query[i * c.width], landmark, c.width);
    }
  }

  // Of one choice of one query: the places of its blocks, ascending.
  void choose(int64_t item) const {
    const int64_t b = item / (c.choices * c.time), choice = item / c.time % c.choices;
    const int64_t t = item % c.time, count = candidates(b, t), first = c.sink && count ? 1 : 0;
    int32_t* place = places(b, choice, t);
    std::fill(place, place + c.room, -1);
    if (takes_all(count)) {
      for (int64_t j = 0; j < count; ++j) place[j] = int32_t(j);
      return;
    }
    if (first) *place++ = 0;
    if (c.top_k == 0) return;
    std::vector<float> sums;
    const float* score = shares(b, choice, t, first, count, sums);
    std::vector<int32_t> heap;
    heap.reserve(c.top_k);
    // On top is what goes first: the lowest, of equal ones the last.
    const auto better = [score](int32_t x, int32_t y) {
      return score[x] > score[y] || (score[x] == score[y] && x < y);
    };
    for (int64_t j = first; j < count; ++j) {
      if (int64_t(heap.size()) < c.top_k) {
        heap.push_back(int32_t(j));
        std::push_heap(heap.begin(), heap.end(), better);
      } else if (score[j] > score[heap.front()]) {
        std::pop_heap(heap.begin(), heap.end(), better);
        heap.back() = int32_t(j);
        std::push_heap(heap.begin(), heap.end(), better);
      }
    }
    std::sort(heap.begin(), heap.end());
    std::copy(heap.begin(), heap.end(), place);
  }

  // Of one head of keys and one query: what its heads of queries read of near and chosen keys.
  void attend(int64_t item) const {
    const int64_t b = item / (c.shared * c.time), h = item / c.time % c.shared, t = item % c.time;
    const int64_t slot = c.past + t, pad = c.padding[b];
    const int32_t* place = places(b, c.choices > 1 ? h : 0, t);
    int64_t chosen = 0;
    while (chosen < c.room && place[chosen] >= 0) ++chosen;
    // Padding sees itself.
    const int64_t near = pad > slot ? slot : pad + candidates(b, t) * c.block;
    const int64_t keys = chosen * c.block + slot + 1 - near;
    // Calls read(key, its slot) for every key that is read, those of chosen blocks first.
    const auto each = [&](auto read) {
      for (int64_t i = 0; i < chosen; ++i)
        for (int64_t j = 0; j < c.block; ++j)
          read(i * c.block + j, pad + place[i] * c.block + j);
      for (int64_t s = near; s <= slot; ++s) read(chosen * c.block + s - near, s);
    };
    std::vector<float> query(c.width), weights(keys), sum(c.width);
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      take_query(b, head, t, query.data());
      each([&](int64_t i, int64_t s) {
        weights[i] = dot(query.data(), key(b, h, s), c.width) * c.scaling;
      });
      const float total = exponentials(weights.data(), keys);
      std::fill(sum.begin(), sum.end(), 0.0f);
      each([&](int64_t i, int64_t s) { add_row(weights[i], value(b, h, s), sum.data(), c.width); });
      for (float& x : sum) x /= total;
      convert_row<E, float>(sum.data(), out(b, head, t), c.width);
    }
  }

 private:
  // The scores of a choice: its head's own, or the sum of its heads' shares, from `first` on.
  const float* shares(int64_t b, int64_t choice, int64_t t, int64_t first, int64_t count,
                      std::vector<float>& sums) const {
    const int64_t together = c.heads / c.choices;
    if (together == 1) return scores(b, choice, t);
    sums.assign(count, 0.0f);
    std::vector<float> own(count);
    for (int64_t head = choice * together; head < (choice + 1) * together; ++head) {
      const float* score = scores(b, head, t);
      std::copy(score + first, score + count, own.begin() + first);
      const float total = exponentials(own.data() + first, count - first);
      for (int64_t j = first; j < count; ++j) sums[j] += own[j] / total;
    }
    return sums.data();
  }
};

template <class E> void run(const DecodeCall& c) {
  const Decode<E> decode(c);
  const auto loop = [&](int64_t items, void (Decode<E>::*work)(int64_t) const) {
    for_each(items, c.threads, c.parallel, [&](int64_t item, int64_t) { (decode.*work)(item); });
  };
  if (c.most > 0) {
    loop(c.batch * c.shared, &Decode<E>::score);
    loop(c.batch * c.choices * c.time, &Decode<E>::choose);
  }
  loop(c.batch * c.shared * c.time, &Decode<E>::attend);
}

}  // namespace

extern "C" void decode_run(const DecodeCall* c) {
  if (c->dtype == 0) run<float>(*c);
  else if (c->dtype == 1) run<bf16>(*c);
  else run<fp16>(*c);
}
