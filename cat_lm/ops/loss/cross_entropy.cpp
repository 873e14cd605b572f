// Cross-entropy of logits and its gradient in their place, for CPUs (see cross_entropy_cpu.py):
//
//   loss_n = log sum_v e^(z_nv) - z_n,label,   dz_nv = e^(z_nv) / sum_u e^(z_nu) - [v = label]
//
// A thread takes a row at a time: memory sees each logit read once and written once, in the dtype of
// the product that made it. Exponentials wait in fp32, in a row of the thread's own.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "threads.h"

// What Python hands over; mirrored in cross_entropy_cpu.py.
struct LossCall {
  int64_t dtype, threads;              // 0 fp32, 1 bf16, 2 fp16
  int64_t rows, vocabulary;
  int64_t ignored, wants_gradient;     // the label of what is not scored
  void* logits;                        // [N, V]
  const int64_t* labels;               // [N]
  float *losses, *workspace;           // [N], [threads, V]
  void* parallel;                      // GOMP_parallel, or null
};

namespace {

template <class E> void score(const LossCall& c, int64_t row, float* exponentials) {
  E* logits = static_cast<E*>(c.logits) + row * c.vocabulary;
  const int64_t label = c.labels[row];
  c.losses[row] = 0;
  if (label == c.ignored) {
    if (c.wants_gradient) std::fill_n(logits, c.vocabulary, E{});
    return;
  }
  float highest = convert<float, E>(logits[0]), sum = 0;
#pragma omp simd reduction(max : highest)
  for (int64_t v = 0; v < c.vocabulary; ++v) {
    const float logit = convert<float, E>(logits[v]);
    highest = logit > highest ? logit : highest;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t v = 0; v < c.vocabulary; ++v)
    sum += exponentials[v] = exponential(convert<float, E>(logits[v]) - highest);
  c.losses[row] = std::log(sum) + highest - convert<float, E>(logits[label]);
  if (!c.wants_gradient) return;
  const float scale = 1 / sum;
  exponentials[label] -= sum;
  for (int64_t v = 0; v < c.vocabulary; ++v) logits[v] = convert<E, float>(exponentials[v] * scale);
}

template <class E> void run(const LossCall& c) {
  for_each(c.rows, c.threads, c.parallel, [&](int64_t row, int64_t thread) {
    score<E>(c, row, c.workspace + thread * c.vocabulary);
  });
}

}  // namespace

// Bytes that all threads need.
extern "C" int64_t cross_entropy_workspace(const LossCall* c) {
  return c->threads * c->vocabulary * sizeof(float);
}

extern "C" void cross_entropy_run(const LossCall* c) {
  if (c->dtype == 0) run<float>(*c);
  else if (c->dtype == 1) run<bf16>(*c);
  else run<fp16>(*c);
}
