// The token terms of one sample; compiled by cpu_loss.cpp for each instruction set.

constexpr float kLogRatioBound = 20.0f;  // e^20: beyond it a ratio is an accident
constexpr float kVespoLogMin = -18.420680744f;
constexpr int kBlock = 512;  // tokens whose selected inputs lie in L1

// The tokens of a block, masked ones replaced, filled up to whole vectors with masked ones.
struct alignas(64) Block {
  int32_t on[kBlock];  // all bits, or none
  float logp[kBlock], old_logp[kBlock], ref_logp[kBlock], advantage[kBlock], importance[kBlock];
  float dlogp[kBlock];
};

// x where the mask is on, else 0 whatever x is.
GRPO_INLINE float keep(float x, int32_t on) { return bits_as<float>(bits_as<int32_t>(x) & on); }
GRPO_INLINE Floats keep(Floats x, Mask on) { return bits_as<Floats>(bits_as<Mask>(x) & on); }

inline void copy_kept(float* to, const float* from, const int32_t* on, int n) {
  for (int i = 0; i < n; ++i) to[i] = keep(from[i], on[i]);
}

// How many of the n flags from `mask` on are `flag`, without a break.
inline int run_of(const uint8_t* mask, int flag, int n) {
  const void* end = std::memchr(mask, 1 - flag, static_cast<size_t>(n));
  return end ? static_cast<int>(static_cast<const uint8_t*>(end) - mask) : n;
}

// Fills a block; returns the number of vectors.
int fill(const LossInputs& in, int64_t sample, int64_t at, int n, Block& b) {
  const int vectors = (n + kLanes - 1) / kLanes;
  const int whole = vectors * kLanes;
  if (in.mask) {
    for (int i = 0; i < n; ++i) b.on[i] = in.mask[at + i] ? -1 : 0;
  } else {
    std::fill(b.on, b.on + n, -1);
  }
  copy_kept(b.logp, in.logp + at, b.on, n);
  copy_kept(b.old_logp, (in.old_logp ? in.old_logp : in.logp) + at, b.on, n);
  if (in.ref_logp) copy_kept(b.ref_logp, in.ref_logp + at, b.on, n);
  if (in.per_token) {
    copy_kept(b.advantage, in.advantages + at, b.on, n);
  } else {
    for (int i = 0; i < n; ++i) b.advantage[i] = keep(in.advantages[sample], b.on[i]);
  }
  for (int i = 0; i < n; ++i) {
    b.importance[i] = in.importance && b.on[i] ? in.importance[at + i] : 1.0f;
  }
  for (float* x : {b.logp, b.old_logp, b.ref_logp, b.advantage}) std::fill(x + n, x + whole, 0.0f);
  std::fill(b.importance + n, b.importance + whole, 1.0f);
  std::fill(b.on + n, b.on + whole, 0);
  return vectors;
}

// d min(min(ratio, delta) A, clamp(ratio) A) / d ratio, over A.
template <typename X>
GRPO_INLINE X clipped_slope(const LossOptions& o, X ratio, X a) {
  const X one = splat<X>(1), zero = splat<X>(0);
  const X free = select(ratio > o.delta, splat<X>(o.delta), ratio);
  const X clipped = clamp(ratio, o.ratio_low, o.ratio_high);
  const X free_slope = select(ratio <= o.delta, one, zero);
  const X clipped_slope = select((ratio >= o.ratio_low) & (ratio <= o.ratio_high), one, zero);
  return select(free * a <= clipped * a, free_slope, clipped_slope);
}

