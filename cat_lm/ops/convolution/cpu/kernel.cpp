// Causal convolutions along time with one filter for each head or for each channel, for CPUs.
//
//   forward   y[b,t,h,d]  = bias[h,d] + sum_j F[h,(d),j] x[b,t-j,h,d]
//   backward  dx[b,s,h,d] = sum_j F[h,(d),j] dy[b,s+j,h,d]
//             dF[h,(d),j] = sum_{b,t,(d)} dy[b,t,h,d] x[b,t-j,h,d],   dbias[h,d] = sum_{b,t} dy
//
// Work is cut into items: a column of at most WIDEST channels of one head, and a segment of blocks of
// time. A block's rows are read once, through any strides, into a small buffer in the type of sums
// (fp32, or fp64 for fp64), which the first-level cache holds while W taps are summed in registers.
// Each segment has its own partial sums of dF and dbias, added at the end in the order of segments;
// the cut depends on shapes alone, so that gradients do not depend on the number of threads.
//
// Threads come through a pointer to GOMP_parallel of the very OpenMP runtime that torch uses, so
// that there is one pool of threads in the process; without it, they are started for the call.

#include <algorithm>
#include <cstdint>

#include "block.h"
#include "pairs.h"
#include "threads.h"

namespace {

constexpr int64_t WIDEST = 96;  // channels of an item at most
constexpr int64_t BLOCK = 64;   // time steps of a block: two buffers of rows fit the first-level cache
constexpr int64_t ITEMS = 512;  // items to aim at: work for many threads, little memory for sums

// How a call is cut; depends on shapes alone, never on threads.
struct Plan {
  int64_t column;        // channels of an item
  int64_t columns_per_head, columns, length, blocks, per_segment, segments;
  int64_t padded;        // numbers in a row of a buffer
  int64_t filter_sums;   // numbers in a partial sum: those of the filter's gradient,
  int64_t partial;       // and then the bias's
  int64_t scratch;       // numbers in the buffers of a thread

