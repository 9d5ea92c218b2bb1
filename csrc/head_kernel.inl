// The passes over one row of logits; compiled by cpu_head.cpp for each instruction set.

constexpr size_t kRefined = 64;               // logits of a row that are made again in float32,
constexpr float kRefinedShare = 1.0f / 1024;  // if they weigh so much of all but the target

// z of the columns [column, column + count), from raw logits.
GRPO_INLINE Floats logits(const RowMap& m, Floats a, int64_t column, int64_t count) {
  Floats x = (m.bias ? a + load_some(m.bias + column, count) : a) * m.logit_scale;
  if (m.softcap != 0) {
    const Floats e = exp_bounded(clamp(x * (2 / m.softcap), -40.0f, 40.0f));
    x = m.softcap * (1 - 2 / (e + 1));
  }
  return x * m.inv_temperature;
}

GRPO_INLINE float logit(const RowMap& m, float a, int64_t column) {
  return logits(m, splat<Floats>(a), column, 1)[0];
}

// d z / d a, from z itself: tanh is z over its bound.
template <typename X>
GRPO_INLINE X slope(const RowMap& m, X z) {
  const float whole = m.logit_scale * m.inv_temperature;
  if (m.softcap == 0) return splat<X>(whole);
  const X t = z * (1 / (m.softcap * m.inv_temperature));
  return whole * (1 - t * t);
}

template <typename T>
GRPO_INLINE float dot(const T* a, const T* b, int64_t n) {
  Floats sum{};
  for (int64_t i = 0; i < n; i += kLanes) sum += load_some(a + i, n - i) * load_some(b + i, n - i);
  return sum_of(sum);
}

// One logit in float32, from its row of the weight.
template <typename T>
float exact_logit(const Tile& t, int64_t row, const RowMap& m, int64_t v) {
  const T* h = static_cast<const T*>(t.hidden) + row * t.width;
  const T* weight = static_cast<const T*>(t.weight) + v * t.width;
  return logit(m, dot(h, weight, t.width), v);
}

// With e = e^(z - peak): sum e and sum e (z - peak) over a row, its target left out: what remains
// beside a target of probability near 1 would be rounding.
struct RowSums {
  float peak = -3.4e38f;
  double sum = 0, weighted = 0;

  void raise(float higher) {
    const double down = static_cast<double>(peak) - higher, factor = std::exp(down);
    weighted = (weighted + sum * down) * factor;
    sum *= factor;
    peak = higher;
  }

  void add(float z, double sign) {
    const double below = static_cast<double>(z) - peak, e = std::exp(below);
    sum += sign * e;
    weighted += sign * e * below;
  }
};

// One sweep: adds up the row block by block, each under the highest peak so far. With `gradient`
// w.slopes becomes e dz/da, and w.peaks the peak of a block.
template <typename T, bool gradient>
RowSums sum_row(const T* a, int64_t n, int64_t target, const RowMap& map, Workspace& w) {
  const RowMap m = map;  // a copy: what the stores might alias would be read again each time
  RowSums sums;
  alignas(64) float z[kBlock];
  for (int64_t block = 0, at = 0; at < n; ++block, at += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, n - at);
    Floats most = splat<Floats>(-kInfinity);
    for (int64_t v = 0; v < count; v += kLanes) {
      Floats some = logits(m, load_some(a + at + v, count - v), at + v, count - v);
      for (int64_t i = count - v; i < kLanes; ++i) some[i] = -kInfinity;
      if (const int64_t own = target - at - v; own >= 0 && own < kLanes) some[own] = -kInfinity;
      store_floats(z + v, some);
      most = select(some > most, some, most);
    }
    w.block_max[block] = max_of(most);
    if (w.block_max[block] > sums.peak) sums.raise(w.block_max[block]);
    w.peaks[block] = sums.peak;
    const float peak = sums.peak;
    Floats e_sum{}, ez_sum{};
    for (int64_t v = 0; v < count; v += kLanes) {
      const Floats some = load_as_floats(z + v), raw = some - peak;
      const Floats below = select(raw < -87.0f, splat<Floats>(-87.0f), raw);  // 0 * -inf is NaN
      const Floats e = exp_bounded(below);
      e_sum += e;
      ez_sum += e * below;
      if constexpr (gradient) store_floats(&w.slopes[at + v], e * slope(m, some));
    }
    sums.sum += sum_of(e_sum);
    sums.weighted += sum_of(ez_sum);
  }
  return sums;
}

