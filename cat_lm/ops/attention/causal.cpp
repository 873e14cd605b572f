// Causal softmax attention for training on CPUs (see causal_cpu.py): with P = softmax(scale q k^T),
//
//   forward   out = P v, and the logarithm of each row's sum of exponentials
//   backward  dV = P^T dO,  dS = P * (dO v^T - rowsum(dO * out)),  dQ = scale dS k,  dK = scale dS^T q
//
// An item is a head of a row of the batch. It converts its keys and values to fp32 once, and
// transposes them where a product needs that, so that all products are of one form: rows of the
// result, in registers, gather rows of the right factor whose numbers lie side by side in memory.
// Tiles above the diagonal are never computed.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "threads.h"

// What Python hands over; mirrored in causal_cpu.py. Strides count numbers; channels lie side by side.
struct AttentionCall {
  int64_t dtype, threads;                       // 0 fp32, 1 bf16, 2 fp16
  int64_t batch, heads, time, width;            // B, H, T, D
  int64_t query_strides[3], key_strides[3], value_strides[3], out_strides[3], d_out_strides[3];
  int64_t d_query_strides[3], d_key_strides[3], d_value_strides[3];
  float scale;
  const void *query, *key, *value;              // [B, H, T, D]
  void* out;                                    // [B, H, T, D]
  const void* d_out;                            // [B, H, T, D], or null for the forward pass
  void *d_query, *d_key, *d_value;              // [B, H, T, D]
  float *log_sums, *workspace;                  // [B, H, T]
  void* parallel;                               // GOMP_parallel, or null
};

namespace {

constexpr int64_t TILE = 64;    // queries and keys of a tile: its scores fit the first-level cache
constexpr int64_t LANES = 16;
constexpr int64_t ROWS = 8;     // of a result in registers, by twice LANES columns
constexpr int64_t NUMBERS = 2 * LANES;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// result[ROWS, NUMBERS] = (ADD ? result : 0) + sum_k left[row, k] right[k, :].
template <bool ADD>
inline void multiply_block(const float* left, int64_t row, int64_t column, const float* right,
                           int64_t right_row, int64_t depth, float* result, int64_t result_row) {
  Vector sums[ROWS][2];
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < 2; ++j)
      sums[i][j] = ADD ? load(result + i * result_row + j * LANES) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector first = load(right + k * right_row), second = load(right + k * right_row + LANES);
    for (int64_t i = 0; i < ROWS; ++i) {
      const float factor = left[i * row + k * column];
      sums[i][0] += factor * first;
      sums[i][1] += factor * second;
    }
  }
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < 2; ++j) store(result + i * result_row + j * LANES, sums[i][j]);
}

// The same for whole matrices; `rows` are a multiple of ROWS, and `columns` of NUMBERS.
template <bool ADD>
void multiply(const float* left, int64_t row, int64_t column, const float* right, int64_t right_row,
              float* result, int64_t result_row, int64_t rows, int64_t columns, int64_t depth) {
  for (int64_t j = 0; j < columns; j += NUMBERS)
    for (int64_t i = 0; i < rows; i += ROWS)
      multiply_block<ADD>(left + i * row, row, column, right + j, right_row, depth,
                          result + i * result_row + j, result_row);
}

// Sizes of an item, and its buffers; rows and channels are padded by zeros to whole tiles.
struct Sizes {
  int64_t time, width, matrix, tile;

  explicit Sizes(const AttentionCall& c)
      : time(padded(c.time, TILE)), width(padded(c.width, NUMBERS)), matrix(time * width),
        tile(TILE * width) {}

  // Those of a thread.
  int64_t numbers(bool backward) const {
    const int64_t scores = TILE * TILE;
    return backward ? 5 * matrix + 4 * tile + 2 * scores : 2 * matrix + 2 * tile + scores;
  }
};

