// Causal convolutions along time, and rotary positions after them, for CPUs.
//
//   head       y[b,t,h,d] = bias[h,d] + sum_j F[h,j] x[b,t-j,h,d]
//   channel    y[b,t,h,d] = bias[h,d] + sum_j F[h,d,j] x[b,t-j,h,d]
//   pair       y[b,t,i,d] = bias[i,d] + sum_{j,h} F[j,i,h] x[b,t-j,h,d]
//
// and their gradients: dx by the same sums over later times, dF by products of dy and x at each lag.
//
// Work is cut into items: a group of heads that are convolved together, all of them for pairs, and a
// segment of blocks of time. A block's rows are read once, through any strides, into small buffers, and
// its sums stay in registers. In a buffer, rows (time, head) follow each other, so that all that the
// outputs of a step of time read are rows without a gap: a matrix product, whose tiles are 4 rows of 4
// vectors. dF sums products of 4 rows of dy with 4 rows of x, lane by lane.
//
// Sums are in fp32 (fp64 for fp64). Where the processor adds products of pairs of bf16 numbers to sums
// in fp32, rows of bf16 are multiplied so, two times or heads at once; that takes half as long.
//
// Each item has its own sums of dF and dbias, added at the end in their order; the cut depends on shapes
// alone, so that gradients do not depend on the number of threads.
//
// Threads come through a pointer to GOMP_parallel of the very OpenMP runtime that torch uses, so
// that there is one pool of threads in the process; without it, they are started for the call.

#include <algorithm>
#include <cstdint>
#include <utility>

#include "plan.h"
#include "threads.h"
#include "worker.h"

namespace {

// Adds the sums of a group, item by item, and rounds once.
template <class F>
void finish_group(const ConvolutionCall& c, const Plan<F>& plan, typename F::Sum* partials,
                  int64_t group) {
  using IO = typename F::IO;
  typename F::Sum* total = partials + group * plan.partial;
  for (int64_t s = 1; s < plan.segments; ++s)
    for (int64_t i = 0; i < plan.partial; ++i)
      total[i] += total[s * plan.groups * plan.partial + i];
  const int64_t head = group / plan.columns * plan.heads, channel = group % plan.columns * plan.column;
  const int64_t channels = std::min(c.width - channel, plan.column);
  if (IO* to = static_cast<IO*>(c.filter_gradient)) {
    if (c.kind == HEAD) to += head * c.window;
    for (int64_t i = 0; !plan.per_channel && i < plan.filter_sums; ++i) to[i] = convert<IO>(total[i]);
    to += (head * c.width + channel) * c.window;
    for (int64_t d = 0; plan.per_channel && d < channels; ++d)
      for (int64_t j = 0; j < c.window; ++j)
        to[d * c.window + j] = convert<IO>(total[j * plan.padded + d]);
  }
  for (int64_t h = 0; c.bias_gradient && h < plan.heads; ++h)
    convert_row(total + plan.filter_sums + h * plan.padded,
                static_cast<IO*>(c.bias_gradient) + (head + h) * c.width + channel, channels);
}

template <class T> T* aligned(void* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<T*>((address + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
}

template <class F> void run(const ConvolutionCall& c) {
  const Plan<F> plan(c);
  auto* scratch = aligned<typename F::Sum>(c.workspace);
  auto* partials = scratch + c.threads * plan.scratch;
  for_each(plan.segments * plan.groups, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    Worker<F> worker(c, plan, scratch + thread * plan.scratch);
    if (c.dy) worker.backward(item, partials);
    else worker.forward(item);
  });
  if (!c.filter_gradient && !c.bias_gradient) return;
  for_each(plan.groups, plan.per_channel ? c.threads : 1, c.parallel, [&](int64_t group, int64_t) {
    finish_group(c, plan, partials, group);
  });
}

template <class F> int64_t workspace(const ConvolutionCall& c) {
  const Plan<F> plan(c);
  const bool summed = c.filter_gradient || c.bias_gradient;
  const int64_t partials = summed ? plan.segments * plan.groups * plan.partial : 0;
  return VECTOR_BYTES + sizeof(typename F::Sum) * (c.threads * plan.scratch + partials);
}

// Calls what is made for the format of the tensors.
template <class Call> auto with_format(const ConvolutionCall& c, Call call) {
#if defined(__AVX512BF16__)
  if (c.dtype == 1 && c.kind != CHANNEL) return call(Pairs());
#endif
  switch (c.dtype) {
    case 0: return call(Plain<float, float>());
    case 1: return call(Plain<float, bf16>());
    case 2: return call(Plain<float, fp16>());
    default: return call(Plain<double, double>());
  }
}

}  // namespace

extern "C" int64_t convolution_workspace(const ConvolutionCall* c) {
  return with_format(*c, [&](auto format) { return workspace<decltype(format)>(*c); });
}

extern "C" void convolution_run(const ConvolutionCall* c) {
  with_format(*c, [&](auto format) { run<decltype(format)>(*c); });
}
