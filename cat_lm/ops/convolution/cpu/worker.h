// A thread's work on an item: segments of time of a group of heads that are convolved together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "plan.h"
#include "tiles.h"

namespace {

template <class F> class Worker {
  using Sum = typename F::Sum;
  using IO = typename F::IO;
  using Number = typename F::Number;
  using Unit = typename F::Unit;
  const ConvolutionCall& c;
  const Plan<F>& plan;
  Unit *x, *dy, *pairs, *taps, *masked;
  Sum *sums, *bias_sums, *out, *start, *turned;
  int32_t *limits, *dx_limits;
  int64_t group, head, channel, channels;  // the item's: its first head, and channels of each
  int64_t batch, first, count;             // the block of time

 public:
  Worker(const ConvolutionCall& call, const Plan<F>& cut, Sum* scratch) : c(call), plan(cut) {
    const auto take = [&](int64_t numbers) { return std::exchange(scratch, scratch + numbers); };
    const auto units = [&](int64_t number) { return reinterpret_cast<Unit*>(take(number)); };
    x = units(plan.buffer);
    dy = units(plan.buffer);
    pairs = units(plan.buffer);
    taps = units(plan.taps);
    masked = units(plan.taps);
    sums = take(plan.sums);
    bias_sums = take(plan.rows * plan.padded);
    out = take(std::max<int64_t>(4, plan.outputs) * plan.padded);
    start = take(plan.outputs * plan.padded);
    turned = take(plan.padded);
    limits = reinterpret_cast<int32_t*>(scratch);
    dx_limits = limits + plan.length;
  }

  void forward(int64_t item) {
    begin(item);
    load_taps<false>(taps, nullptr);
    for_blocks(item, [&] {
      load_rows(x, c.x, c.x_strides, first - plan.lead, false);
      convolve<false>(pair_rows(x), find_limits());
    });
  }

  void backward(int64_t item, Sum* partials) {
    begin(item);
    Sum* partial = partials + item * plan.partial;
    std::fill_n(sums, plan.sums, Sum(0));
    std::fill_n(bias_sums, plan.rows * plan.padded, Sum(0));
    if (c.out) load_taps<true>(taps, nullptr);
    for_blocks(item, [&] {
      load_rows(dy, c.dy, c.dy_strides, first, true);
      const Unit* units = c.out || c.bias_gradient ? pair_rows(dy) : nullptr;
      if (c.out) convolve<true>(units, find_dx_limits());
      if (c.bias_gradient) add_rows(units);
      if (!c.filter_gradient) return;
      load_rows(x, c.x, c.x_strides, first - plan.lead, false);
      correlate(find_limits());
    });
    if (c.filter_gradient) add_sums(partial);
    if (c.bias_gradient)
      std::copy_n(bias_sums, plan.heads * plan.padded, partial + plan.filter_sums);
  }

 private:
  void begin(int64_t item) {
    group = item % plan.groups;
    head = group / plan.columns * plan.heads;
    channel = group % plan.columns * plan.column;
    channels = std::min(c.width - channel, plan.column);
    std::fill_n(start, plan.outputs * plan.padded, Sum(0));
    for (int64_t o = 0; !c.dy && c.bias && o < plan.outputs; ++o)
      if (o % plan.rows < plan.heads)
        convert_row(static_cast<const IO*>(c.bias) + (head + o % plan.rows) * c.width + channel,
                    start + o * plan.padded, channels);
  }

  template <class Call> void for_blocks(int64_t item, Call call) {
    const int64_t segment = item / plan.groups;
    const int64_t last = std::min((segment + 1) * plan.per_item, c.batch * plan.blocks);
    for (int64_t block = segment * plan.per_item; block < last; ++block) {
      batch = block / plan.blocks;
      first = block % plan.blocks * plan.length;
      count = std::min(plan.length, c.time - first);
      call();
    }
  }

  // Rows (time, head) from time `from` on, zeros before the start and after the end.
  void load_rows(Unit* to, const void* source, const int64_t* strides, int64_t from, bool turns) const {
    const int64_t times = round_up(count, plan.times) + plan.lead, rows = plan.rows;
    const int64_t width = channels, padded = plan.padded, step = rows * plan.row, end = c.time;
    const int64_t turned_channels = turns ? c.rotated : 0, stride = strides[1];
    for (int64_t h = 0; h < rows; ++h, to += plan.row) {
      const IO* numbers = static_cast<const IO*>(source) + offset(strides, from, h);
      Number* row = reinterpret_cast<Number*>(to);
      for (int64_t t = from; t < from + times; ++t, numbers += stride, row += step * F::PAIR) {
        const int64_t valid = t >= 0 && t < end && h < plan.heads ? width : 0;
        fetch<0>(numbers + AHEAD * stride, width);
        if (valid) convert_row(numbers, row, width);
        if (valid && turned_channels) {
          convert_row(numbers, turned, turned_channels);
          rotate<true>(turned, t);
          convert_row(turned, row, turned_channels);
        }
        if (valid < padded) std::fill(row + valid, row + padded, Number());
      }
    }
  }

  // Moves a row to the cache: rows of a head are apart, which the processor does not foresee.
  template <int WRITES> static void fetch(const IO* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 64 / sizeof(IO)) __builtin_prefetch(row + d, WRITES);
  }

