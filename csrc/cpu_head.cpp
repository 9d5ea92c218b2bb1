#include "cpu_head.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "simd.hpp"

namespace grpo {

constexpr int kBlock = 256;  // columns whose maximum is kept

struct Workspace {
  std::vector<float> z, block_max;
  std::vector<float> order;
  std::vector<int64_t> largest;
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

RowMap row_map(const LogitMap& m, int64_t row) {
  return {m.bias, m.inv_temperature[row], m.softcap, m.logit_scale};
}

}  // namespace

void softmax_rows(const Tile& t, const LogitMap& map, bool gradient, const RowStats& out) {
  const auto softmax_row = GRPO_BEST(any_softmax_row);
#pragma omp parallel
  {
    Workspace w;
    w.z.resize(t.columns);
    w.block_max.resize((t.columns + kBlock - 1) / kBlock);
#pragma omp for schedule(dynamic, 4)
    for (int64_t row = 0; row < t.rows; ++row) {
      softmax_row(t, row, row_map(map, row), gradient, out, w);
    }
  }
}

void gradient_rows(const Tile& t, const LogitMap& map, const float* lse, const float* logp,
                   const float* upstream) {
  const auto gradient_row = GRPO_BEST(any_gradient_row);
#pragma omp parallel for schedule(dynamic, 4)
  for (int64_t row = 0; row < t.rows; ++row) {
    gradient_row(t, row, row_map(map, row), lse[row], logp[row], upstream[row]);
  }
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
