// A block of time of some channels of a head: its place in memory, its rows, its documents.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "numbers.h"
#include "tiles.h"

namespace {

template <class T, class IO> class Block {
 protected:
  const ConvolutionCall& c;
  int32_t *limits, *dx_limits;
  int64_t head, channel, channels;  // the column
  int64_t batch, first, count;      // the block

  explicit Block(const ConvolutionCall& call) : c(call) {}

  int64_t offset(const int64_t* strides, int64_t t) const {
    return batch * strides[0] + t * strides[1] + head * strides[2] + channel;
  }

  // Rows from time `from` on; zeros before the start and after the end.
  void load(Rows<T> rows, const void* source, const int64_t* strides, int64_t from, int64_t number) const {
    for (int64_t i = 0; i < number; ++i) {
      const int64_t t = from + i;
      const int64_t valid = t >= 0 && t < c.time ? channels : 0;
      if (valid) convert_row(static_cast<const IO*>(source) + offset(strides, t), rows[i], valid);
      for (int64_t d = valid; d < rows.width; ++d) rows[i][d] = T(0);
    }
  }

  // How many inputs of its own document each output sees.
  const int32_t* find_limits() {
    if (!c.positions) return nullptr;
    const int32_t* position = c.positions + batch * c.time + first;
    for (int64_t t = 0; t < count; ++t)
      limits[t] = int32_t(std::min<int64_t>(c.window, int64_t(position[t]) + 1));
    return limits;
  }

  // How many outputs of its own document see each input.
  const int32_t* find_dx_limits() {
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
};

}  // namespace
