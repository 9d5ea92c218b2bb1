// min-p, top-k and top-p as one bound on the logits, found without sorting them.

#include "sampling_row.inl"

constexpr int64_t kFew = 512;  // candidates that are sorted rather than narrowed down
constexpr int kHalvings = 12;  // of an interval's width, before those of its floats

// Of the logits from some bound on.
struct Measure {
  int64_t count = 0;
  double mass = 0;
};

// The sum of the weights that are left; fills w.block_mass.
double sum_kept(const Row& row, const Cut& cut, Scratch& w) {
  double total = 0;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    Floats sum{};
    const bool some = w.block_max[block] >= cut.least;
    for (int64_t at = block * kBlock; some && at < row.end_of(block); at += kLanes) {
      const Mask left = kept(cut, load_logits(row, at), at);
      sum += select(left, load_as_floats(&w.weights[at]), Floats{});
    }
    w.block_mass[block] = sum_of(sum);
    total += w.block_mass[block];
  }
  return total;
}

Measure at_least(const Row& row, float bound, const Scratch& w) {
  const float* e = w.weights.data();
  Mask count{};
  Doubles mass{};
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (!(w.block_max[block] >= bound)) continue;
    Floats sum{};
    for (int64_t at = block * kBlock; at < row.end_of(block); at += kLanes) {
      const Mask above = load_logits(row, at) >= bound;
      sum += select(above, load_as_floats(e + at), Floats{});
      count -= above;
    }
    mass += __builtin_convertvector(sum, Doubles);
  }
  Measure found;
  for (int i = 0; i < kLanes; ++i) {
    found.count += count[i];
    found.mass += mass[i];
  }
  return found;
}

// Floats as integers of the same order.
GRPO_INLINE int64_t rank_of(float x) {
  const int32_t bits = bits_as<int32_t>(x);
  return bits >= 0 ? bits : -static_cast<int64_t>(bits & 0x7fffffff);
}
GRPO_INLINE float of_rank(int64_t rank) {
  const auto bits = static_cast<uint32_t>(rank >= 0 ? rank : -rank | 0x80000000);
  return bits_as<float>(bits);
}

float between(float low, float high, int step) {
  const float middle = low / 2 + high / 2;
  if (step < kHalvings && low < middle && middle < high) return middle;
  return of_rank((rank_of(low) + rank_of(high)) >> 1);
}

// The tokens that `cut` leaves with low <= z < high, best first, ties by their ids.
void collect(const Row& row, const Cut& cut, float low, float high, Scratch& w) {
  w.candidates.clear();
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (!(w.block_max[block] >= low)) continue;
    for (int64_t at = block * kBlock; at < row.end_of(block); at += kLanes) {
      const Floats z = load_logits(row, at);
      const Mask found = kept(cut, z, at) & (z >= low) & (z < high);
      if (!any(found)) continue;
      for (int i = 0; i < kLanes; ++i) {
        if (found[i]) w.candidates.push_back({z[i], at + i});
      }
    }
  }
  std::stable_sort(w.candidates.begin(), w.candidates.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
}

// The fewest best tokens of `cut` that reach `target`: tokens, or mass. Fewer than all do, and
// those with z >= low do.
template <typename Size>
Cut shrink(const Row& row, const Cut& cut, float low, double target, Size size, Scratch& w) {
  Measure from_low = at_least(row, low, w), from_high;
  float high = of_rank(rank_of(row.peak) + 1);
  for (int step = 0; from_low.count - from_high.count > kFew; ++step) {
    if (rank_of(high) - rank_of(low) <= 1) break;
    const float middle = between(low, high, step);
    const Measure from_middle = at_least(row, middle, w);
    const bool enough = size(from_middle) >= target;
    (enough ? low : high) = middle;
    (enough ? from_low : from_high) = from_middle;
  }
  collect(row, cut, low, high, w);
  Cut shrunk = cut;
  for (const auto& [z, token] : w.candidates) {
    shrunk = {z, token};
    ++from_high.count;
    from_high.mass += w.weights[token];
    if (size(from_high) >= target) break;
  }
  return shrunk;
}

// The k-th largest block maximum has k logits from it on.
float bound_of_count(const Row& row, int64_t k, Scratch& w) {
  if (k > row.blocks()) return kLowest;
  w.maxima.assign(w.block_max.begin(), w.block_max.begin() + row.blocks());
  std::nth_element(w.maxima.begin(), w.maxima.begin() + (k - 1), w.maxima.end(), std::greater<>());
  return w.maxima[k - 1];
}

Cut keep_count(const Row& row, const Cut& cut, int64_t k, Scratch& w) {
  if (k <= 0 || k >= row.columns) return cut;
  if (at_least(row, cut.least, w).count <= k) return cut;
  const float low = std::max(cut.least, bound_of_count(row, k, w));
  const auto size = [](const Measure& m) { return static_cast<double>(m.count); };
  return shrink(row, cut, low, static_cast<double>(k), size, w);
}

Cut keep_mass(const Row& row, const Cut& cut, double top_p, double total, Scratch& w) {
  if (top_p >= 1) return cut;
  // All tokens below weigh less than half of what may be cut.
  const double light = 0.5 * (1 - top_p) * total / static_cast<double>(row.columns);
  const auto bound = static_cast<float>(row.peak + std::log(light) / row.inv_temperature);
  const auto size = [](const Measure& m) { return m.mass; };
  return shrink(row, cut, std::max(cut.least, bound), top_p * total, size, w);
}

// The first float that is no less than x.
float float_from(double x) {
  const auto rounded = static_cast<float>(x);
  return rounded < x ? of_rank(rank_of(rounded) + 1) : rounded;
}

Cut keep_likely(const Row& row, double min_p, double temperature) {
  const double least = row.peak + std::log(min_p) * temperature;
  return {least > kLowest ? float_from(least) : kLowest, row.columns - 1};
}

// Cuts the row by its filters; returns the mass that is left.
double filter(const Row& row, const Filters& filters, double temperature, Cut& cut, Scratch& w) {
  if (filters.min_p > 0) cut = keep_likely(row, filters.min_p, temperature);
  cut = keep_count(row, cut, filters.top_k, w);
  const double total = sum_kept(row, cut, w);
  if (filters.top_p >= 1) return total;
  cut = keep_mass(row, cut, filters.top_p, total, w);
  return sum_kept(row, cut, w);
}