  Plan(const ConvolutionCall& c, int64_t lanes) {
    columns_per_head = (c.width + WIDEST - 1) / WIDEST;
    column = ((c.width + columns_per_head - 1) / columns_per_head + 15) / 16 * 16;
    columns = c.heads * columns_per_head;
    length = std::min(c.time, BLOCK);
    blocks = (c.time + length - 1) / length;
    per_segment = std::max<int64_t>(1, c.batch * blocks * columns / ITEMS);
    segments = (c.batch * blocks + per_segment - 1) / per_segment;
    padded = (std::min(c.width, column) + lanes - 1) / lanes * lanes;
    filter_sums = (c.kind == CHANNEL) ? c.window * padded : c.window;
    partial = filter_sums + padded;
    scratch = (3 * length + 4 * c.window) * padded + (2 * length / lanes + 1) * lanes;
  }
};

template <class T, class IO> class Worker : Block<T, IO> {
 public:
  Worker(const ConvolutionCall& call, const Plan& cut, T* scratch)
      : Block<T, IO>(call), plan(cut) {
    const auto take = [&](int64_t rows) {
      T* first = scratch;
      scratch += rows * plan.padded;
      return Rows<T>{first, plan.padded, plan.padded};
    };
    x = take(plan.length + c.window - 1);
    dy = take(plan.length + c.window - 1);
    out = take(plan.length);
    sums = take(c.window + 1);
    filter = take(c.window);
    start = take(1).data;
    limits = reinterpret_cast<int32_t*>(scratch);
    dx_limits = limits + plan.length;
  }

  void forward(int64_t item) {
    for_blocks(item, [&] {
      load(x, c.x, c.x_strides, first - (c.window - 1), count + c.window - 1);
      convolve<-1>(x, c.window - 1, find_limits());
    });
  }

  void backward(int64_t item, T* partial) {
    const bool summed = c.filter_gradient || c.bias_gradient;
    if (summed) std::fill_n(sums.data, (c.window + 1) * plan.padded, T(0));
    for_blocks(item, [&] {
      load(dy, c.dy, c.dy_strides, first, count + (c.out ? c.window - 1 : 0));
      if (c.out) convolve<1>(dy, 0, find_dx_limits());
      if (c.bias_gradient) add_rows();
      if (c.filter_gradient) {
        load(x, c.x, c.x_strides, first - (c.window - 1), count + c.window - 1);
        correlate_block(dy, x, c.window - 1, count, sums, c.window, find_limits());
      }
    });
    if (summed) write_sums(partial + item * plan.partial);
  }

 private:
  using Base = Block<T, IO>;
  using Base::c, Base::limits, Base::dx_limits, Base::head, Base::channel, Base::channels;
  using Base::batch, Base::first, Base::count;
  using Base::offset, Base::load, Base::find_limits, Base::find_dx_limits;
  const Plan& plan;
  Rows<T> x, dy, out, sums, filter;
  T* start;

  template <class Call> void for_blocks(int64_t item, Call call) {
    const int64_t column = item % plan.columns, segment = item / plan.columns;
    head = column / plan.columns_per_head;
    channel = column % plan.columns_per_head * plan.column;
    channels = std::min(c.width - channel, plan.column);
    load_filter();
    const int64_t last = std::min((segment + 1) * plan.per_segment, c.batch * plan.blocks);
    for (int64_t block = segment * plan.per_segment; block < last; ++block) {
      batch = block / plan.blocks;
      first = block % plan.blocks * plan.length;
      count = std::min(plan.length, c.time - first);
      call();
    }
  }

  // The filter as rows of a number (shared by the channels) or of a column, and the bias.
  void load_filter() {
    const IO* from = static_cast<const IO*>(c.filters);
    if ((c.kind == CHANNEL)) {
      from += (head * c.width + channel) * c.window;
      for (int64_t j = 0; j < c.window; ++j)
        for (int64_t d = 0; d < plan.padded; ++d)
          filter[j][d] = d < channels ? convert<T>(from[d * c.window + j]) : T(0);
    } else {
      filter.stride = 1;
      convert_row(from + head * c.window, filter.data, c.window);
    }
    std::fill_n(start, plan.padded, T(0));
    if (c.bias)
      convert_row(static_cast<const IO*>(c.bias) + head * c.width + channel, start, channels);
  }

  template <int STEP> void convolve(Rows<T> in, int64_t row, const int32_t* taps) {
    if ((c.kind == CHANNEL))
      convolve_block<T, STEP, true>(in, row, filter, c.window, start, out, count, taps);
    else
      convolve_block<T, STEP, false>(in, row, filter, c.window, start, out, count, taps);
    IO* to = static_cast<IO*>(c.out);
    for (int64_t t = 0; t < count; ++t)
      convert_row(out[t], to + offset(c.out_strides, first + t), channels);
  }

  void add_rows() {
    using S = Simd<T>;
    for (int64_t at = 0; at < plan.padded; at += S::LANES) {
      typename S::Vec sum = S::load(sums[c.window] + at);
      for (int64_t t = 0; t < count; ++t) sum += S::load(dy[t] + at);
      S::store(sums[c.window] + at, sum);
    }
  }

  void write_sums(T* to) const {
    if ((c.kind == CHANNEL)) {
      std::copy_n(sums.data, plan.filter_sums, to);
    } else {
      for (int64_t j = 0; j < c.window; ++j) {
        to[j] = T(0);
        for (int64_t d = 0; d < plan.padded; ++d) to[j] += sums[j][d];
      }
    }
    std::copy_n(sums[c.window], plan.padded, to + plan.filter_sums);
  }
};

// Adds the partial sums of a head, segment by segment, and rounds once.
template <class T, class IO>
void finish_head(const ConvolutionCall& c, const Plan& plan, T* partials, int64_t head) {
  for (int64_t part = 0; part < plan.columns_per_head; ++part) {
    T* total = partials + (head * plan.columns_per_head + part) * plan.partial;
    for (int64_t s = 1; s < plan.segments; ++s)
      for (int64_t i = 0; i < plan.partial; ++i)
        total[i] += total[s * plan.columns * plan.partial + i];
  }
  const T* sums = partials + head * plan.columns_per_head * plan.partial;
  IO* df = static_cast<IO*>(c.filter_gradient);
  for (int64_t j = 0; df && !(c.kind == CHANNEL) && j < c.window; ++j) {
    T total = T(0);
    for (int64_t part = 0; part < plan.columns_per_head; ++part)
      total += sums[part * plan.partial + j];
    df[head * c.window + j] = convert<IO>(total);
  }
  for (int64_t d = 0; d < c.width; ++d) {
    const T* column = sums + d / plan.column * plan.partial;
    for (int64_t j = 0; df && (c.kind == CHANNEL) && j < c.window; ++j)
      df[(head * c.width + d) * c.window + j] = convert<IO>(column[j * plan.padded + d % plan.column]);
    if (c.bias_gradient)
      static_cast<IO*>(c.bias_gradient)[head * c.width + d] =
          convert<IO>(column[plan.filter_sums + d % plan.column]);
  }
}

template <class T> T* aligned(void* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<T*>((address + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
}

template <class T, class IO> void run_pairs(const ConvolutionCall& c) {
  const PairPlan plan(c, Simd<T>::LANES);
  T* taps = aligned<T>(c.workspace);
  T* scratch = taps + plan.taps;
  T* partials = scratch + c.threads * plan.scratch;
  load_taps<T, IO>(c, taps);
  for_each(plan.items, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    PairWorker<T, IO> worker(c, plan, taps, scratch + thread * plan.scratch);
    if (c.dy) worker.backward(item, partials);
    else worker.forward(item);
  });
  if (c.filter_gradient || c.bias_gradient) finish_pairs<T, IO>(c, plan, partials);
}

template <class T, class IO> void run(const ConvolutionCall& c) {
  if (c.kind == PAIR) return run_pairs<T, IO>(c);
  const Plan plan(c, Simd<T>::LANES);
  T* scratch = aligned<T>(c.workspace);
  T* partials = scratch + c.threads * plan.scratch;
  for_each(plan.segments * plan.columns, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    Worker<T, IO> worker(c, plan, scratch + thread * plan.scratch);
    if (c.dy) worker.backward(item, partials);
    else worker.forward(item);
  });
  if (c.filter_gradient || c.bias_gradient) {
    const int64_t threads = (c.kind == CHANNEL) ? c.threads : 1;
    for_each(c.heads, threads, c.parallel, [&](int64_t head, int64_t) {
      finish_head<T, IO>(c, plan, partials, head);
    });
  }
}

}  // namespace

extern "C" int64_t convolution_workspace(const ConvolutionCall* c) {
  const int64_t size = c->dtype == 3 ? sizeof(double) : sizeof(float);
  const bool summed = c->filter_gradient || c->bias_gradient;
  if (c->kind == PAIR) {
    const PairPlan plan(*c, VECTOR_BYTES / size);
    const int64_t partials = summed ? plan.items * plan.partial : 0;
    return VECTOR_BYTES + size * (plan.taps + c->threads * plan.scratch + partials);
  }
  const Plan plan(*c, VECTOR_BYTES / size);
  const int64_t partials = summed ? plan.segments * plan.columns * plan.partial : 0;
  return VECTOR_BYTES + size * (c->threads * plan.scratch + partials);
}

extern "C" void convolution_run(const ConvolutionCall* c) {
  switch (c->dtype) {
    case 0: return run<float, float>(*c);
    case 1: return run<float, bf16>(*c);
    case 2: return run<float, fp16>(*c);
    default: return run<double, double>(*c);
  }
}