// The passes over one row of logits; compiled by cpu_head.cpp for each instruction set.

constexpr int kBlock = 256;       // columns whose maximum is kept
constexpr int kRefined = 64;      // logits of a row that are made again in float32
constexpr float kNegligible = 8;  // nats under the largest: not worth it
constexpr float kRefinedP = 1.0f / 256;

GRPO_INLINE float logit(const RowMap& m, float a, int64_t column) {
  float x = (m.bias ? a + m.bias[column] : a) * m.logit_scale;
  if (m.softcap != 0) {
    const float e = exp_fast(2 * clamp(x / m.softcap, -20.0f, 20.0f));
    x = m.softcap * (1 - 2 / (e + 1));
  }
  return x * m.inv_temperature;
}

// d z / d a, from z itself: tanh is z over its bound.
GRPO_INLINE float slope(const RowMap& m, float z) {
  const float whole = m.logit_scale * m.inv_temperature;
  if (m.softcap == 0) return whole;
  const float t = z / (m.softcap * m.inv_temperature);
  return whole * (1 - t * t);
}

template <typename T>
GRPO_INLINE float dot(const T* a, const T* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += widen(a[i]) * widen(b[i]);
  return sum;
}

template <typename T>
GRPO_INLINE void logits_of_row(const T* a, int64_t n, const RowMap& m, Workspace& w) {
  for (int64_t at = 0, block = 0; at < n; at += kBlock, ++block) {
    const int64_t end = std::min(n, at + kBlock);
    float most = -kInfinity;
#pragma omp simd reduction(max : most)
    for (int64_t v = at; v < end; ++v) {
      const float z = logit(m, widen(a[v]), v);
      w.z[v] = z;
      most = z > most ? z : most;
    }
    w.block_max[block] = most;
  }
}

// The columns of the largest logits of the row, at most kRefined, none that is negligible.
GRPO_INLINE void find_largest(int64_t n, float most, Workspace& w) {
  const auto blocks = static_cast<int64_t>(w.block_max.size());
  float least = most - kNegligible;
  if (blocks > kRefined) {
    w.order = w.block_max;
    std::nth_element(w.order.begin(), w.order.begin() + kRefined - 1, w.order.end(),
                     std::greater<>());
    least = std::max(least, w.order[kRefined - 1]);
  }
  w.largest.clear();
  for (int64_t block = 0; block < blocks; ++block) {
    if (!(w.block_max[block] >= least)) continue;
    const int64_t end = std::min(n, (block + 1) * kBlock);
    for (int64_t v = block * kBlock; v < end; ++v) {
      if (w.z[v] >= least) w.largest.push_back(v);
    }
  }
  if (w.largest.size() <= kRefined) return;
  std::nth_element(w.largest.begin(), w.largest.begin() + kRefined, w.largest.end(),
                   [&](int64_t a, int64_t b) { return w.z[a] > w.z[b]; });
  w.largest.resize(kRefined);
}

// Makes the logits again that count; returns their maximum, the row's but for rounding.
template <typename T>
GRPO_INLINE float refine(const Tile& t, int64_t row, const RowMap& m, float most, Workspace& w) {
  const T* h = static_cast<const T*>(t.hidden) + row * t.width;
  const T* weight = static_cast<const T*>(t.weight);
  find_largest(t.columns, most, w);
  w.largest.push_back(t.targets[row]);
  most = -kInfinity;
  for (int64_t v : w.largest) {
    w.z[v] = logit(m, dot(h, weight + v * t.width, t.width), v);
    most = std::max(most, w.z[v]);
  }
  return most;
}

template <typename T>
GRPO_INLINE void softmax_row(const Tile& t, int64_t row, const RowMap& m, bool gradient,
                             const RowStats& out, Workspace& w) {
  T* a = static_cast<T*>(t.data) + row * t.columns;
  const int64_t n = t.columns, target = t.targets[row];
  logits_of_row(a, n, m, w);
  float most = *std::max_element(w.block_max.begin(), w.block_max.end());
  if constexpr (sizeof(T) == 2) most = refine<T>(t, row, m, most, w);
  const float target_z = w.z[target];

  double sum = 0, weighted = 0;
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t end = std::min(n, at + kBlock);
    float e_sum = 0, ez_sum = 0;
#pragma omp simd reduction(+ : e_sum, ez_sum)
    for (int64_t v = at; v < end; ++v) {
      const float below = clamp(w.z[v] - most, -87.0f, 80.0f);  // 0 times -inf is no entropy
      const float e = exp_fast(below);
      e_sum += e;
      ez_sum += e * below;
      w.z[v] = e * slope(m, w.z[v]);
    }
    sum += e_sum;
    weighted += ez_sum;
  }
  const float log_sum = static_cast<float>(std::log(sum));
  const float logp = (target_z - most) - log_sum;
  out.logp[row] = logp;
  out.lse[row] = most + log_sum;
  out.entropy[row] = static_cast<float>(std::log(sum) - weighted / sum);
  if (!gradient) return;
  out.target_weight[row] = -std::expm1(logp) * slope(m, target_z);
  const float scale = static_cast<float>(1 / sum);
#pragma omp simd
  for (int64_t v = 0; v < n; ++v) a[v] = narrow<T>(w.z[v] * scale);
  a[target] = narrow<T>(0.0f);
}

template <typename T>
GRPO_INLINE void gradient_row(const Tile& t, int64_t row, const RowMap& m, float lse, float logp,
                              float upstream) {
  T* a = static_cast<T*>(t.data) + row * t.columns;
  const T* h = static_cast<const T*>(t.hidden) + row * t.width;
  const T* weight = static_cast<const T*>(t.weight);
  float z[kBlock], p[kBlock];
  for (int64_t at = 0; at < t.columns; at += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, t.columns - at));
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < n; ++i) {
      z[i] = logit(m, widen(a[at + i]), at + i);
      p[i] = exp_fast(z[i] - lse);
      most = p[i] > most ? p[i] : most;
    }
    for (int i = 0; sizeof(T) == 2 && most >= kRefinedP && i < n; ++i) {
      if (p[i] < kRefinedP) continue;
      z[i] = logit(m, dot(h, weight + (at + i) * t.width, t.width), at + i);
      p[i] = exp_fast(z[i] - lse);
    }
#pragma omp simd
    for (int i = 0; i < n; ++i) a[at + i] = narrow<T>(-upstream * slope(m, z[i]) * p[i]);
  }
  const int64_t target = t.targets[row] - t.first_column;
  if (target < 0 || target >= t.columns) return;
  a[target] = narrow<T>(upstream * slope(m, logp + lse) * -std::expm1(logp));
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
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sum[i] += widen(from[i]);
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
