#include "cpu_linear.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "block.hpp"
#include "simd.hpp"

namespace grpo {

constexpr int64_t kColumns = 32;    // of a block: its weights stay in the L2 cache,
constexpr int64_t kDepth = 1024;    // so many numbers of each at a time
constexpr int64_t kMostRows = 512;  // that share a block

// Rows [first, first + count) of x as floats, `stride` apart.
struct FloatRows {
  const float* data;
  int64_t stride, first, count;
};

}  // namespace grpo

#define GRPO_KERNEL "linear_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialProducts = 1 << 17;  // fewer are done before a second thread has begun

}  // namespace

void linear(const Linear& layer) {
  const auto widen = GRPO_BEST(any_widen);
  const auto block = GRPO_BEST(any_block);
  const bool widens = layer.dtype != Dtype::float32;
  const int64_t blocks = (layer.columns + kColumns - 1) / kColumns;
  thread_local Memory rows_memory;
  float* floats = nullptr;
  if (widens) floats = rows_memory.reserve(std::min(kMostRows, layer.rows) * layer.width);
  const bool parallel = layer.rows * layer.width * layer.columns > kSerialProducts;
  for (int64_t first = 0; first < layer.rows; first += kMostRows) {
    FloatRows x{floats, layer.width, first, std::min(kMostRows, layer.rows - first)};
    if (!widens) {
      x.data = static_cast<const float*>(layer.x) + first * layer.x_stride;
      x.stride = layer.x_stride;
    }
#pragma omp parallel if (parallel)
    {
      if (widens) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < x.count; ++i) widen(layer, first + i, floats + i * layer.width);
      }
      thread_local Memory memory;
      float* scratch = memory.reserve(kColumns * (kDepth + x.count));
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < blocks; ++i) block(layer, x, i * kColumns, scratch);
    }
  }
}

bool has_bfloat16_units() {
#ifdef GRPO_HAS_ISA
  return __builtin_cpu_supports("avx512bf16");
#else
  return true;  // of other CPUs nothing is known: PyTorch's own is left alone
#endif
}

}  // namespace grpo