  int64_t offset(const int64_t* strides, int64_t t, int64_t h) const {
    return batch * strides[0] + t * strides[1] + (head + h) * strides[2] + channel;
  }

  // Rotary positions on the first channels of a row, by halves; backwards the transposed matrix.
  template <bool BACK> void rotate(Sum* row, int64_t t) const {
    const int64_t half = c.rotated / 2;
    const int64_t at = ((c.angle_rows > 1 ? batch * c.time : 0) + t) * c.rotated;
    const Sum *cos = static_cast<const Sum*>(c.cosines) + at;
    const Sum *sin = static_cast<const Sum*>(c.sines) + at;
#pragma omp simd
    for (int64_t r = 0; r < half; ++r) {
      const Sum a = row[r], b = row[half + r];
      row[r] = BACK ? a * cos[r] + b * sin[half + r] : a * cos[r] - b * sin[r];
      row[half + r] = BACK ? b * cos[half + r] - a * sin[r] : b * cos[half + r] + a * sin[half + r];
    }
  }

  // How many inputs of its own document each output sees.
  const int32_t* find_limits() const {
    if (!c.positions) return nullptr;
    const int32_t* position = c.positions + batch * c.time + first;
    for (int64_t t = 0; t < count; ++t)
      limits[t] = int32_t(std::min<int64_t>(c.window, int64_t(position[t]) + 1));
    return limits;
  }

  // How many outputs of its own document see each input.
  const int32_t* find_dx_limits() const {
    if (!c.positions) return nullptr;
    const int32_t* position = c.positions + batch * c.time;
    int64_t border = std::min(first + count + c.window - 1, c.time);
    for (int64_t t = border - 1; t >= first + count; --t)
      if (position[t] == 0) border = t;
    for (int64_t t = first + count - 1; t >= first; --t) {
      dx_limits[t - first] = int32_t(std::min(c.window, border - t));
      if (position[t] == 0) border = t;
    }
    return dx_limits;
  }

  // The taps of a step's outputs [inputs, outputs], or if each channel has its own [inputs, channels];
  // the times of the step that have limits see that many inputs.
  template <bool BACK> void load_taps(Unit* to, const int32_t* limit) const {
    const IO* filters = static_cast<const IO*>(c.filters);
    Number* number = reinterpret_cast<Number*>(to);
    for (int64_t j = 0; plan.per_channel && j < c.window; ++j) {
      const IO* from = filters + (head * c.width + channel) * c.window + (BACK ? j : plan.lead - j);
      for (int64_t d = 0; d < plan.padded; ++d)
        *number++ = d < channels ? convert<Number>(from[d * c.window]) : Number();
    }
    for (int64_t k = 0; !plan.per_channel && k < plan.inputs; ++k)
      for (int64_t o = 0; o < plan.outputs; ++o)
        for (int64_t row = k * F::PAIR; row < (k + 1) * F::PAIR; ++row) {
          const int64_t t = row / plan.rows, q = o / plan.rows;
          const int64_t i = BACK ? row % plan.rows : o % plan.rows;
          const int64_t h = BACK ? o % plan.rows : row % plan.rows;
          const int64_t lag = BACK ? t - q : plan.lead + q - t;
          const bool seen = lag >= 0 && lag < (limit ? limit[q] : c.window);
          *number++ = seen && std::max(i, h) < plan.heads
                          ? convert<Number>(filters[filter_index(lag, i, h)]) : Number();
        }
  }

  // The place of the tap from head h to head i of the group.
  int64_t filter_index(int64_t lag, int64_t i, int64_t h) const {
    return c.kind == PAIR ? (lag * c.heads + i) * c.heads + h : head * c.window + lag;
  }

