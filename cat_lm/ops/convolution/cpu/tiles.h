// The loops in registers: sums of taps, and of products at each lag, over rows in fast memory.
#pragma once

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <class T> struct Simd {
  typedef T Vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
  static constexpr int LANES = VECTOR_BYTES / sizeof(T);
  static Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }
  static void store(T* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
};

// A buffer of rows of `width` numbers, a multiple of the vector's, `stride` numbers apart.
template <class T> struct Rows {
  T* data;
  int64_t stride, width;
  T* operator[](int64_t row) const { return data + row * stride; }
};

// R rows of V vectors: out[r] = start + sum_{j < taps} F[j] in[row + r + STEP * j].
template <class T, int V, int R, int STEP, bool PER_CHANNEL>
inline void tile(Rows<T> in, int64_t row, Rows<T> filter, int64_t taps, const T* start,
                 Rows<T> out, int64_t out_row, int64_t at) {
  using S = Simd<T>;
  typename S::Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = S::load(start + at + v * S::LANES);
  const T* input = in[row] + at;
  const T* tap = PER_CHANNEL ? filter.data + at : filter.data;
  for (int64_t j = 0; j < taps; ++j) {
    typename S::Vec f[V];
    for (int v = 0; v < V; ++v) {
      if (PER_CHANNEL) f[v] = S::load(tap + v * S::LANES);
      else f[v] = typename S::Vec{} + *tap;
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sum[r][v] += f[v] * S::load(input + r * in.stride + v * S::LANES);
    input += STEP * in.stride;
    tap += filter.stride;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) S::store(out[out_row + r] + at + v * S::LANES, sum[r][v]);
}

// One block of V vectors at channel `at`; limits[t], if given, are the taps of each row.
template <class T, int V, int R, int STEP, bool PER_CHANNEL>
void block_of_tiles(Rows<T> in, int64_t row, Rows<T> filter, int64_t window, const T* start,
                    Rows<T> out, int64_t count, const int32_t* limits, int64_t at) {
  int64_t t = 0;
  while (t < count) {
    bool whole = t + R <= count;
    for (int r = 0; whole && limits && r < R; ++r) whole = limits[t + r] >= window;
    if (whole) {
      tile<T, V, R, STEP, PER_CHANNEL>(in, row + t, filter, window, start, out, t, at);
      t += R;
    } else {
      const int64_t taps = limits ? limits[t] : window;
      tile<T, V, 1, STEP, PER_CHANNEL>(in, row + t, filter, taps, start, out, t, at);
      t += 1;
    }
  }
}

template <class T, int STEP, bool PER_CHANNEL>
void convolve_block(Rows<T> in, int64_t row, Rows<T> filter, int64_t window, const T* start,
                    Rows<T> out, int64_t count, const int32_t* limits) {
  constexpr int LANES = Simd<T>::LANES;
  int64_t at = 0;
  for (; VECTOR_BYTES == 64 && at + 4 * LANES <= in.stride; at += 4 * LANES)
    block_of_tiles<T, 4, 4, STEP, PER_CHANNEL>(in, row, filter, window, start, out, count, limits, at);
  for (; at + 2 * LANES <= in.stride; at += 2 * LANES)
    block_of_tiles<T, 2, 4, STEP, PER_CHANNEL>(in, row, filter, window, start, out, count, limits, at);
  for (; at < in.stride; at += LANES)
    block_of_tiles<T, 1, 8, STEP, PER_CHANNEL>(in, row, filter, window, start, out, count, limits, at);
}

// sums[j] += sum_{t in [first, last)} dy[t] x[row + t - j] for J lags, V vectors.
template <class T, int J, int V>
inline void correlate_lags(Rows<T> dy, Rows<T> x, int64_t row, int64_t first, int64_t last,
                           Rows<T> sums, int64_t lag, int64_t at) {
  using S = Simd<T>;
  typename S::Vec sum[J][V] = {};
  const T* input = x[row + first - lag] + at;
  for (int64_t t = first; t < last; ++t, input += x.stride)
    for (int v = 0; v < V; ++v) {
      const typename S::Vec d = S::load(dy[t] + at + v * S::LANES);
      for (int j = 0; j < J; ++j)
        sum[j][v] += d * S::load(input - j * x.stride + v * S::LANES);
    }
  for (int j = 0; j < J; ++j)
    for (int v = 0; v < V; ++v) {
      T* to = sums[lag + j] + at + v * S::LANES;
      S::store(to, S::load(to) + sum[j][v]);
    }
}

constexpr int LAGS = 12;  // sums in registers, next to one row of dy

template <class T, int J = LAGS>
inline void correlate_group(int64_t lags, Rows<T> dy, Rows<T> x, int64_t row, int64_t first,
                            int64_t last, Rows<T> sums, int64_t lag, int64_t at, int64_t vectors) {
  if constexpr (J > 1) {
    if (lags < J)
      return correlate_group<T, J - 1>(lags, dy, x, row, first, last, sums, lag, at, vectors);
  }
  constexpr int WIDE = 4;  // few lags: several vectors hide the latency of a sum
  if constexpr (J * WIDE <= LAGS) {
    for (; vectors >= WIDE; vectors -= WIDE, at += WIDE * Simd<T>::LANES)
      correlate_lags<T, J, WIDE>(dy, x, row, first, last, sums, lag, at);
  }
  for (; vectors > 0; --vectors, at += Simd<T>::LANES)
    correlate_lags<T, J, 1>(dy, x, row, first, last, sums, lag, at);
}

// The first `lags` lags of rows [first, last).
template <class T>
void correlate_rows(Rows<T> dy, Rows<T> x, int64_t row, int64_t first, int64_t last, Rows<T> sums,
                    int64_t lags) {
  const int64_t vectors = dy.stride / Simd<T>::LANES;
  const int64_t groups = (lags + LAGS - 1) / LAGS;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t from = lags * g / groups, to = lags * (g + 1) / groups;
    correlate_group<T>(to - from, dy, x, row, first, last, sums, from, 0, vectors);
  }
}

template <class T>
void correlate_block(Rows<T> dy, Rows<T> x, int64_t row, int64_t count, Rows<T> sums,
                     int64_t window, const int32_t* limits) {
  for (int64_t t = 0; t < count;) {
    int64_t end = limits ? t + 1 : count;
    const int64_t lags = limits ? limits[t] : window;
    while (limits && end < count && limits[end] == lags) ++end;
    correlate_rows(dy, x, row, t, end, sums, lags);
    t = end;
  }
}

}  // namespace
