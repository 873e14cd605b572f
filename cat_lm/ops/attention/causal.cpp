// Causal softmax attention for training on CPUs (see causal_cpu.py): with P = softmax(scale q k^T),
//
//   forward   out = P v, and the logarithm of each row's sum of exponentials
//   backward  dV = P^T dO,  dS = P * (dO v^T - rowsum(dO * out)),  dQ = scale dS k,  dK = scale dS^T q
//
// An item is a head of a row of the batch. It converts its keys and values once, and transposes them
// where a product needs that, so that all products are of one form: rows of the result, in registers,
// gather rows of the right factor whose numbers lie side by side in memory. Factors are fp32, or bf16
// where the processor multiplies pairs of them; sums are in fp32. Tiles above the diagonal are never
// computed.

#include <algorithm>
#include <cmath>
#include <cstdint>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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
constexpr int64_t COLUMNS = 2 * LANES;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// How factors of a product lie in memory: as units of SIZE numbers that follow each other in the
// sum's direction. A matrix of factors is "natural" if its own rows run in that direction, and
// "interleaved" if its columns do: SIZE rows are then one row of units.
template <class E> struct Single {
  using Unit = float;
  static constexpr int64_t SIZE = 1;

  static void read(const E* from, Unit* to, int64_t count) { convert_row(from, to, count); }
  static const Unit* interleave(const Unit* natural, Unit*, int64_t, int64_t) { return natural; }
  static const Unit* pack(const float* from, Unit*, int64_t) { return from; }
  static const Unit* interleave(const float* from, Unit*, int64_t) { return from; }
  static Vector add(Vector sums, Unit factor, const Unit* others) {
    return sums + factor * load(others);
  }
};

#ifdef __AVX512BF16__
// Pairs of bf16, which the processor multiplies and adds in fp32 at twice the rate.
struct Pairs {
  using Unit = uint32_t;
  static constexpr int64_t SIZE = 2;

  static void read(const bf16* from, Unit* to, int64_t count) {
    std::memcpy(to, from, count * sizeof(bf16));
  }
  static const Unit* interleave(const Unit* natural, Unit* to, int64_t rows, int64_t width) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(natural);
    for (int64_t i = 0; i < rows; i += 2, from += 2 * width)
      for (int64_t d = 0; d < width; ++d) *to++ = from[d] | uint32_t(from[width + d]) << 16;
    return to - rows / 2 * width;
  }
  static const Unit* pack(const float* from, Unit* to, int64_t count) {
    bf16* numbers = reinterpret_cast<bf16*>(to);
    for (int64_t i = 0; i < count; ++i) numbers[i] = convert<bf16, float>(from[i]);
    return to;
  }
  static const Unit* interleave(const float* from, Unit* to, int64_t width) {
    for (int64_t i = 0; i < width; i += 2, from += 2 * width)
      for (int64_t j = 0; j < width; ++j)
        *to++ = convert<bf16, float>(from[j]).bits
                | uint32_t(convert<bf16, float>(from[width + j]).bits) << 16;
    return to - width / 2 * width;
  }
  static Vector add(Vector sums, Unit factor, const Unit* others) {
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(factor)),
                                    (__m512bh)_mm512_loadu_si512(others));
  }
};
#endif

// result[ROWS, COLUMNS] = (ADD ? result : 0) + sum_k left[row, k] right[k, :], over `depth` units.
template <class F, bool ADD>
inline void multiply_block(const typename F::Unit* left, int64_t row, int64_t column,
                           const typename F::Unit* right, int64_t right_row, int64_t depth,
                           float* result, int64_t result_row) {
  Vector sums[ROWS][2];
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < 2; ++j)
      sums[i][j] = ADD ? load(result + i * result_row + j * LANES) : Vector{};
  for (int64_t k = 0; k < depth; ++k, right += right_row)
    for (int64_t i = 0; i < ROWS; ++i) {
      const auto factor = left[i * row + k * column];
      sums[i][0] = F::add(sums[i][0], factor, right);
      sums[i][1] = F::add(sums[i][1], factor, right + LANES);
    }
  for (int64_t i = 0; i < ROWS; ++i)
    for (int64_t j = 0; j < 2; ++j) store(result + i * result_row + j * LANES, sums[i][j]);
}