// The policy term of tokens and its derivative by the log-prob, importance ratio left out.
template <Term term>
GRPO_INLINE void policy(const LossOptions& o, const Row& row, Floats ratio, Floats a, Floats logp,
                        Floats& value, Floats& slope) {
  const auto all = [](float x) { return splat<Floats>(x); };
  if constexpr (term == Term::clipped) {
    const Floats free = select(ratio > o.delta, all(o.delta), ratio) * a;
    const Floats clipped = clamp(ratio, o.ratio_low, o.ratio_high) * a;
    value = -select(free <= clipped, free, clipped);
    slope = -clipped_slope(o, ratio, a) * a * ratio;
  } else if constexpr (term == Term::cispo) {
    slope = -select(ratio > o.ratio_high, all(o.ratio_high), ratio) * a;
    value = slope * logp;
  } else if constexpr (term == Term::sapo) {
    const Floats tau = select(a > 0.0f, all(o.sapo_positive), all(o.sapo_negative));
    const Floats gate = 1.0f / (1.0f + exp_fast(-tau * (ratio - 1.0f)));
    value = -a * (4.0f / tau) * gate;
    slope = -4.0f * a * gate * (1.0f - gate) * ratio;
  } else {
    slope = -row.phi * a;
    value = slope * logp;
  }
}

// What a vector of tokens adds; `usual`: every log-ratio is within its bound.
struct Terms {
  Floats value, slope, ratio, kl;
};

template <Term term, bool sequence, bool has_ref, bool usual>
GRPO_INLINE Terms token_terms(const LossOptions& o, const Row& row, Floats logp, Floats old,
                              Floats ref, Floats a, Floats importance) {
  const Floats zero = splat<Floats>(0);
  const auto bounded = [](Floats x) {
    return usual ? x : clamp(x, -kLogRatioBound, kLogRatioBound);
  };
  const Floats gap = logp - old, token_ratio = exp_bounded(bounded(gap));
  const Mask moves = within(gap, kLogRatioBound);
  Terms t;
  t.ratio = sequence ? splat<Floats>(row.ratio) : token_ratio;
  policy<term>(o, row, t.ratio, a, logp, t.value, t.slope);
  // The importance ratio of vespo is inside its weight.
  if constexpr (!usual && term != Term::vespo) t.value *= importance, t.slope *= importance;
  if constexpr (sequence) t.slope = splat<Floats>(row.ratio_slope);
  if constexpr (!usual && (term == Term::clipped || term == Term::sapo)) {
    t.slope = select(moves, t.slope, zero);
  }
  if constexpr (has_ref) {
    const Floats raw = ref - logp, x = bounded(raw), e = exp_bounded(x);
    t.kl = o.kl_exp * (e - 1.0f) - o.kl_linear * x + (o.kl_square * 0.5f) * x * x;
    Floats slope = o.kl_linear - o.kl_exp * e - o.kl_square * x;
    if constexpr (!usual) slope = select(within(raw, kLogRatioBound), slope, zero);
    if (o.weighted_kl) {
      slope = token_ratio * (slope + (usual ? t.kl : select(moves, t.kl, zero)));
      t.kl *= token_ratio;
    }
    t.value += o.beta * t.kl;
    t.slope += o.beta * slope;
  }
  return t;
}

// Where the values of a block lie; the last three are not read when it is usual.
struct Tokens {
  const float *logp, *old_logp, *ref_logp, *advantage, *importance;
  const int32_t* on;
  bool has_old;  // else old_logp is logp
};

