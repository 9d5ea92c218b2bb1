#include "cpu_head.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "simd.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace grpo {

constexpr int kBlock = 256;  // columns that go through the cache together

// What a thread keeps of a row.
struct Workspace {
  std::vector<float> block_max, peaks;             // [blocks]
  std::vector<float> slopes;                       // [columns], filled up to whole blocks
  std::vector<std::pair<float, int64_t>> largest;  // logit and column

  explicit Workspace(int64_t columns)
      : block_max((columns + kBlock - 1) / kBlock),
        peaks(block_max.size()),
        slopes(block_max.size() * kBlock) {}
};

struct RowMap {
  const float* bias;
  float inv_temperature, softcap, logit_scale;
};

}  // namespace grpo

#define GRPO_KERNEL "head_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialLogits = 1 << 15;  // fewer are done before a second thread has begun

RowMap row_map(const LogitMap& m, int64_t row) {
  return {m.bias, m.inv_temperature[row], m.softcap, m.logit_scale};
}

}  // namespace

void softmax_rows(const Tile& t, const LogitMap& map, bool gradient, const RowStats& out) {
  const auto softmax_row = GRPO_BEST(any_softmax_row);
#pragma omp parallel if (t.rows * t.columns > kSerialLogits)
  {
    Workspace w(t.columns);
#pragma omp for schedule(dynamic, 4)
    for (int64_t row = 0; row < t.rows; ++row) {
      softmax_row(t, row, row_map(map, row), gradient, out, w);
    }
  }
}

void gradient_rows(const Tile& t, const LogitMap& map, const float* lse, const float* logp,
                   const float* upstream) {
  const auto gradient_row = GRPO_BEST(any_gradient_row);
#pragma omp parallel for schedule(dynamic, 4) if (t.rows * t.columns > kSerialLogits)
  for (int64_t row = 0; row < t.rows; ++row) {
    gradient_row(t, row, row_map(map, row), lse[row], logp[row], upstream[row]);
  }
}

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = address + static_cast<uintptr_t>(bytes);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a hint
#endif
}

void accumulate(float* sum, const void* x, Dtype dtype, int64_t count) {
  const auto add = GRPO_BEST(any_add_to);
  constexpr int64_t kChunk = 1 << 14;
#pragma omp parallel for
  for (int64_t first = 0; first < count; first += kChunk) {
    add(sum, x, dtype, first, std::min(kChunk, count - first));
  }
}

}  // namespace grpo
