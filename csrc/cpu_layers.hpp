// The small parts of a decoder layer, each rounded where transformers' own ops round.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace grpo {

struct RmsNorm {
  const void *x, *weight;  // [rows, width], [width]
  void* out;               // [rows, width]
  Dtype dtype;             // of all three
  int64_t rows, width;
  float epsilon;
  bool gemma;  // times 1 + weight in float32, instead of the rounded number times weight
};
void rms_norm(const RmsNorm& norm);

enum class Activation { silu, gelu_tanh };

struct Gated {
  const void *gate, *up;  // [count]
  void* out;              // [count], may be gate or up
  Dtype dtype;            // of all three
  int64_t count;
  Activation activation;
};
// out = activation(gate) * up
void gated(const Gated& in);

struct Rotation {
  void* x;                // [rows, heads, dim], rotated in place
  const void *cos, *sin;  // [rows, dim]
  Dtype dtype;            // of all three
  int64_t rows, heads, dim;
};
// The first half of a head is the real part, the second the imaginary one.
void rotate(const Rotation& in);

}  // namespace grpo