  // All outputs of the block, from rows that start with the first output's first input.
  template <bool BACK> void convolve(const Unit* in, const int32_t* limit) {
    const int64_t many = plan.outputs < 3 ? 4 / plan.outputs * plan.times : plan.times;
    const int64_t step = plan.outputs / F::PAIR * plan.padded;
    for (int64_t t = 0; t < count;) {
      const auto is_whole = [&](int64_t times) {
        for (int64_t i = t; limit && i < std::min(t + times, count); ++i)
          if (limit[i] < c.window) return false;
        return true;
      };
      const Unit* from = in + t / plan.times * step;
      if (t + many <= count && is_whole(many)) {
        if (plan.outputs == 1) convolve_outputs<4>(from, taps, 0, plan.inputs);
        else if (plan.outputs == 2) convolve_outputs<2>(from, taps, 0, plan.inputs);
        else convolve_outputs<1>(from, taps, 0, plan.inputs);
        store_outputs<BACK>(t, many);
        t += many;
        continue;
      }
      const int64_t times = std::min(plan.times, count - t);
      int64_t begin = 0, end = plan.inputs;
      const Unit* seen = taps;
      if (!is_whole(times)) {
        if (plan.times > 1) {
          int32_t own[F::PAIR];
          for (int64_t q = 0; q < plan.times; ++q) own[q] = q < times ? limit[t + q] : 0;
          load_taps<BACK>(masked, own);
          seen = masked;
        } else if (BACK) {
          end = limit[t] * plan.rows / F::PAIR;
        } else {
          begin = (c.window - limit[t]) * plan.rows / F::PAIR;
        }
      }
      convolve_outputs<1>(from, seen, begin, end);
      store_outputs<BACK>(t, times);
      t += times;
    }
  }

  // Rows two by two, so that a unit has two numbers of a channel.
  const Unit* pair_rows(const Unit* in) const {
    if (F::PAIR == 1) return in;
    const int64_t number = (round_up(count, plan.times) + plan.lead) * plan.rows / F::PAIR;
    for (int64_t i = 0; i < number; ++i) {
      const uint16_t* one = reinterpret_cast<const uint16_t*>(in + 2 * i * plan.row);
      const uint16_t* other = reinterpret_cast<const uint16_t*>(in + (2 * i + 1) * plan.row);
      Unit* to = pairs + i * plan.padded;
#pragma omp simd
      for (int64_t d = 0; d < plan.padded; ++d) to[d] = one[d] | uint32_t(other[d]) << 16;
    }
    return pairs;
  }

  template <int R>
  void convolve_outputs(const Unit* in, const Unit* tap, int64_t begin, int64_t end) const {
    int64_t o = 0;
    if constexpr (R == 1) {
      for (; o + 4 <= plan.outputs; o += 4) convolve_columns<1, 4>(in, tap, begin, end, o);
    }
    if constexpr (R < 4) {
      for (; o + 2 <= plan.outputs; o += 2) convolve_columns<R, 2>(in, tap, begin, end, o);
    }
    if constexpr (R != 2) {
      if (o < plan.outputs) convolve_columns<R, 1>(in, tap, begin, end, o);
    }
  }

  template <int R, int E>
  void convolve_columns(const Unit* in, const Unit* tap, int64_t begin, int64_t end, int64_t o) const {
    const auto run = [&](auto tile, int64_t at) {
      tile(in + at, plan.outputs / F::PAIR, plan.padded, tap + (plan.per_channel ? at : o), plan.outputs,
           begin, end, start + o * plan.padded + at, out + o * plan.padded + at);
    };
    int64_t at = 0;
    if constexpr (E == 1 && F::PAIR == 1) {
      if (plan.per_channel) {
        for (; at + WIDE * F::LANES <= plan.padded; at += WIDE * F::LANES)
          run(convolve_tile<F, R, E, WIDE, true>, at);
        for (; at < plan.padded; at += F::LANES) run(convolve_tile<F, R, E, 1, true>, at);
        return;
      }
    }
    for (; at + WIDE * F::LANES <= plan.padded; at += WIDE * F::LANES)
      run(convolve_tile<F, R, E, WIDE, false>, at);
    for (; at < plan.padded; at += F::LANES) run(convolve_tile<F, R, E, 1, false>, at);
  }

  template <bool BACK> void store_outputs(int64_t t, int64_t times) const {
    const int64_t stride = c.out_strides[1], width = channels, step = plan.rows * plan.padded;
    const bool turns = !BACK && c.rotated;
    for (int64_t h = 0; h < plan.heads; ++h) {
      IO* to = static_cast<IO*>(c.out) + offset(c.out_strides, first + t, h);
      Sum* row = out + h * plan.padded;
      for (int64_t i = 0; i < times; ++i, row += step, to += stride) {
        fetch<1>(to + AHEAD * stride, width);
        if (turns) rotate<false>(row, first + t + i);
        convert_row(row, to, width);
      }
    }
  }

