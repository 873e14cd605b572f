// The guided loss and its gradients, for CPUs (see teaching.py and teaching_cpu.py):
//
//   A = softmax of q . k * scaling over the query's document so far;  M_j = sum of A over block j
//   w = sum of M;  p = softmax of q . K_j * factor over the blocks to choose from
//   loss = sum over queries of w KL(M / w || p) / sum of w,   whose gradient at a score is w p - M
//
// Threads share heads of keys; sixteen queries of a head are computed side by side, one a lane, so
// that all loops but those over lanes are over keys, blocks and channels. Sums are in fp32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "rows.h"
#include "threads.h"

// What Python hands over; mirrored in teaching_cpu.py. Strides count numbers; channels lie side by
// side.
struct TeachCall {
  int64_t dtype, threads;                         // 0 fp32, 1 bf16, 2 fp16
  int64_t batch, heads, shared;                   // B, H, heads of keys
  int64_t rows, count, width, block, layouts;     // queries, n, D, b, rows of places: 1 or B
  int64_t query_strides[3], key_strides[3], landmarks_strides[3];
  float scaling;
  const void *query, *key, *landmarks;            // [B,H,T,D], [B,shared,T,D], [B,shared,n,D]
  const int64_t* slots;                           // [rows], of the queries, ascending
  const int64_t* starts;                          // [layouts, n], of blocks
  const int64_t *firsts, *first_blocks, *counts;  // [layouts, rows]: key, block, blocks to choose
  const float* factors;                           // [H]
  float* losses;                                  // [B, H], each its share of the mean
  float* query_gradient;                          // [B, rows, H, D]; null if nobody asks for it
  float* landmark_gradient;                       // [B, shared, n, D], zeros; or null
  float* factor_gradient;                         // [B, H]
  void* parallel;                                 // GOMP_parallel, or null
};

namespace {

constexpr float TINY = 1e-20f;  // weights below it are none
constexpr float NONE = -1e30f;  // a logit of what is not there
constexpr int64_t LANES = 16;
using Lanes = float[LANES];

template <class Call> inline void each_lane(Call call) {
#pragma omp simd
  for (int64_t l = 0; l < LANES; ++l) call(l);
}

// Products of `count` rows of channels with the queries [width] of all lanes.
template <int64_t ROWS>
inline void products(const float* rows, const Lanes* query, int64_t width, Lanes* to) {
  Lanes sums[ROWS] = {};
  for (int64_t d = 0; d < width; ++d)
    for (int64_t i = 0; i < ROWS; ++i)
      each_lane([&](int64_t l) { sums[i][l] += rows[i * width + d] * query[d][l]; });
  for (int64_t i = 0; i < ROWS; ++i) each_lane([&](int64_t l) { to[i][l] = sums[i][l]; });
}

inline void products(const float* rows, const Lanes* query, int64_t width, int64_t count,
                     Lanes* to) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) products<4>(rows + i * width, query, width, to + i);
  for (; i < count; ++i) products<1>(rows + i * width, query, width, to + i);
}

// Turns logits into e^(x - their maximum) in every lane, and gives the sums and the maxima.
inline void exponentials(Lanes* x, int64_t count, float* sums, float* highest) {
  each_lane([&](int64_t l) { sums[l] = 0, highest[l] = NONE; });
  for (int64_t i = 0; i < count; ++i)
    each_lane([&](int64_t l) { highest[l] = x[i][l] < highest[l] ? highest[l] : x[i][l]; });
  for (int64_t i = 0; i < count; ++i)
    each_lane([&](int64_t l) { sums[l] += x[i][l] = exponential(x[i][l] - highest[l]); });
}

// What one thread works in, and the sums of one head of queries.
struct Workspace {
  std::vector<float> keys, marks, queries, of_marks, of_query;  // rows of channels
  std::vector<float> query, weights, mass, scores, logits, guess;  // lanes
  double loss, weight, of_factor;

  static Lanes* lanes(std::vector<float>& x, int64_t count) {
    x.resize(count * LANES);
    return reinterpret_cast<Lanes*>(x.data());
  }
};

