// One token drawn from each row of logits: the twin of kernels/sampling.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace grpo {

// What the rows are drawn with; a null filter is off, and so is its neutral value in a row.
struct Sampling {
  const void* logits;  // [rows, columns]
  Dtype dtype;         // of the logits
  int64_t rows, columns;
  const double* uniform;      // [rows], in [0, 1)
  const double* temperature;  // [rows]; 0: greedy
  const int64_t* top_k;       // [rows]; 0: off
  const double* top_p;        // [rows]; 1: off
  const double* min_p;        // [rows]; 0: off
  const double* penalty;      // [rows]; 1: off
  const uint8_t* seen;        // [rows, columns]; what the penalty is for
};

struct Draws {
  int64_t* tokens;                       // [rows]
  float *logp_sampler, *logp_processed;  // [rows]
};

// Draws by the inverse of the distribution function in the order of the tokens, after penalty,
// temperature, min-p, top-k and top-p. Bits don't depend on the number of rows or threads.
// Returns the first row that is no distribution (NaN, +inf, or all -inf), else -1.
int64_t sample_rows(const Sampling& in, const Draws& out);

}  // namespace grpo
