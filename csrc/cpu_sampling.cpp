#include "cpu_sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.hpp"

namespace grpo {

constexpr int kBlock = 512;  // columns with a maximum and a sum of their own

// What a thread keeps of a row, and between calls: fresh pages cost as much as the sums.
struct Scratch {
  std::vector<float> block_max;    // [blocks]
  std::vector<double> block_mass;  // [blocks]
  std::vector<float> logits;       // [columns], where they aren't those that were given
  std::vector<float> weights;      // [columns], filled up to whole blocks; for the filters
  std::vector<float> maxima;
  std::vector<std::pair<float, int64_t>> candidates;  // logit and token

  void fit(int64_t columns) {
    block_max.resize((columns + kBlock - 1) / kBlock);
    block_mass.resize(block_max.size());
    logits.resize(columns);
    weights.resize(block_max.size() * kBlock);
  }
};

struct Filters {
  int64_t top_k;
  double top_p, min_p, penalty;
  const uint8_t* seen;

  bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

}  // namespace grpo

#define GRPO_KERNEL "sampling_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialLogits = 1 << 15;  // fewer are done before a second thread has begun

template <typename T>
T at_row(const T* values, int64_t row, T off) {
  return values ? values[row] : off;
}

Filters filters_of(const Sampling& in, int64_t row) {
  return {at_row<int64_t>(in.top_k, row, 0), at_row(in.top_p, row, 1.0), at_row(in.min_p, row, 0.0),
          at_row(in.penalty, row, 1.0), in.seen ? in.seen + row * in.columns : nullptr};
}

}  // namespace

int64_t sample_rows(const Sampling& in, const Draws& out) {
  const auto draw_row = GRPO_BEST(any_draw_row);
  int64_t failed = in.rows;
#pragma omp parallel if (in.rows > 1 && in.rows * in.columns > kSerialLogits)
  {
    static thread_local Scratch w;
    w.fit(in.columns);
#pragma omp for schedule(dynamic) reduction(min : failed)
    for (int64_t row = 0; row < in.rows; ++row) {
      if (!draw_row(in, row, filters_of(in, row), out, w)) failed = std::min(failed, row);
    }
  }
  return failed == in.rows ? -1 : failed;
}

}  // namespace grpo
