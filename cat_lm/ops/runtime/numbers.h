// The formats of numbers in memory, and their conversion to and from those of sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

template <class To, class From> inline To convert(From value) { return value; }

template <> inline float convert<float, bf16>(bf16 value) {
  return as_float(uint32_t(value.bits) << 16);
}
template <> inline bf16 convert<bf16, float>(float value) {
  const uint32_t u = as_bits(value);
  const uint32_t rounded = u + 0x7fff + ((u >> 16) & 1);  // to nearest, ties to even
  return {uint16_t((value == value ? rounded : 0x7fc00000u) >> 16)};  // NaN stays NaN
}
template <> inline float convert<float, fp16>(fp16 value) {
  const uint32_t magnitude = value.bits & 0x7fff, sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f);  // subnormals too
  return as_float(sign | (magnitude >= 0x7c00 ? finite | 0x7f800000 : finite));
}
template <> inline fp16 convert<fp16, float>(float value) {
  const uint32_t u = as_bits(value), magnitude = u & 0x7fffffff, sign = (u >> 16) & 0x8000;
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  const uint32_t normal = std::min<uint32_t>((rounded - (112u << 23)) >> 13, 0x7c00);
  // The last place of fp32 in [0.5, 1) is fp16's subnormal unit: one addition rounds to it.
  const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t number = magnitude < 0x38800000 ? small : normal;
  return {uint16_t(sign | (magnitude > 0x7f800000 ? 0x7e00 : number))};
}

// e^x within two units of the last place, without branches, so that loops of it are vectorised.
// Below the normal numbers it is 0, as where a document starts; above e^88.37 it is infinite.
inline float exponential(float x) {
  constexpr float ROUND = 0x1.8p23f;  // adding it leaves an integer in the low bits
  const bool none = -87.3f > x;
  x = none ? -87.3f : x;              // written so that NaN stays NaN
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 0x1.715476p0f + ROUND;  // log2 e
  const float n = shifted - ROUND;
  float f = x - n * 0x1.62ep-1f;  // ln 2, in two parts: the first times n is exact
  f -= n * 0x1.0bfbe8p-15f;
  float sum = 1.0f / 5040;
  sum = sum * f + 1.0f / 720;
  sum = sum * f + 1.0f / 120;
  sum = sum * f + 1.0f / 24;
  sum = sum * f + 1.0f / 6;
  sum = sum * f + 0.5f;
  sum = sum * f + 1.0f;
  sum = sum * f + 1.0f;
  return none ? 0.0f : sum * as_float((as_bits(shifted) + 127) << 23);
}

// Channels of a column, a length that the compiler can count on.
constexpr int64_t COLUMN = 64;

template <class To, class From>
inline void convert_row(const From* from, To* to, int64_t count) {
  if (count == COLUMN) {
    for (int64_t i = 0; i < COLUMN; ++i) to[i] = convert<To, From>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = convert<To, From>(from[i]);
  }
}

#if defined(__AVX512BF16__)
// The processor's own rounding, which flushes what is subnormal in fp32.
template <> inline void convert_row(const float* from, bf16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
    std::memcpy(to + i, &half, sizeof half);
  }
  for (; i < count; ++i) to[i] = convert<bf16>(from[i]);
}
#endif

}  // namespace