// The same for a tile of rows, and of columns a multiple of COLUMNS.
template <class F, bool ADD>
void multiply(const typename F::Unit* left, int64_t row, int64_t column,
              const typename F::Unit* right, int64_t width, int64_t depth, float* result) {
  for (int64_t j = 0; j < width; j += COLUMNS)
    for (int64_t i = 0; i < TILE; i += ROWS)
      multiply_block<F, ADD>(left + i * row, row, column, right + j, width, depth,
                             result + i * width + j, width);
}

// Sizes of an item, and its buffers; rows and channels are padded by zeros to whole tiles.
struct Sizes {
  int64_t time, width, matrix, tile;

  explicit Sizes(const AttentionCall& c)
      : time(padded(c.time, TILE)), width(padded(c.width, COLUMNS)), matrix(time * width),
        tile(TILE * width) {}

  // Those of a thread.
  int64_t numbers(bool backward) const {
    const int64_t scores = TILE * TILE;
    return backward ? 6 * matrix + 4 * tile + 4 * scores : 4 * matrix + 2 * tile + 2 * scores;
  }
};

template <class E, class F> class Item {
  using Unit = typename F::Unit;
  const AttentionCall& c;
  const Sizes& size;
  const int64_t batch, head, units;  // of a natural row
  float *scratch, *log_sums;

  template <class T = float> T* take(int64_t numbers) {
    T* taken = reinterpret_cast<T*>(scratch);
    scratch += numbers;
    return taken;
  }

  template <class T> T* row(T* x, const int64_t* strides, int64_t t) const {
    return x + batch * strides[0] + head * strides[1] + t * strides[2];
  }

  // Reads rows of a tensor, with zeros beyond its ends.
  void read(const void* x, const int64_t* strides, int64_t first, int64_t rows, Unit* to) const {
    std::fill_n(to, rows * units, Unit{});
    for (int64_t t = first; t < std::min(first + rows, c.time); ++t, to += units)
      F::read(row(static_cast<const E*>(x), strides, t), to, c.width);
  }

  void write(const float* from, void* x, const int64_t* strides, int64_t first, int64_t rows,
             float scale) const {
    for (int64_t t = first; t < std::min(first + rows, c.time); ++t, from += size.width) {
      E* to = row(static_cast<E*>(x), strides, t);
      for (int64_t i = 0; i < c.width; ++i) to[i] = convert<E, float>(from[i] * scale);
    }
  }

  Unit* read_all(const void* x, const int64_t* strides) {
    Unit* to = take<Unit>(size.time * units);
    read(x, strides, 0, size.time, to);
    return to;
  }

  const Unit* interleaved(const Unit* natural) {
    Unit* room = F::SIZE > 1 ? take<Unit>(size.time * units) : nullptr;
    return F::interleave(natural, room, size.time, size.width);
  }

  // Each tile of a natural matrix as [units, TILE].
  const Unit* transposed(const Unit* natural) {
    Unit* to = take<Unit>(size.time * units);
    for (int64_t first = 0; first < size.time; first += LANES)
      for (int64_t i = 0; i < units; ++i)
        for (int64_t t = first; t < first + LANES; ++t)
          to[(t / TILE * units + i) * TILE + t % TILE] = natural[t * units + i];
    return to;
  }

  // to[TILE, TILE] = left[TILE, D] times a transposed tile.
  void multiply_tile(const Unit* left, const Unit* right, float* to) const {
    multiply<F, false>(left, units, 1, right, TILE, units, to);
  }

  // to[TILE, D] += left[TILE, TILE] right[TILE, D]; the left factor by its strides.
  void add_product(const Unit* left, int64_t row, int64_t column, const Unit* right,
                   float* to) const {
    multiply<F, true>(left, row, column, right, size.width, TILE / F::SIZE, to);
  }

  // Scores of a tile; those of later keys than the query's are -infinity.
  void score(const Unit* queries, const Unit* keys, int64_t offset, float* to) const {
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

  // dO . out of a query, which is what the softmax subtracts from its gradient.
  float shift(int64_t t) const {
    const E* d_out = row(static_cast<const E*>(c.d_out), c.d_out_strides, t);
    const E* out = row(static_cast<const E*>(c.out), c.out_strides, t);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < c.width; ++d)
      sum += convert<float, E>(d_out[d]) * convert<float, E>(out[d]);
    return sum;
  }

 public:
  Item(const AttentionCall& call, const Sizes& sizes, int64_t item, float* buffer)
      : c(call), size(sizes), batch(item / c.heads), head(item % c.heads),
        units(sizes.width / F::SIZE), scratch(buffer), log_sums(c.log_sums + item * c.time) {}

  void forward() {
    const Unit* keys = transposed(read_all(c.key, c.key_strides));
    const Unit* values = interleaved(read_all(c.value, c.value_strides));
    Unit *queries = take<Unit>(size.tile), *packed = take<Unit>(TILE * TILE);
    float *sums = take(size.tile), *scores = take(TILE * TILE);
    for (int64_t first = 0; first < c.time; first += TILE) {
      float highest[TILE], total[TILE];
      std::fill_n(highest, TILE, -INFINITY);
      std::fill_n(total, TILE, 0.0f);
      std::fill_n(sums, size.tile, 0.0f);
      read(c.query, c.query_strides, first, TILE, queries);
      for (int64_t key = 0; key <= first; key += TILE) {
        score(queries, keys + key * units, first - key, scores);
        for (int64_t i = 0; i < TILE; ++i)
          exponentiate(scores + i * TILE, highest[i], total[i], sums + i * size.width);
        const Unit* weights = F::pack(scores, packed, TILE * TILE);
        add_product(weights, TILE / F::SIZE, 1, values + key * units, sums);
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
    const Unit* rows = read_all(c.key, c.key_strides);
    const Unit *keys = interleaved(rows), *transposed_keys = transposed(rows);
    const Unit* transposed_values = transposed(read_all(c.value, c.value_strides));
    float *d_keys = take(size.matrix), *d_values = take(size.matrix), *d_queries = take(size.tile);
    Unit *queries = take<Unit>(size.tile), *d_out = take<Unit>(size.tile);
    Unit* turned = take<Unit>(size.tile);
    float *scores = take(TILE * TILE), *slopes = take(TILE * TILE);
    Unit* packed = take<Unit>(TILE * TILE);
    std::fill_n(d_keys, size.matrix, 0.0f);
    std::fill_n(d_values, size.matrix, 0.0f);
    for (int64_t first = 0; first < c.time; first += TILE) {
      float sums[TILE] = {}, shifts[TILE] = {};
      std::copy_n(log_sums + first, std::min(TILE, c.time - first), sums);
      for (int64_t i = 0; i < std::min(TILE, c.time - first); ++i) shifts[i] = shift(first + i);
      read(c.query, c.query_strides, first, TILE, queries);
      read(c.d_out, c.d_out_strides, first, TILE, d_out);
      const Unit* outs = F::interleave(d_out, turned, TILE, size.width);
      const Unit* asked = F::interleave(queries, turned + size.tile / 2, TILE, size.width);
      std::fill_n(d_queries, size.tile, 0.0f);
      for (int64_t key = 0; key <= first; key += TILE) {
        const int64_t at = key * size.width, unit = key * units;
        score(queries, transposed_keys + unit, first - key, scores);
        multiply_tile(d_out, transposed_values + unit, slopes);
        differentiate(scores, slopes, sums, shifts);
        add_product(F::interleave(scores, packed, TILE), 1, TILE, outs, d_values + at);
        add_product(F::interleave(slopes, packed, TILE), 1, TILE, asked, d_keys + at);
        const Unit* weights = F::pack(slopes, packed, TILE * TILE);
        add_product(weights, TILE / F::SIZE, 1, keys + unit, d_queries);
      }
      write(d_queries, c.d_query, c.d_query_strides, first, TILE, c.scale);
    }
    write(d_keys, c.d_key, c.d_key_strides, 0, size.time, c.scale);
    write(d_values, c.d_value, c.d_value_strides, 0, size.time, 1);
  }
};

template <class E, class F> void run(const AttentionCall& c) {
  const Sizes size(c);
  for_each(c.batch * c.heads, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    Item<E, F> work(c, size, item, c.workspace + thread * size.numbers(c.d_out));
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
#ifdef __AVX512BF16__
  using Factors = Pairs;
#else
  using Factors = Single<bf16>;
#endif
  if (c->dtype == 0) run<float, Single<float>>(*c);
  else if (c->dtype == 1) run<bf16, Factors>(*c);
  else run<fp16, Single<fp16>>(*c);
}