template <class E> class Item {
  const AttentionCall& c;
  const Sizes& size;
  const int64_t batch, head;
  float *scratch, *log_sums;

  float* take(int64_t numbers) {
    float* taken = scratch;
    scratch += numbers;
    return taken;
  }

  template <class F> F* row(F* x, const int64_t* strides, int64_t t) const {
    return x + batch * strides[0] + head * strides[1] + t * strides[2];
  }

  // Converts rows of a tensor, with zeros beyond its ends.
  void read(const void* x, const int64_t* strides, int64_t first, int64_t rows, float* to) const {
    for (int64_t t = first; t < first + rows; ++t, to += size.width) {
      const int64_t channels = t < c.time ? c.width : 0;
      convert_row(row(static_cast<const E*>(x), strides, t), to, channels);
      std::fill(to + channels, to + size.width, 0.0f);
    }
  }

  void write(const float* from, void* x, const int64_t* strides, int64_t first, int64_t rows,
             float scale) const {
    for (int64_t t = first; t < std::min(first + rows, c.time); ++t, from += size.width) {
      E* to = row(static_cast<E*>(x), strides, t);
      for (int64_t i = 0; i < c.width; ++i) to[i] = convert<E, float>(from[i] * scale);
    }
  }

  // Reads a tensor and transposes each of its tiles to [D, TILE]; `rows` [T, D] keeps it as it was.
  float* read_transposed(const void* x, const int64_t* strides, float* rows) {
    float* to = take(size.matrix);
    read(x, strides, 0, size.time, rows);
    for (int64_t first = 0; first < size.time; first += LANES)
      for (int64_t i = 0; i < size.width; ++i)
        for (int64_t t = first; t < first + LANES; ++t)
          to[t / TILE * size.tile + i * TILE + t % TILE] = rows[t * size.width + i];
    return to;
  }

  // to[TILE, TILE] = left[TILE, D] times a transposed tile.
  void multiply_tile(const float* left, const float* right, float* to) const {
    multiply<false>(left, size.width, 1, right, TILE, to, TILE, TILE, TILE, size.width);
  }

  // to[TILE, D] += left[TILE, TILE] right[TILE, D]; the left factor by its strides.
  void add_product(const float* left, int64_t row, int64_t column, const float* right,
                   float* to) const {
    multiply<true>(left, row, column, right, size.width, to, size.width, TILE, size.width, TILE);
  }

  // Scores of a tile; those of later keys than the query's are -infinity.
  void score(const float* queries, const float* keys, int64_t offset, float* to) const {
    multiply_tile(queries, keys, to);
    for (int64_t i = 0; i < TILE; ++i, to += TILE) {
      for (int64_t j = 0; j < TILE; ++j) to[j] *= c.scale;
      for (int64_t j = offset + i + 1; j < TILE; ++j) to[j] = -INFINITY;
    }
  }

  // Makes exponentials of a row's scores, relative to the highest so far; scales earlier sums to it.
  void exponentiate(float* scores, float& highest, float& total, float* sums) const {
    float now = highest, sum = 0;
#pragma omp simd reduction(max : now)
    for (int64_t j = 0; j < TILE; ++j) now = scores[j] > now ? scores[j] : now;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < TILE; ++j) sum += scores[j] = exponential(scores[j] - now);
    const float factor = exponential(highest - now);
    if (factor != 1)
      for (int64_t i = 0; i < size.width; ++i) sums[i] *= factor;
    total = total * factor + sum;
    highest = now;
  }

  // scores <- P, slopes <- dS; `sums` and `shifts` belong to the tile's queries.
  void differentiate(float* scores, float* slopes, const float* sums, const float* shifts) const {
    for (int64_t i = 0; i < TILE; ++i, scores += TILE, slopes += TILE)
#pragma omp simd
      for (int64_t j = 0; j < TILE; ++j) {
        scores[j] = exponential(scores[j] - sums[i]);
        slopes[j] = scores[j] * (slopes[j] - shifts[i]);
      }
  }

 public:
  Item(const AttentionCall& call, const Sizes& sizes, int64_t item, float* buffer)
      : c(call), size(sizes), batch(item / c.heads), head(item % c.heads), scratch(buffer),
        log_sums(c.log_sums + item * c.time) {}

  void forward() {
    float *values = take(size.matrix), *keys = read_transposed(c.key, c.key_strides, values);
    float *queries = take(size.tile), *sums = take(size.tile), *scores = take(TILE * TILE);
    read(c.value, c.value_strides, 0, size.time, values);
    for (int64_t first = 0; first < c.time; first += TILE) {
      float highest[TILE], total[TILE];
      std::fill_n(highest, TILE, -INFINITY);
      std::fill_n(total, TILE, 0.0f);
      std::fill_n(sums, size.tile, 0.0f);
      read(c.query, c.query_strides, first, TILE, queries);
      for (int64_t key = 0; key <= first; key += TILE) {
        score(queries, keys + key * size.width, first - key, scores);
        for (int64_t i = 0; i < TILE; ++i)
          exponentiate(scores + i * TILE, highest[i], total[i], sums + i * size.width);
        add_product(scores, TILE, 1, values + key * size.width, sums);
      }
      for (int64_t i = 0; i < TILE; ++i) {
        const float factor = 1 / total[i];
        for (int64_t d = 0; d < size.width; ++d) sums[i * size.width + d] *= factor;
        if (first + i < c.time) log_sums[first + i] = highest[i] + std::log(total[i]);
      }
      write(sums, c.out, c.out_strides, first, TILE, 1);
    }
  }

  void backward() {
    float *keys = take(size.matrix), *d_keys = take(size.matrix), *d_values = take(size.matrix);
    const float* transposed_keys = read_transposed(c.key, c.key_strides, keys);
    const float* transposed_values = read_transposed(c.value, c.value_strides, d_values);
    float *queries = take(size.tile), *d_queries = take(size.tile), *d_out = take(size.tile);
    float *out = take(size.tile), *scores = take(TILE * TILE), *slopes = take(TILE * TILE);
    std::fill_n(d_keys, size.matrix, 0.0f);
    std::fill_n(d_values, size.matrix, 0.0f);
    for (int64_t first = 0; first < c.time; first += TILE) {
      read(c.query, c.query_strides, first, TILE, queries);
      read(c.d_out, c.d_out_strides, first, TILE, d_out);
      read(c.out, c.out_strides, first, TILE, out);
      std::fill_n(d_queries, size.tile, 0.0f);
      float sums[TILE] = {}, shifts[TILE];
      std::copy_n(log_sums + first, std::min(TILE, c.time - first), sums);
      for (int64_t i = 0; i < TILE; ++i) {
        float shift = 0;
#pragma omp simd reduction(+ : shift)
        for (int64_t d = 0; d < size.width; ++d)
          shift += d_out[i * size.width + d] * out[i * size.width + d];
        shifts[i] = shift;
      }
      for (int64_t key = 0; key <= first; key += TILE) {
        const int64_t at = key * size.width;
        score(queries, transposed_keys + at, first - key, scores);
        multiply_tile(d_out, transposed_values + at, slopes);
        differentiate(scores, slopes, sums, shifts);
        add_product(scores, 1, TILE, d_out, d_values + at);
        add_product(slopes, 1, TILE, queries, d_keys + at);
        add_product(slopes, TILE, 1, keys + at, d_queries);
      }
      write(d_queries, c.d_query, c.d_query_strides, first, TILE, c.scale);
    }
    write(d_keys, c.d_key, c.d_key_strides, 0, size.time, c.scale);
    write(d_values, c.d_value, c.d_value_strides, 0, size.time, 1);
  }
};

template <class E> void run(const AttentionCall& c) {
  const Sizes size(c);
  for_each(c.batch * c.heads, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    Item<E> work(c, size, item, c.workspace + thread * size.numbers(c.d_out));
    if (c.d_out) work.backward();
    else work.forward();
  });
}

}  // namespace

// Bytes that all threads need.
extern "C" int64_t causal_attention_workspace(const AttentionCall* c) {
  return c->threads * Sizes(*c).numbers(c->d_out) * sizeof(float);
}

extern "C" void causal_attention_run(const AttentionCall* c) {
  if (c->dtype == 0) run<float>(*c);
  else if (c->dtype == 1) run<bf16>(*c);
  else run<fp16>(*c);
}