// The columns of the largest logits beside the target that weigh: at most kRefined.
template <typename T>
void find_largest(const T* a, int64_t n, int64_t target, const RowMap& m, const RowSums& sums,
                  Workspace& w) {
  const float least = sums.peak + static_cast<float>(std::log(sums.sum * kRefinedShare));
  w.largest.clear();
  for (int64_t block = 0, at = 0; at < n; ++block, at += kBlock) {
    if (!(w.block_max[block] >= least)) continue;
    for (int64_t v = at; v < std::min(n, at + kBlock); v += kLanes) {
      const Floats z = logits(m, load_some(a + v, n - v), v, n - v);
      if (!(max_of(z) >= least)) continue;
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, n - v); ++i) {
        if (z[i] >= least && v + i != target) w.largest.push_back({z[i], v + i});
      }
    }
  }
  if (w.largest.size() <= kRefined) return;
  std::nth_element(w.largest.begin(), w.largest.begin() + kRefined, w.largest.end(),
                   std::greater<>());
  w.largest.resize(kRefined);
}

// Makes the logits again that weigh, in the sums and in w.slopes.
template <typename T, bool gradient>
void refine(const Tile& t, int64_t row, const T* a, const RowMap& m, RowSums& sums, Workspace& w) {
  find_largest(a, t.columns, t.targets[row], m, sums, w);
  for (const auto& [rounded, v] : w.largest) {
    const float z = exact_logit<T>(t, row, m, v);
    sums.add(rounded, -1);
    sums.add(z, 1);
    if constexpr (gradient) w.slopes[v] = std::exp(z - w.peaks[v / kBlock]) * slope(m, z);
  }
  sums.sum = std::max(sums.sum, 0.0);  // one weight, subtracted and added, may leave rounding
}

template <typename T, bool gradient>
void softmax_row(const Tile& t, int64_t row, const RowMap& m, const RowStats& out, Workspace& w) {
  T* a = static_cast<T*>(t.data) + row * t.columns;
  const int64_t target = t.targets[row];
  RowSums sums = sum_row<T, gradient>(a, t.columns, target, m, w);
  float target_z = logit(m, load_some(a + target, 1)[0], target);
  if constexpr (sizeof(T) == 2) {
    refine<T, gradient>(t, row, a, m, sums, w);
    target_z = exact_logit<T>(t, row, m, target);
  }
  if (target_z > sums.peak) sums.raise(target_z);
  const double others = sums.sum, below = static_cast<double>(target_z) - sums.peak;
  sums.add(std::max(target_z, -3.4e38f), 1);
  const double log_sum = std::log(sums.sum), own = std::exp(below);
  const double logp = own > others ? -std::log1p(others / own) : below - log_sum;
  out.logp[row] = static_cast<float>(logp);
  out.lse[row] = static_cast<float>(sums.peak + log_sum);
  out.entropy[row] = static_cast<float>(log_sum - sums.weighted / sums.sum);
  if constexpr (!gradient) return;
  out.target_weight[row] = static_cast<float>(others / sums.sum) * slope(m, target_z);
  for (int64_t block = 0, at = 0; at < t.columns; ++block, at += kBlock) {
    const double down = static_cast<double>(w.peaks[block]) - sums.peak;
    const float scale = static_cast<float>(std::exp(down) / sums.sum);
    for (int64_t v = at; v < std::min(t.columns, at + kBlock); v += kLanes) {
      store_some(a + v, load_as_floats(&w.slopes[v]) * scale, t.columns - v);
    }
  }
  store_some(a + target, Floats{}, 1);
}

