// A bias and the exact GELU, for CPUs (see gelu.py):
//
//   y = z Phi(z),   dz = dy (Phi(z) + z phi(z)),   db = sum of dz over rows,   z = x + b
//
// Rows are taken in blocks, each with its own sums of dz, which are added in their order: results
// do not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "threads.h"

// What Python hands over; mirrored in gelu.py. All arrays are contiguous.
struct GeluCall {
  int64_t dtype, threads, rows, width;  // 0 fp32, 1 bf16, 2 fp16
  const void* product;                  // x [rows, width]
  const float* bias;                    // b [width]
  const void* grad;                     // dy, of the backward pass
  void* out;                            // y, or dz
  float* bias_gradient;                 // db [width], null: forward
  float* workspace;                     // as many bytes as gelu_workspace says
  void* parallel;                       // GOMP_parallel, or null
};

namespace {

constexpr int64_t BLOCK = 32;  // rows

// With u = min(|z|, 6), the tail Phi(-u) is 1 / (2 P(u)^8), and Phi(-u) - u phi(u) N(u) times it.
// P and N are minimax polynomials, fitted for u Phi(-u) and for that difference. Rounding included,
// the error of y is below 3e-7 and that of its derivative below 7e-7. As in Abramowitz and Stegun's
// 7.1.28 there is neither an exponential nor a branch, so that loops are vectorised.
constexpr float P[] = {1.0f,            0.0997339785f,   0.0447795764f,
                       0.00861353241f,  0.000954527699f, 0.000128519052f,
                       9.13076001e-05f, -1.55559319e-05f, 2.84123917e-06f};
constexpr float N[] = {1.0f,          -0.797915876f,    -0.636265457f,    -0.110349707f,
                       0.0215363353f, -0.00214168918f, -1.48919025e-05f, 1.69315117e-05f};

template <int SIZE> inline float polynomial(const float (&factors)[SIZE], float u) {
  float sum = factors[SIZE - 1];
  for (int i = SIZE - 2; i >= 0; --i) sum = sum * u + factors[i];
  return sum;
}

// min(|z|, 6); NaN stays NaN.
inline float distance(float z) {
  const float u = std::fabs(z);
  return 6.0f < u ? 6.0f : u;
}

inline float tail(float u) {
  float power = polynomial(P, u);
  for (int i = 0; i < 3; ++i) power *= power;
  return 0.5f / power;
}

inline float gelu(float z) {
  const float u = distance(z);
  return (z < 0.0f ? 0.0f : z) - u * tail(u);
}

// Phi(z) + z phi(z)
inline float slope(float z) {
  const float u = distance(z), below = polynomial(N, u) * tail(u);
  return z < 0.0f ? below : 1.0f - below;
}

template <class T> void run(const GeluCall& c) {
  const int64_t blocks = (c.rows + BLOCK - 1) / BLOCK;
  for_each(blocks, c.threads, c.parallel, [&](int64_t block, int64_t) {
    float* sums = c.workspace + block * c.width;
    if (c.bias_gradient) std::fill(sums, sums + c.width, 0.0f);
    for (int64_t row = block * BLOCK; row < std::min((block + 1) * BLOCK, c.rows); ++row) {
      const T* x = static_cast<const T*>(c.product) + row * c.width;
      T* out = static_cast<T*>(c.out) + row * c.width;
      if (!c.bias_gradient) {
#pragma omp simd
        for (int64_t i = 0; i < c.width; ++i)
          out[i] = convert<T, float>(gelu(convert<float, T>(x[i]) + c.bias[i]));
        continue;
      }
      const T* grad = static_cast<const T*>(c.grad) + row * c.width;
#pragma omp simd
      for (int64_t i = 0; i < c.width; ++i) {
        const float dz = convert<float, T>(grad[i]) * slope(convert<float, T>(x[i]) + c.bias[i]);
        out[i] = convert<T, float>(dz);
        sums[i] += dz;
      }
    }
  });
  if (!c.bias_gradient) return;
  std::fill(c.bias_gradient, c.bias_gradient + c.width, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const float* sums = c.workspace + block * c.width;
#pragma omp simd
    for (int64_t i = 0; i < c.width; ++i) c.bias_gradient[i] += sums[i];
  }
}

}  // namespace

// Bytes of the sums of all blocks.
extern "C" int64_t gelu_workspace(const GeluCall* c) {
  return c->bias_gradient ? (c->rows + BLOCK - 1) / BLOCK * c->width * sizeof(float) : 0;
}

extern "C" void gelu_run(const GeluCall* c) {
  if (c->dtype == 0) run<float>(*c);
  else if (c->dtype == 1) run<bf16>(*c);
  else run<fp16>(*c);
}