// A usual block has nothing masked, one advantage, no importance ratio, and log-ratios within
// their bounds: nearly all blocks, at half the work. False if it was not: then nothing is added.
template <Term term, bool sequence, bool has_ref, bool usual>
bool block_loss(const LossOptions& options, const Row& of_row, const Tokens& tokens, int vectors,
                float shared_advantage, float* dlogp, Sums& sums) {
  const LossOptions o = options;  // copies: what dlogp might alias would be read again each time
  const Row row = of_row;
  const Tokens from = tokens;
  const Floats one = splat<Floats>(1), zero = splat<Floats>(0);
  Floats loss{}, kl_sum{}, ratio_sum{}, low{}, high{}, a_sum{}, bad{};
  Floats ratio_min = splat<Floats>(kInfinity), ratio_max = splat<Floats>(-kInfinity);
  Floats a = splat<Floats>(shared_advantage), importance = one, ref{};
  Mask on = ~Mask{}, unusual{};
  for (int at = 0; at < vectors * kLanes; at += kLanes) {
    const Floats logp = load_as_floats(from.logp + at), old = load_as_floats(from.old_logp + at);
    if constexpr (has_ref) ref = load_as_floats(from.ref_logp + at);
    if constexpr (usual) {
      unusual |= ~within(logp - old, kLogRatioBound);
      if constexpr (has_ref) unusual |= ~within(ref - logp, kLogRatioBound);
    } else {
      a = load_as_floats(from.advantage + at), importance = load_as_floats(from.importance + at);
      std::memcpy(&on, from.on + at, sizeof on);
      for (Floats x : {logp, ref, a, importance}) bad += select(is_finite(x), zero, one);
      if (from.has_old) bad += select(is_finite(old), zero, one);
    }
    Terms t = token_terms<term, sequence, has_ref, usual>(o, row, logp, old, ref, a, importance);
    if constexpr (!usual) {
      for (Floats* x : {&t.value, &t.slope, &t.kl}) *x = keep(*x, on);
    }
    const Floats weighted = t.slope * row.weight;
    std::memcpy(dlogp + at, &weighted, sizeof weighted);
    loss += t.value;
    if constexpr (has_ref) kl_sum += t.kl;
    ratio_sum += usual ? t.ratio : keep(t.ratio, on);
    ratio_min =
        select(usual ? t.ratio < ratio_min : on & (t.ratio < ratio_min), t.ratio, ratio_min);
    ratio_max =
        select(usual ? t.ratio > ratio_max : on & (t.ratio > ratio_max), t.ratio, ratio_max);
    if constexpr (term != Term::cispo) {
      low += select((t.ratio < o.ratio_low) & (a < 0.0f), one, zero);
    }
    high += select((t.ratio > o.ratio_high) & (a > 0.0f), one, zero);
    a_sum += select(a < 0.0f, -a, a);
  }
  if constexpr (usual) {
    for (int i = 0; i < kLanes; ++i) {
      if (unusual[i]) return false;
    }
  }
  sums.loss += static_cast<double>(sum_of(loss)) * row.weight;
  sums.kl += sum_of(kl_sum);
  sums.ratio += sum_of(ratio_sum);
  sums.clip_low += sum_of(low);
  sums.clip_high += sum_of(high);
  sums.advantage_abs += sum_of(a_sum);
  sums.nonfinite += sum_of(bad);
  for (int i = 0; i < kLanes; ++i) {
    sums.ratio_min = std::min(sums.ratio_min, ratio_min[i]);
    sums.ratio_max = std::max(sums.ratio_max, ratio_max[i]);
  }
  return true;
}

// What a whole sample must know before its first token: vespo's weight, the sequence's ratio.
void sweep_sample(const LossInputs& in, const LossOptions& o, int64_t sample, Row& row,
                  int64_t tokens) {
  double log_ratios = 0, log_importance = 0, positive = 0, negative = 0;
  Block b;
  for (int64_t at = row.start; at < row.end; at += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, row.end - at));
    fill(in, sample, at, n, b);
    double gaps = 0, up = 0, down = 0;  // many equal floats round the same way
    for (int i = 0; i < n; ++i) {
      gaps += clamp(b.logp[i] - b.old_logp[i], -kLogRatioBound, kLogRatioBound);
      const double credit = static_cast<double>(b.advantage[i]) * b.importance[i];
      up += b.advantage[i] > 0 ? credit : 0;
      down += b.advantage[i] > 0 ? 0 : credit;
    }
    log_ratios += gaps, positive += up, negative += down;
    if (o.term != Term::vespo || !in.importance) continue;
    for (int i = 0; i < n; ++i) {
      log_importance += clamp(std::log(b.importance[i]), kVespoLogMin, kLogRatioBound);
    }
  }
  if (o.sequence) {
    const double count = static_cast<double>(std::max<int64_t>(tokens, 1));
    row.ratio = static_cast<float>(std::exp(log_ratios / count));
    row.ratio_slope = static_cast<float>(-(clipped_slope(o, row.ratio, 1.0f) * positive +
                                           clipped_slope(o, row.ratio, -1.0f) * negative) *
                                         row.ratio / count);
    return;
  }
  const float log_w =
      clamp(static_cast<float>(log_ratios + log_importance), kVespoLogMin, kLogRatioBound);
  const bool up = in.advantages[sample] >= 0;
  const float k = up ? o.vespo_k_positive : o.vespo_k_negative;
  const float lambda = up ? o.vespo_lambda_positive : o.vespo_lambda_negative;
  row.phi = std::exp(lambda + k * log_w - lambda * std::exp(log_w));
}