  // Adds the rows of dy to the sums of dbias, as a convolution does with taps of 1.
  void add_rows(const Unit* in) const {
    const int64_t step = std::max<int64_t>(1, plan.rows / F::PAIR);
    const int64_t number = round_up(count, plan.times) * plan.rows / F::PAIR / step;
    for (int64_t h = 0; h < plan.heads; ++h) {
      Number ones[F::PAIR];
      for (int64_t p = 0; p < F::PAIR; ++p)
        ones[p] = convert<Number>(Sum(plan.rows == 1 || h % F::PAIR == p));
      Unit tap;
      std::memcpy(&tap, ones, sizeof tap);
      for (int64_t at = 0; at < plan.padded; at += F::LANES) {
        Sum* sum = bias_sums + h * plan.padded + at;
        convolve_tile<F, 1, 1, 1, false>(in + h / F::PAIR * plan.padded + at, 0, step * plan.padded,
                                         &tap, 0, 0, number, sum, sum);
      }
    }
  }

  // Times with equally many inputs in their documents are taken together, whole ones in steps.
  void correlate(const int32_t* limit) const {
    for (int64_t t = 0; t < count;) {
      const int64_t lags = limit ? limit[t] : c.window;
      int64_t end = limit ? t + 1 : count;
      while (limit && end < count && limit[end] == lags) ++end;
      if (lags == c.window) {
        const int64_t steps = (end - t) / plan.group_times;
        correlate_rows(t, steps, plan.group_times, lags);
        t += steps * plan.group_times;
      }
      correlate_rows(t, end - t, 1, lags);
      t = end;
    }
  }

  // A few steps at a time, so that their rows stay in the first-level cache for all lags.
  void correlate_rows(int64_t t, int64_t steps, int64_t times, int64_t lags) const {
    const int64_t few = std::max<int64_t>(2, STEP_BYTES / (times * plan.rows * plan.row * sizeof(Unit)));
    for (int64_t s = 0; s < steps; s += few)
      correlate_steps(t + s * times, std::min(few, steps - s), times, lags);
  }

  void correlate_steps(int64_t t, int64_t steps, int64_t times, int64_t lags) const {
    const int64_t rows = plan.rows, from = t + plan.lead - (lags - 1);
    const int64_t lefts = times * rows, rights = (lags - 1 + times) * rows;
    Sum* to = sums + (c.window - lags) * rows * plan.sum_columns * plan.lanes;
    const int64_t columns = plan.per_channel ? F::LANES : plan.row;
    for (int64_t at = 0; at < plan.row; at += columns)
      for (int64_t i = 0; i < lefts; i += i + 4 <= lefts ? 4 : 1)
        for (int64_t j = 0; j < rights; j += j + 4 <= rights ? 4 : 1) {
          const auto run = [&](auto tile) {
            tile(dy + (t * rows + i) * plan.row + at, x + (from * rows + j) * plan.row + at,
                 times * rows, steps, plan.row, columns,
                 to + (j * plan.sum_columns + i) * plan.lanes + (plan.per_channel ? at : 0),
                 plan.sum_columns, plan.lanes);
          };
          const bool many = i + 4 <= lefts, wide = j + 4 <= rights;
          if (many && wide) run(correlate_tile<F, 4, 4>);
          else if (many) run(correlate_tile<F, 4, 1>);
          else if (wide) run(correlate_tile<F, 1, 4>);
          else run(correlate_tile<F, 1, 1>);
        }
  }

  // Adds the sums of pairs of rows to those of the filters' gradient, which lie as the filters do.
  void add_sums(Sum* partial) const {
    std::fill_n(partial, plan.filter_sums, Sum(0));
    for (int64_t k = 0; k < plan.sum_rows; ++k)
      for (int64_t o = 0; o < plan.sum_columns; ++o) {
        const int64_t h = k % plan.rows, i = o % plan.rows;
        const int64_t lag = c.window - 1 + o / plan.rows - k / plan.rows;
        if (lag < 0 || lag >= c.window || std::max(i, h) >= plan.heads) continue;
        const Sum* from = sums + (k * plan.sum_columns + o) * plan.lanes;
        if (!plan.per_channel) partial[(lag * plan.heads + i) * plan.heads + h] += sum_lanes<F>(from);
        for (int64_t d = 0; plan.per_channel && d < plan.padded; ++d)
          partial[lag * plan.padded + d] += from[d];
      }
  }
};

}  // namespace
