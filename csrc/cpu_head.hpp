// The passes over rows of logits between the GEMMs of the head: the twin of kernels/head_rows.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace grpo {

// A tile of raw logits a = h . W_v, of the columns from `first_column` on; replaced in place.
struct Tile {
  void* data;          // [rows, columns]
  const void* hidden;  // [rows, width]
  const void* weight;  // [columns, width]
  Dtype dtype;         // of all three
  int64_t rows, columns, width, first_column;
  const int64_t* targets;  // [rows]
};

// z = softcap((a + bias) logit_scale) inv_temperature; softcap(x) = c tanh(x / c)
struct LogitMap {
  const float* bias;             // [columns] or null
  const float* inv_temperature;  // [rows]
  float softcap;                 // 0: none
  float logit_scale;
};

struct RowStats {
  float *logp, *entropy, *lse, *target_weight;  // [rows]
};

// The statistics of whole rows (first_column 0). With `gradient` the tile becomes
// p_v dz_v/da_v, 0 at the target, whose own weight (1 - p_y) dz_y/da_y goes to target_weight.
// Half-precision logits of the target and of the 64 largest are made again in float32.
void softmax_rows(const Tile& tile, const LogitMap& map, bool gradient, const RowStats& out);

// The tile becomes upstream dz_v/da_v (1[v == target] - p_v), with p_v from the row's lse.
// Half-precision logits with p_v above 1/256 are made again in float32.
void gradient_rows(const Tile& tile, const LogitMap& map, const float* lse, const float* logp,
                   const float* upstream);

// Asks for 2 MiB pages: touching a fresh tile by 4 KiB pages costs a tenth of its GEMM.
void prefer_huge_pages(void* data, int64_t bytes);

// sum [count] += x, widened.
void accumulate(float* sum, const void* x, Dtype dtype, int64_t count);

}  // namespace grpo