template <class E> class Teach {
  const TeachCall& c;

  void take_rows(const void* x, const int64_t* strides, int64_t b, int64_t h, int64_t count,
                 std::vector<float>& to) const {
    to.resize(count * c.width);
    const E* from = static_cast<const E*>(x) + b * strides[0] + h * strides[1];
    for (int64_t s = 0; s < count; ++s)
      convert_row<float, E>(from + s * strides[2], &to[s * c.width], c.width);
  }

 public:
  explicit Teach(const TeachCall& call) : c(call) {}

  // Of one head of keys.
  void operator()(int64_t item, int64_t) const {
    const int64_t b = item / c.shared, h = item % c.shared, group = c.heads / c.shared;
    Workspace w;
    take_rows(c.key, c.key_strides, b, h, c.slots[c.rows - 1] + 1, w.keys);
    take_rows(c.landmarks, c.landmarks_strides, b, h, c.count, w.marks);
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      w.of_marks.assign(w.marks.size(), 0.0f);
      w.of_query.assign(c.rows * c.width, 0.0f);
      w.loss = w.weight = w.of_factor = 0;
      for (int64_t r = 0; r < c.rows; r += LANES) teach(b, head, r, w);
      give(b, head, item, w);
    }
  }

 private:
  // The loss and the gradients of a head, from its sums.
  void give(int64_t b, int64_t head, int64_t item, const Workspace& w) const {
    const float share = w.weight <= TINY ? 0.0f : float(1 / (w.weight * c.batch * c.heads));
    c.losses[b * c.heads + head] = float(w.loss) * share;
    c.factor_gradient[b * c.heads + head] = float(w.of_factor) * share;
    const int64_t marks = c.count * c.width;
    if (c.landmark_gradient)
      add_row(share, w.of_marks.data(), c.landmark_gradient + item * marks, marks);
    for (int64_t r = 0; c.query_gradient && r < c.rows; ++r)
      for (int64_t d = 0; d < c.width; ++d)
        c.query_gradient[((b * c.rows + r) * c.heads + head) * c.width + d] =
            w.of_query[r * c.width + d] * share;
  }

  // What the queries of all lanes may read: keys [first, last), blocks [begin, end).
  struct Reach {
    int64_t first[LANES], last[LANES], begin[LANES], end[LANES];
    int64_t low, high, least, most;  // of all lanes
  };

  Reach reach(int64_t b, int64_t r) const {
    Reach found = {};
    found.low = found.least = INT64_MAX;
    for (int64_t l = 0; l < LANES && r + l < c.rows; ++l) {
      const int64_t place = (c.layouts > 1 ? b * c.rows : 0) + r + l;
      if (c.counts[place] == 0) continue;  // it reads nothing
      found.first[l] = c.firsts[place], found.last[l] = c.slots[r + l] + 1;
      found.begin[l] = c.first_blocks[place], found.end[l] = found.begin[l] + c.counts[place];
      found.low = std::min(found.low, found.first[l]);
      found.high = std::max(found.high, found.last[l]);
      found.least = std::min(found.least, found.begin[l]);
      found.most = std::max(found.most, found.end[l]);
    }
    return found;
  }

  // The queries from r on, one a lane: adds to the sums and to the gradients.
  void teach(int64_t b, int64_t head, int64_t r, Workspace& w) const {
    const Reach at = reach(b, r);
    if (at.most == 0) return;
    const int64_t blocks = at.most - at.least, lanes = std::min(LANES, c.rows - r);
    Lanes* query = Workspace::lanes(w.query, c.width);
    take_queries(b, head, r, lanes, w, query);
    Lanes* mass = Workspace::lanes(w.mass, blocks);
    float weight[LANES] = {}, total[LANES], highest[LANES];
    masses(b, at, query, w, mass, weight);
    Lanes* scores = Workspace::lanes(w.scores, blocks);
    Lanes* logits = Workspace::lanes(w.logits, blocks);
    Lanes* guess = Workspace::lanes(w.guess, blocks);
    products(&w.marks[at.least * c.width], query, c.width, blocks, scores);
    const float factor = c.factors[head];
    for (int64_t j = 0; j < blocks; ++j)
      each_lane([&](int64_t l) {
        const bool is_there = at.least + j >= at.begin[l] && at.least + j < at.end[l];
        guess[j][l] = logits[j][l] = is_there ? scores[j][l] * factor : NONE;
      });
    exponentials(guess, blocks, total, highest);
    for (int64_t l = 0; l < lanes; ++l) {
      if (weight[l] <= TINY) continue;  // what is not a number goes on
      const float logarithm = std::log(total[l]);
      w.weight += weight[l];
      for (int64_t j = at.begin[l] - at.least; j < at.end[l] - at.least; ++j) {
        const float predicted = logits[j][l] - highest[l] - logarithm;
        if (!(mass[j][l] <= 0))
          w.loss += mass[j][l] * (std::log(mass[j][l] / weight[l]) - predicted);
      }
    }
    for (int64_t l = 0; l < lanes; ++l)
      for (int64_t j = at.begin[l] - at.least; j < at.end[l] - at.least; ++j) {
        const float gradient = weight[l] * guess[j][l] / total[l] - mass[j][l];
        const int64_t mark = (at.least + j) * c.width;
        w.of_factor += gradient * scores[j][l];
        if (c.query_gradient)
          add_row(gradient * factor, &w.marks[mark], &w.of_query[(r + l) * c.width], c.width);
        if (c.landmark_gradient)
          add_row(gradient * factor, &w.queries[l * c.width], &w.of_marks[mark], c.width);
      }
  }

  void take_queries(int64_t b, int64_t head, int64_t r, int64_t lanes, Workspace& w,
                    Lanes* to) const {
    const int64_t* strides = c.query_strides;
    const E* from = static_cast<const E*>(c.query) + b * strides[0] + head * strides[1];
    w.queries.assign(LANES * c.width, 0.0f);
    for (int64_t l = 0; l < lanes; ++l)
      convert_row<float, E>(from + c.slots[r + l] * strides[2], &w.queries[l * c.width], c.width);
    for (int64_t d = 0; d < c.width; ++d)
      for (int64_t l = 0; l < LANES; ++l) to[d][l] = w.queries[l * c.width + d];
  }

  // The weight of each block to choose from, and their sum.
  void masses(int64_t b, const Reach& at, const Lanes* query, Workspace& w, Lanes* mass,
              float* weight) const {
    const int64_t keys = at.high - at.low;
    Lanes* weights = Workspace::lanes(w.weights, keys);
    products(&w.keys[at.low * c.width], query, c.width, keys, weights);
    for (int64_t i = 0; i < keys; ++i)
      each_lane([&](int64_t l) {
        const bool is_there = at.low + i >= at.first[l] && at.low + i < at.last[l];
        weights[i][l] = is_there ? weights[i][l] * c.scaling : NONE;
      });
    float total[LANES], highest[LANES];
    exponentials(weights, keys, total, highest);
    const int64_t* starts = c.starts + (c.layouts > 1 ? b * c.count : 0);
    for (int64_t j = at.least; j < at.most; ++j) {
      Lanes sum = {};
      const int64_t begin = std::max<int64_t>(0, starts[j] - at.low);
      const int64_t end = std::min(keys, starts[j] + c.block - at.low);
      for (int64_t i = begin; i < end; ++i)
        each_lane([&](int64_t l) { sum[l] += weights[i][l]; });
      each_lane([&](int64_t l) {
        const float own = j >= at.begin[l] && j < at.end[l] ? sum[l] / total[l] : 0.0f;
        weight[l] += mass[j - at.least][l] = own;
      });
    }
  }
};

template <class E> void run(const TeachCall& c) {
  for_each(c.batch * c.shared, c.threads, c.parallel, Teach<E>(c));
}

}  // namespace

extern "C" void teach_run(const TeachCall* c) {
  if (c->dtype == 0) run<float>(*c);
  else if (c->dtype == 1) run<bf16>(*c);
  else run<fp16>(*c);
}
