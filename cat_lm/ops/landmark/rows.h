// What attention needs of a row of numbers: sums in fp32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numbers.h"

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

}  // namespace
