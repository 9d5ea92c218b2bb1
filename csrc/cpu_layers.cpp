#include "cpu_layers.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "simd.hpp"

#define GRPO_KERNEL "layer_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialNumbers = 1 << 15;  // fewer are done before a second thread has begun
constexpr int64_t kPart = 1 << 12;           // numbers

}  // namespace

void rms_norm(const RmsNorm& norm) {
  const auto norm_row = GRPO_BEST(any_norm_row);
#pragma omp parallel for if (norm.rows * norm.width > kSerialNumbers)
  for (int64_t row = 0; row < norm.rows; ++row) norm_row(norm, row);
}

void gated(const Gated& in) {
  const auto gated_part = GRPO_BEST(any_gated_part);
#pragma omp parallel for if (in.count > kSerialNumbers)
  for (int64_t first = 0; first < in.count; first += kPart) {
    gated_part(in, first, std::min(kPart, in.count - first));
  }
}

void rotate(const Rotation& in) {
  const auto rotate_row = GRPO_BEST(any_rotate_row);
#pragma omp parallel for if (in.rows * in.heads * in.dim > kSerialNumbers)
  for (int64_t row = 0; row < in.rows; ++row) rotate_row(in, row);
}

}  // namespace grpo
