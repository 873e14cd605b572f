// The convolution with one filter for each pair of heads (multihead).
//
// In a buffer whose rows are (time, head) one after the other, all that an output at time t sees is
// W * H rows without a gap: y[t, i] = sum_k G[k, i] row[(t - W + 1) * H + k], a matrix product, whose
// register tiles are 4 heads times 4 vectors. dx is the same from row t * H on, and needs no
// reordering of the filters. dF sums products of 4 times 4 heads in registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block.h"

namespace {

constexpr int64_t PAIR_BLOCK = 32;  // time steps: the rows of all heads fit the second-level cache
constexpr int64_t PAIR_ITEMS = 64;  // items of a backward to aim at: each has sums of its own

struct PairPlan {
  int64_t parts, length, blocks, per_item, items, padded, pairs, partial, taps, scratch;

  PairPlan(const ConvolutionCall& c, int64_t lanes) {
    parts = (c.width + COLUMN - 1) / COLUMN;
    length = std::min(c.time, PAIR_BLOCK);
    blocks = (c.time + length - 1) / length;
    per_item = c.dy ? std::max<int64_t>(1, c.batch * blocks * parts / PAIR_ITEMS) : 1;
    items = (c.batch * blocks * parts + per_item - 1) / per_item;
    padded = (std::min(c.width, COLUMN) + lanes - 1) / lanes * lanes;
    pairs = c.window * c.heads * c.heads;
    partial = pairs + c.heads * c.width;
    taps = (pairs + lanes - 1) / lanes * lanes;
    const int64_t rows = (3 * length + 2 * (c.window - 1)) * c.heads;
    scratch = rows * padded + pairs * lanes + c.heads * padded +
              (2 * length / lanes + 1) * lanes;
  }
};

// Forward: G[(W-1-j) * H + h, i] = F[j, i, h]. Backward: the filters as they are, [(j, i), h].
template <class T, class IO> void load_taps(const ConvolutionCall& c, T* taps) {
  const IO* from = static_cast<const IO*>(c.filters);
  const int64_t heads = c.heads;
  for (int64_t j = 0; j < c.window; ++j)
    for (int64_t i = 0; i < heads; ++i)
      for (int64_t h = 0; h < heads; ++h, ++from) {
        const int64_t row = c.dy ? j * heads + i : (c.window - 1 - j) * heads + h;
        taps[row * heads + (c.dy ? h : i)] = convert<T>(*from);
      }
}

// out[r] = start[r] + sum_k taps[k, r] in[k] for R heads and V vectors.
template <class T, int R, int V>
inline void multiply(Rows<T> in, int64_t row, const T* taps, int64_t heads, int64_t number,
                     const Rows<T>* start, Rows<T> out, int64_t out_row, int64_t head, int64_t at) {
  using S = Simd<T>;
  typename S::Vec sum[R][V] = {};
  for (int r = 0; start && r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = S::load((*start)[head + r] + at + v * S::LANES);
  const T* input = in[row] + at;
  const T* tap = taps + head;
  for (int64_t k = 0; k < number; ++k, input += in.stride, tap += heads) {
    typename S::Vec x[V];
    for (int v = 0; v < V; ++v) x[v] = S::load(input + v * S::LANES);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += x[v] * tap[r];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      S::store(out[out_row + head + r] + at + v * S::LANES, sum[r][v]);
}

// sums[i, h] += sum_t dy[t, i] x[t, h] (lane by lane) for I by J heads; rows `step` apart in time.
template <class T, int I, int J>
inline void multiply_pairs(const T* dy, const T* x, int64_t step, int64_t stride, int64_t width,
                           int64_t times, T* sums, int64_t heads) {
  using S = Simd<T>;
  typename S::Vec sum[I][J] = {};
  for (int64_t t = 0; t < times; ++t, dy += step, x += step)
    for (int64_t at = 0; at < width; at += S::LANES) {
      typename S::Vec right[J];
      for (int h = 0; h < J; ++h) right[h] = S::load(x + h * stride + at);
      for (int i = 0; i < I; ++i) {
        const typename S::Vec left = S::load(dy + i * stride + at);
        for (int h = 0; h < J; ++h) sum[i][h] += left * right[h];
      }
    }
  for (int i = 0; i < I; ++i)
    for (int h = 0; h < J; ++h) {
      T* to = sums + (i * heads + h) * S::LANES;
      S::store(to, S::load(to) + sum[i][h]);
    }
}

template <class T, class IO> class PairWorker : Block<T, IO> {
  using Base = Block<T, IO>;
  using Base::c, Base::limits, Base::dx_limits, Base::head, Base::channel, Base::channels;
  using Base::batch, Base::first, Base::count;
  using Base::offset, Base::load, Base::find_limits, Base::find_dx_limits;
  using S = Simd<T>;
  const PairPlan& plan;
  const T* taps;
  Rows<T> x, dy, out, bias;
  T* sums;

 public:
  PairWorker(const ConvolutionCall& call, const PairPlan& cut, const T* g, T* scratch)
      : Base(call), plan(cut), taps(g) {
    const auto take = [&](int64_t rows) {
      T* start = scratch;
      scratch += rows * plan.padded;
      return Rows<T>{start, plan.padded, plan.padded};
    };
    x = take((plan.length + c.window - 1) * c.heads);
    dy = take((plan.length + c.window - 1) * c.heads);
    out = take(plan.length * c.heads);
    bias = take(c.heads);
    sums = scratch;
    scratch += plan.pairs * S::LANES;
    limits = reinterpret_cast<int32_t*>(scratch);
    dx_limits = limits + plan.length;
  }

  void forward(int64_t item) {
    for_blocks(item, [&] {
      load_heads(x, c.x, c.x_strides, first - (c.window - 1), count + c.window - 1);
      for (int64_t h = 0; h < c.heads; ++h) {
        std::fill_n(bias[h], plan.padded, T(0));
        const IO* from = static_cast<const IO*>(c.bias) + h * c.width + channel;
        if (c.bias) convert_row(from, bias[h], channels);
      }
      const int32_t* taken = find_limits();
      for (int64_t t = 0; t < count; ++t) {
        const int64_t skipped = taken ? c.window - taken[t] : 0;
        multiply_heads((t + skipped) * c.heads, skipped * c.heads, c.window - skipped, &bias, t);
      }
      store_heads();
    });
  }

  void backward(int64_t item, T* partials) {
    T* partial = partials + item * plan.partial;
    const bool summed = c.filter_gradient || c.bias_gradient;
    if (summed) {
      std::fill_n(sums, plan.pairs * S::LANES, T(0));
      std::fill_n(partial, plan.partial, T(0));
    }
    for_blocks(item, [&] {
      load_heads(dy, c.dy, c.dy_strides, first, count + (c.out ? c.window - 1 : 0));
      if (c.out) {
        std::swap(x, dy);  // `multiply_heads` reads x
        const int32_t* taken = find_dx_limits();
        for (int64_t t = 0; t < count; ++t)
          multiply_heads(t * c.heads, 0, taken ? taken[t] : c.window, nullptr, t);
        std::swap(x, dy);
        store_heads();
      }
      if (c.bias_gradient) add_rows(partial + plan.pairs);
      if (c.filter_gradient) {
        load_heads(x, c.x, c.x_strides, first - (c.window - 1), count + c.window - 1);
        correlate(find_limits());
      }
    });
    if (summed)
      for (int64_t pair = 0; pair < plan.pairs; ++pair)
        for (int64_t lane = 0; lane < S::LANES; ++lane)
          partial[pair] += sums[pair * S::LANES + lane];
  }

 private:
  template <class Call> void for_blocks(int64_t item, Call call) {
    const int64_t last = std::min((item + 1) * plan.per_item, c.batch * plan.blocks * plan.parts);
    for (int64_t i = item * plan.per_item; i < last; ++i) {
      channel = i % plan.parts * COLUMN;
      channels = std::min(c.width - channel, COLUMN);
      batch = i / plan.parts / plan.blocks;
      first = i / plan.parts % plan.blocks * plan.length;
      count = std::min(plan.length, c.time - first);
      call();
    }
  }

  // Rows (time, head).
  void load_heads(Rows<T> rows, const void* from, const int64_t* strides, int64_t start, int64_t n) {
    rows.stride *= c.heads;
    for (head = 0; head < c.heads; ++head, rows.data += plan.padded)
      load(rows, from, strides, start, n);
  }

  void store_heads() {
    for (int64_t t = 0; t < count; ++t)
      for (head = 0; head < c.heads; ++head)
        convert_row(out[t * c.heads + head],
                    static_cast<IO*>(c.out) + offset(c.out_strides, first + t), channels);
  }

  // All heads of output t from `lags` * H rows, with the taps from `tap` on.
  void multiply_heads(int64_t row, int64_t tap, int64_t lags, const Rows<T>* start, int64_t t) {
    const T* from = taps + tap * c.heads;
    const int64_t number = lags * c.heads;
    constexpr int V = VECTOR_BYTES == 64 ? 4 : 2;
    int64_t at = 0;
    for (; at + V * S::LANES <= plan.padded; at += V * S::LANES) {
      int64_t h = 0;
      for (; h + 4 <= c.heads; h += 4)
        multiply<T, 4, V>(x, row, from, c.heads, number, start, out, t * c.heads, h, at);
      for (; h < c.heads; ++h)
        multiply<T, 1, V>(x, row, from, c.heads, number, start, out, t * c.heads, h, at);
    }
    for (; at < plan.padded; at += S::LANES) {
      int64_t h = 0;
      for (; h + 4 <= c.heads; h += 4)
        multiply<T, 4, 1>(x, row, from, c.heads, number, start, out, t * c.heads, h, at);
      for (; h < c.heads; ++h)
        multiply<T, 1, 1>(x, row, from, c.heads, number, start, out, t * c.heads, h, at);
    }
  }

  void add_rows(T* to) const {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t d = 0; d < channels; ++d)
          to[h * c.width + channel + d] += dy[t * c.heads + h][d];
  }

  // Steps with equally many inputs in their documents are taken together.
  void correlate(const int32_t* taken) {
    for (int64_t t = 0; t < count;) {
      const int64_t lags = taken ? taken[t] : c.window;
      int64_t end = taken ? t + 1 : count;
      while (taken && end < count && taken[end] == lags) ++end;
      for (int64_t j = 0; j < lags; ++j) correlate_lag(t, end - t, j);
      t = end;
    }
  }

  void correlate_lag(int64_t t, int64_t times, int64_t lag) {
    const int64_t heads = c.heads, step = heads * plan.padded;
    const T* left = dy[t * heads];
    const T* right = x[(t + c.window - 1 - lag) * heads];
    T* to = sums + lag * heads * heads * S::LANES;
    const auto pairs = [&](auto tile, int64_t i, int64_t h) {
      tile(left + i * plan.padded, right + h * plan.padded, step, plan.padded, plan.padded, times,
           to + (i * heads + h) * S::LANES, heads);
    };
    for (int64_t i = 0; i < heads; i += i + 4 <= heads ? 4 : 1)
      for (int64_t h = 0; h < heads; h += h + 4 <= heads ? 4 : 1) {
        const bool many = i + 4 <= heads, wide = h + 4 <= heads;
        if (many && wide) pairs(multiply_pairs<T, 4, 4>, i, h);
        else if (many) pairs(multiply_pairs<T, 4, 1>, i, h);
        else if (wide) pairs(multiply_pairs<T, 1, 4>, i, h);
        else pairs(multiply_pairs<T, 1, 1>, i, h);
      }
  }
};

// Adds the partial sums, item by item, and rounds once.
template <class T, class IO>
void finish_pairs(const ConvolutionCall& c, const PairPlan& plan, T* partials) {
  for (int64_t item = 1; item < plan.items; ++item)
    for (int64_t i = 0; i < plan.partial; ++i) partials[i] += partials[item * plan.partial + i];
  const auto write = [](const T* from, void* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) static_cast<IO*>(to)[i] = convert<IO>(from[i]);
  };
  if (c.filter_gradient) write(partials, c.filter_gradient, plan.pairs);
  if (c.bias_gradient) write(partials + plan.pairs, c.bias_gradient, c.heads * c.width);
}

}  // namespace
