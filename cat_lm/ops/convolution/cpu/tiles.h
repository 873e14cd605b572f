// The loops in registers, over rows in fast memory, and the formats of these rows.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, WIDE = 4;  // vectors of a wide tile: 32 registers hold 4 rows of 4
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, WIDE = 2;
#else
constexpr int VECTOR_BYTES = 16, WIDE = 2;
#endif

// Numbers are `IO` in memory and `Number` in buffers, where a vector of `Unit`s is multiplied at once.
template <class T, class From> struct Plain {
  using Sum = T;
  using IO = From;
  using Number = T;
  using Unit = T;
  static constexpr int PAIR = 1, LANES = VECTOR_BYTES / sizeof(T);
  typedef T Sums __attribute__((vector_size(VECTOR_BYTES), may_alias));
  typedef T Units __attribute__((vector_size(VECTOR_BYTES), may_alias));
  static Sums multiply_add(Sums sum, Units a, Units b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// A unit is two numbers, whose two products are added to one sum in fp32.
struct Pairs {
  using Sum = float;
  using IO = bf16;
  using Number = bf16;
  using Unit = uint32_t;
  static constexpr int PAIR = 2, LANES = 16;
  typedef float Sums __attribute__((vector_size(VECTOR_BYTES), may_alias));
  typedef uint32_t Units __attribute__((vector_size(VECTOR_BYTES), may_alias));
  static Sums multiply_add(Sums sum, Units a, Units b) {
    return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// A function of its own has all registers for its sums; compilers spill some where it is inlined.
#define TILE __attribute__((noinline))

// g++ 12 loads a vector again for every product unless it may have changed in its register.
#if defined(__x86_64__)
#define KEEP(vector) asm("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

template <class Vec, class T> inline Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }
template <class Vec, class T> inline void store(T* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// out[r, e] = start[e] + sum_{first <= k < last} taps[k, e] in[r * step + k] for R steps with E outputs
// each, of V vectors. Taps are `outputs` apart, or rows of `width`, too, if each channel has its own.
template <class F, int R, int E, int V, bool PER_CHANNEL>
TILE void convolve_tile(const typename F::Unit* in, int64_t step, int64_t width,
                        const typename F::Unit* taps, int64_t outputs, int64_t first, int64_t last,
                          const typename F::Sum* start, typename F::Sum* out) {
  using Sums = typename F::Sums;
  using Units = typename F::Units;
  Sums sum[R][E][V];
  for (int r = 0; r < R; ++r)
    for (int e = 0; e < E; ++e)
      for (int v = 0; v < V; ++v) sum[r][e][v] = load<Sums>(start + e * width + v * F::LANES);
  int64_t k = first;
  do {
    Units tap[E];
    for (int e = 0; !PER_CHANNEL && e < E; ++e) tap[e] = Units{} + taps[k * outputs + e];
    for (int v = 0; v < V; ++v) {
      if (PER_CHANNEL) tap[0] = load<Units>(taps + k * width + v * F::LANES);
      for (int r = 0; r < R; ++r) {
        const Units x = load<Units>(in + (r * step + k) * width + v * F::LANES);
        for (int e = 0; e < E; ++e) sum[r][e][v] = F::multiply_add(sum[r][e][v], tap[e], x);
      }
    }
  } while (++k < last);
  for (int r = 0; r < R; ++r)
    for (int e = 0; e < E; ++e)
      for (int v = 0; v < V; ++v)
        store(out + (r * outputs + e) * width + v * F::LANES, sum[r][e][v]);
}

// sums[j, i] += sum_s left[s * step + i] right[s * step + j], lane by lane, for I by J rows of `width`
// units, of which `columns` are read; sums are `lanes` apart, and those of `outputs` i for each j.
template <class F, int I, int J>
TILE void correlate_tile(const typename F::Unit* left, const typename F::Unit* right, int64_t step,
                           int64_t steps, int64_t width, int64_t columns, typename F::Sum* sums,
                           int64_t outputs, int64_t lanes) {
  using Sums = typename F::Sums;
  using Units = typename F::Units;
  Sums sum[I][J];
  for (int i = 0; i < I; ++i)
    for (int j = 0; j < J; ++j) sum[i][j] = load<Sums>(sums + (j * outputs + i) * lanes);
  for (int64_t s = 0; s < steps; ++s, left += step * width, right += step * width)
    for (int64_t at = 0; at < columns; at += F::LANES) {
      Units x[J];
      for (int j = 0; j < J; ++j) {
        x[j] = load<Units>(right + j * width + at);
        KEEP(x[j]);
      }
      for (int i = 0; i < I; ++i) {
        const Units dy = load<Units>(left + i * width + at);
        for (int j = 0; j < J; ++j) sum[i][j] = F::multiply_add(sum[i][j], dy, x[j]);
      }
    }
  for (int i = 0; i < I; ++i)
    for (int j = 0; j < J; ++j) store(sums + (j * outputs + i) * lanes, sum[i][j]);
}

// The sum of a vector's lanes.
template <class F> inline typename F::Sum sum_lanes(const typename F::Sum* from) {
  typename F::Sum lane[F::LANES];
  for (int i = 0; i < F::LANES; ++i) lane[i] = from[i];
  for (int half = F::LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

}  // namespace
