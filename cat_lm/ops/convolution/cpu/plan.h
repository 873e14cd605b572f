// How a call is cut into items, and the sizes of buffers; depends on shapes alone, never on threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "tiles.h"

namespace {

constexpr int64_t WIDEST = 96;   // channels of an item at most, if each has its own filter
constexpr int64_t ITEMS = 128;   // items to aim at: work for many threads, little memory for sums

constexpr int64_t STEP_BYTES = 1 << 13;  // of dy, in the first-level cache with as much of x
constexpr int64_t BLOCK_BYTES = 1 << 14;  // of a head's rows, in the first-level cache; heads that mix
                                          // read their rows more often, from the second
constexpr int64_t AHEAD = 16;    // rows by which memory is read ahead

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

template <class F> struct Plan {
  bool per_channel;
  int64_t columns, column;  // columns of a head, and the channels of one
  int64_t heads, groups;    // the heads of a group, which are all or one, and the groups
  int64_t rows;             // rows of a buffer for each time: the heads of a group, and one of zeros
  int64_t times, outputs;   // a step's: it begins with a whole unit
  int64_t lead, inputs;     // times read before (or after) a step, and the units that a step reads
  int64_t padded, row;      // channels, and the units that hold a time of them
  int64_t length, blocks, per_item, segments;  // of time
  int64_t group_times, sum_rows, sum_columns, lanes;  // of the sums of dF
  int64_t filter_sums, partial;  // numbers in an item's sums: dF, and then dbias
  int64_t buffer, taps, sums, scratch;

  explicit Plan(const ConvolutionCall& c) {
    per_channel = c.kind == CHANNEL;
    columns = per_channel ? (c.width + WIDEST - 1) / WIDEST : 1;
    column = round_up((c.width + columns - 1) / columns, 16);
    heads = c.kind == PAIR ? c.heads : 1;
    groups = c.heads / heads * columns;
    rows = heads > 1 ? round_up(heads, F::PAIR) : 1;
    times = rows % F::PAIR ? F::PAIR : 1;
    outputs = times * rows;
    lead = round_up((c.window - 1) * rows, F::PAIR) / rows;
    inputs = (lead + times) * rows / F::PAIR;
    padded = round_up(std::min(c.width, column), F::LANES * F::PAIR);
    row = padded / F::PAIR;
    const int64_t fitting = BLOCK_BYTES / (row * int64_t(sizeof(typename F::Unit))) / 4 * 4;
    length = std::min(c.time, std::max<int64_t>(rows > 1 ? 64 : 32, fitting));
    blocks = (c.time + length - 1) / length;
    per_item = std::max<int64_t>(1, c.batch * blocks * groups / ITEMS);
    segments = (c.batch * blocks + per_item - 1) / per_item;
    group_times = std::max<int64_t>(1, 4 / rows);
    sum_columns = group_times * rows;
    sum_rows = (c.window - 1 + group_times) * rows;
    lanes = per_channel ? padded : F::LANES;
    filter_sums = c.window * (per_channel ? padded : heads * heads);
    partial = filter_sums + heads * padded;
    buffer = (round_up(length, times) + lead) * rows * row;
    taps = round_up(inputs * outputs * (per_channel ? padded : 1), F::LANES);
    sums = c.filter_gradient ? sum_rows * sum_columns * lanes : 0;
    scratch = 3 * buffer + 2 * taps + sums + round_up(2 * length, F::LANES) +
              (std::max<int64_t>(4, outputs) + outputs + rows + 1) * padded;
  }
};

}  // namespace