template <Term term, bool sequence, bool has_ref>
void sample_loss(const LossInputs& in, const LossOptions& o, int64_t sample, Row row, float* dlogp,
                 Sums& sums) {
  if constexpr (sequence || term == Term::vespo) sweep_sample(in, o, sample, row, sums.tokens);
  const bool shared = !in.importance && !in.per_token;
  const float advantage = in.per_token ? 0.0f : in.advantages[sample];
  const float* old = in.old_logp ? in.old_logp : in.logp;
  Block b;
  for (int64_t at = row.start; at < row.end;) {
    int n = static_cast<int>(std::min<int64_t>(kBlock, row.end - at));
    if (in.mask) {
      if (const int off = run_of(in.mask + at, 0, n)) {
        std::fill(dlogp + at, dlogp + at + off, 0.0f);
        at += off;
        continue;
      }
      n = std::max(run_of(in.mask + at, 1, n), std::min(n, kLanes));
    }
    const int whole = n / kLanes * kLanes;
    const bool all_on = !in.mask || run_of(in.mask + at, 1, whole) == whole;
    if (shared && all_on && whole && is_finite(advantage)) {
      const Tokens direct{in.logp + at, old + at, has_ref ? in.ref_logp + at : nullptr,
                          nullptr,      nullptr,  nullptr,
                          false};
      if (block_loss<term, sequence, has_ref, true>(o, row, direct, whole / kLanes, advantage,
                                                    dlogp + at, sums)) {
        at += whole;
        continue;
      }
    }
    const int vectors = fill(in, sample, at, n, b);
    const Tokens filled{
        b.logp, b.old_logp, b.ref_logp, b.advantage, b.importance, b.on, in.old_logp != nullptr};
    block_loss<term, sequence, has_ref, false>(o, row, filled, vectors, 0, b.dlogp, sums);
    std::copy(b.dlogp, b.dlogp + n, dlogp + at);
    at += n;
  }
}

template <Term term, bool sequence>
void sample_loss(const LossInputs& in, const LossOptions& o, int64_t sample, const Row& row,
                 float* dlogp, Sums& sums) {
  if (in.ref_logp) {
    sample_loss<term, sequence, true>(in, o, sample, row, dlogp, sums);
  } else {
    sample_loss<term, sequence, false>(in, o, sample, row, dlogp, sums);
  }
}

// One sample: writes dlogp of its tokens, adds to its sums.
void any_sample_loss(const LossInputs& in, const LossOptions& o, int64_t sample, const Row& row,
                     float* dlogp, Sums& sums) {
  switch (o.term) {
    case Term::clipped:
      if (o.sequence) return sample_loss<Term::clipped, true>(in, o, sample, row, dlogp, sums);
      return sample_loss<Term::clipped, false>(in, o, sample, row, dlogp, sums);
    case Term::cispo:
      return sample_loss<Term::cispo, false>(in, o, sample, row, dlogp, sums);
    case Term::sapo:
      return sample_loss<Term::sapo, false>(in, o, sample, row, dlogp, sums);
    case Term::vespo:
      return sample_loss<Term::vespo, false>(in, o, sample, row, dlogp, sums);
  }
}