template <typename T>
void gradient_row(const Tile& t, int64_t row, const RowMap& map, float lse, float logp,
                  float upstream) {
  const RowMap m = map;
  T* a = static_cast<T*>(t.data) + row * t.columns;
  const float others = std::max(-std::expm1(logp), 1e-7f);  // at 0 every column would weigh
  const float least = lse + std::log(kRefinedShare * others);
  alignas(64) float gradient[kBlock];
  for (int64_t at = 0; at < t.columns; at += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, t.columns - at);
    Floats most = splat<Floats>(-kInfinity);
    for (int64_t v = 0; v < count; v += kLanes) {
      const Floats z = logits(m, load_some(a + at + v, count - v), at + v, count - v);
      const Floats below = z - lse;
      const Floats p = exp_bounded(select(below < -87.0f, splat<Floats>(-87.0f), below));
      most = select(z > most, z, most);
      store_floats(gradient + v, -upstream * slope(m, z) * p);
    }
    const bool refined = sizeof(T) == 2 && max_of(most) >= least;
    for (int64_t v = 0; refined && v < count; v += kLanes) {
      const Floats z = logits(m, load_some(a + at + v, count - v), at + v, count - v);
      if (!(max_of(z) >= least)) continue;
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, count - v); ++i) {
        if (!(z[i] >= least) || at + v + i + t.first_column == t.targets[row]) continue;
        const float exact = exact_logit<T>(t, row, m, at + v + i);
        gradient[v + i] = -upstream * slope(m, exact) * std::exp(exact - lse);
      }
    }
    for (int64_t v = 0; v < count; v += kLanes) {
      store_some(a + at + v, load_as_floats(gradient + v), count - v);
    }
  }
  const int64_t target = t.targets[row] - t.first_column;
  if (target < 0 || target >= t.columns) return;
  const float own = upstream * slope(m, logp + lse) * -std::expm1(logp);
  store_some(a + target, splat<Floats>(own), 1);
}

template <typename T>
void softmax_row(const Tile& t, int64_t row, const RowMap& m, bool gradient, const RowStats& out,
                 Workspace& w) {
  if (gradient) return softmax_row<T, true>(t, row, m, out, w);
  softmax_row<T, false>(t, row, m, out, w);
}

void any_softmax_row(const Tile& t, int64_t row, const RowMap& m, bool gradient,
                     const RowStats& out, Workspace& w) {
  switch (t.dtype) {
    case Dtype::float32:
      return softmax_row<float>(t, row, m, gradient, out, w);
    case Dtype::bfloat16:
      return softmax_row<BFloat16>(t, row, m, gradient, out, w);
    case Dtype::float16:
      return softmax_row<Float16>(t, row, m, gradient, out, w);
  }
}

void any_gradient_row(const Tile& t, int64_t row, const RowMap& m, float lse, float logp,
                      float upstream) {
  switch (t.dtype) {
    case Dtype::float32:
      return gradient_row<float>(t, row, m, lse, logp, upstream);
    case Dtype::bfloat16:
      return gradient_row<BFloat16>(t, row, m, lse, logp, upstream);
    case Dtype::float16:
      return gradient_row<Float16>(t, row, m, lse, logp, upstream);
  }
}

template <typename T>
void add_to(float* sum, const void* x, int64_t first, int64_t count) {
  const T* from = static_cast<const T*>(x) + first;
  sum += first;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    store_some(sum + i, load_some(sum + i, left) + load_some(from + i, left), left);
  }
}

void any_add_to(float* sum, const void* x, Dtype dtype, int64_t first, int64_t count) {
  switch (dtype) {
    case Dtype::float32:
      return add_to<float>(sum, x, first, count);
    case Dtype::bfloat16:
      return add_to<BFloat16>(sum, x, first, count);
    case Dtype::float16:
      return add_to<Float16>(sum, x, first, count);
  }
}
