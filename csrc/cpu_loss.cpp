#include "cpu_loss.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "simd.hpp"

namespace grpo {

using Sums = LossResult;  // of one sample

// One sample: where its tokens lie, and what its tokens share.
struct Row {
  int64_t start, end;
  float weight;       // of its tokens in the loss, the normalizer included
  float phi;          // vespo's weight
  float ratio;        // of the sequence level
  float ratio_slope;  // d (sum of its policy terms) / d (one log-ratio), sequence level
};

}  // namespace grpo

#define GRPO_KERNEL "loss_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialTokens = 1 << 14;  // fewer are done before a second thread has begun

bool in_loss(const LossInputs& in, int64_t sample) { return !in.in_loss || in.in_loss[sample]; }

int64_t row_start(const LossInputs& in, int64_t sample) {
  return in.cu_seqlens ? in.cu_seqlens[sample] : sample * in.row_length;
}

int64_t count_tokens(const LossInputs& in, int64_t sample) {
  const int64_t start = row_start(in, sample), end = row_start(in, sample + 1);
  // Most rows are without a hole, and memchr is several times as fast as a count.
  if (!in.mask || !std::memchr(in.mask + start, 0, end - start)) return end - start;
  return (end - start) - std::count(in.mask + start, in.mask + end, 0);
}

double default_normalizer(Reduction reduction, double max_length, int64_t samples, int64_t tokens) {
  const double some = static_cast<double>(std::max<int64_t>(samples, 1));
  if (reduction == Reduction::tokens) return static_cast<double>(std::max<int64_t>(tokens, 1));
  return reduction == Reduction::constant_length ? some * max_length : some;
}

// In the order of the samples, so that the number of threads changes nothing.
LossResult total(const LossInputs& in, const std::vector<Sums>& sums) {
  LossResult r;
  for (int64_t s = 0; s < in.samples; ++s) {
    if (!in_loss(in, s)) continue;
    r.loss += sums[s].loss;
    r.kl += sums[s].kl;
    r.ratio += sums[s].ratio;
    r.clip_low += sums[s].clip_low;
    r.clip_high += sums[s].clip_high;
    r.advantage_abs += sums[s].advantage_abs;
    r.nonfinite += sums[s].nonfinite;
    r.ratio_min = std::min(r.ratio_min, sums[s].ratio_min);
    r.ratio_max = std::max(r.ratio_max, sums[s].ratio_max);
    r.tokens += sums[s].tokens;
    ++r.samples;
  }
  return r;
}

}  // namespace

LossResult group_loss(const LossInputs& in, const LossOptions& o, float* dlogp) {
  const auto sample_loss = GRPO_BEST(any_sample_loss);
  std::vector<Sums> sums(static_cast<size_t>(in.samples));
  int64_t tokens = 0, samples = 0;
  const bool all_first = !in.normalizer && o.reduction == Reduction::tokens;
#pragma omp parallel for reduction( \
        + : tokens,                 \
            samples) if (all_first && in.mask && row_start(in, in.samples) > kSerialTokens)
  for (int64_t s = 0; s < in.samples; ++s) {
    if (!in_loss(in, s)) continue;
    ++samples;
    if (!all_first) continue;
    sums[s].tokens = count_tokens(in, s);
    tokens += sums[s].tokens;
  }
  const double normalizer = in.normalizer
                                ? *in.normalizer
                                : default_normalizer(o.reduction, o.max_length, samples, tokens);
#pragma omp parallel for schedule(dynamic, 16) if (row_start(in, in.samples) > kSerialTokens)
  for (int64_t s = 0; s < in.samples; ++s) {
    Row row{row_start(in, s), row_start(in, s + 1), 0, 0, 0, 0};
    if (!in_loss(in, s)) {
      std::fill(dlogp + row.start, dlogp + row.end, 0.0f);
      continue;
    }
    if (!all_first) sums[s].tokens = count_tokens(in, s);
    const double length = o.reduction == Reduction::sample_mean
                              ? static_cast<double>(std::max<int64_t>(sums[s].tokens, 1))
                              : 1.0;
    row.weight = static_cast<float>(1.0 / (length * normalizer));
    sample_loss(in, o, s, row, dlogp, sums[s]);
  }
  return total(in, sums);
}

}  // namespace grpo
