// What Python hands over.
#pragma once

#include <cstdint>

// Mirrored in kernel.py. Strides count numbers; the channels of a head are next to each other.
struct ConvolutionCall {
  int64_t dtype;    // 0 fp32, 1 bf16, 2 fp16, 3 fp64
  int64_t kind;     // a filter for each 0 head, 1 channel, 2 pair of heads
  int64_t threads;
  int64_t batch, time, heads, width, window;       // B, T, H, D, W
  int64_t rotated, angle_rows;                     // R, which is even, and 1 or B; 0 for no rotation
  int64_t x_strides[3], dy_strides[3], out_strides[3];  // of B, T, H
  const void *x, *dy, *filters, *bias;             // filters and bias contiguous; bias may be null
  const int32_t* positions;                        // [B, T] contiguous, or null
  const void *cosines, *sines;                     // [1 or B, T, R] in the type of sums
  void *out;                                       // y, or dx (null if not wanted)
  void *filter_gradient, *bias_gradient;           // null if not wanted
  void *workspace;                                 // as many bytes as convolution_workspace says
  void *parallel;                                  // GOMP_parallel, or null
};

enum Kind : int64_t { HEAD, CHANNEL, PAIR };
