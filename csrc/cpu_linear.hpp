// Linear layers of half-precision numbers on a CPU that has no arithmetic for them.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace grpo {

// out = x weight^T + bias, summed in float32 and rounded once.
struct Linear {
  const void* x;       // [rows, width], rows `x_stride` apart
  const void* weight;  // [columns, width]
  const void* bias;    // [columns] or null
  void* out;           // [rows, columns]
  Dtype dtype;         // of all four
  int64_t x_stride, rows, width, columns;
};

// The bits of a row hang neither on the other rows nor on the number of threads.
void linear(const Linear& layer);

// Whether this CPU multiplies bfloat16 itself, so that PyTorch's own linear is fast.
bool has_bfloat16_units();

}  // namespace grpo
