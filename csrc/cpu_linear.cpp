#include "cpu_linear.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "block.hpp"
#include "simd.hpp"

namespace grpo {

constexpr int64_t kDepth = 256;     // of a block of weights: as floats it stays in the L2 cache
constexpr int64_t kMostRows = 512;  // that share a block

}  // namespace grpo

#define GRPO_KERNEL "linear_kernel.inl"
#include "each_isa.inl"

namespace grpo {

// Rows by rows, so that a few thousand of them as floats don't fill the memory.
void linear(const Linear& layer) {
  const auto widen = GRPO_BEST(any_widen);
  const auto block = GRPO_BEST(any_block);
  const int64_t blocks = (layer.columns + kBlock - 1) / kBlock;
  thread_local Memory rows_memory;
  float* rows = rows_memory.reserve(std::min(kMostRows, layer.rows) * layer.width);
  for (int64_t first = 0; first < layer.rows; first += kMostRows) {
    const int64_t count = std::min(kMostRows, layer.rows - first);
#pragma omp parallel
    {
      thread_local Memory memory;
      float* scratch = memory.reserve(kBlock * (2 * kDepth + count));
#pragma omp for schedule(static)
      for (int64_t row = 0; row < count; ++row) widen(layer, first + row, rows + row * layer.width);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < blocks; ++i) block(layer, first, count, i * kBlock, rows, scratch);
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
