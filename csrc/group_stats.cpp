#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_loss.hpp"

namespace grpo {
namespace {

double mean_of(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

double std_of(const std::vector<double>& x, int ddof) {
  if (static_cast<int>(x.size()) <= ddof) return 0;
  const double mean = mean_of(x);
  double squares = 0;
  for (double v : x) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(x.size() - ddof));
}

double median_of(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

bool counts(const Groups& g, int64_t sample) {
  return (!g.valid || g.valid[sample]) && std::isfinite(g.rewards[sample]);
}

// The valid rewards of the samples [first, last).
void gather(const Groups& g, int64_t first, int64_t last, std::vector<double>& out) {
  out.clear();
  for (int64_t s = first; s < last; ++s) {
    if (counts(g, s)) out.push_back(g.rewards[s]);
  }
}

// Equal rewards are compared as values: rounding of the mean must not become an advantage.
bool has_signal(const std::vector<double>& x, double std, double min_std) {
  if (x.size() < 2) return false;
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  return *low != *high && std > min_std;
}

}  // namespace

void group_advantages(const Groups& g, const LossOptions& o, float* advantages, uint8_t* signal) {
  std::fill(advantages, advantages + g.samples, 0.0f);
  std::vector<double> x;
  double batch_std = 0;
  if (o.scale == Scale::batch) {
    gather(g, 0, g.samples, x);
    batch_std = std_of(x, o.ddof);
  }
  for (int64_t group = 0; group < g.groups; ++group) {
    const int64_t first = g.cu_groups[group], last = g.cu_groups[group + 1];
    gather(g, first, last, x);
    const double group_std = std_of(x, o.ddof);
    signal[group] = has_signal(x, group_std, o.min_std);
    if (!signal[group]) continue;
    const double mean = mean_of(x), n = static_cast<double>(x.size());
    const double center = o.baseline == Baseline::median ? median_of(x) : mean;
    const double divisor = o.scale == Scale::none
                               ? 1.0
                               : (o.scale == Scale::batch ? batch_std : group_std) + o.epsilon_std;
    for (int64_t s = first; s < last; ++s) {
      if (!counts(g, s)) continue;
      const double r = g.rewards[s];
      const double base = o.baseline == Baseline::loo ? (mean * n - r) / (n - 1) : center;
      const double a = (r - base) / divisor;
      advantages[s] = static_cast<float>(std::clamp(a, -o.advantage_clip, o.advantage_clip));
    }
  }
}

}  // namespace grpo
