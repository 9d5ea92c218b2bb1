// One row of logits as weights, and what filters leave of it.

constexpr float kLowest = -3.40282347e38f;  // of finite floats
constexpr float kGone = -87.3f;             // e^x of less is 0

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));

// The logits that are drawn from: a token's weight is e^((z - peak) / temperature).
struct Row {
  const float* z;  // [columns]
  int64_t columns;
  float peak, inv_temperature;

  GRPO_INLINE int64_t blocks() const { return (columns + kBlock - 1) / kBlock; }
  GRPO_INLINE int64_t end_of(int64_t block) const {
    return std::min(columns, (block + 1) * kBlock);
  }
};

// What the filters leave: logits above `least`, and of those that equal it the tokens up to `last`.
struct Cut {
  float least;
  int64_t last;
};

GRPO_INLINE Mask kept(const Cut& cut, Floats z, int64_t at) {
  const Mask early = lane_ids() + static_cast<int32_t>(at) <= static_cast<int32_t>(cut.last);
  return (z > cut.least) | ((z == cut.least) & early);
}

// -inf beyond the end.
GRPO_INLINE Floats load_logits(const Row& row, int64_t at) {
  if (at + kLanes <= row.columns) return load_as_floats(row.z + at);
  Floats some = splat<Floats>(-kInfinity);
  std::memcpy(&some, row.z + at, (row.columns - at) * sizeof(float));
  return some;
}

GRPO_INLINE Floats weights(const Row& row, Floats z) {
  const Floats below = (z - row.peak) * row.inv_temperature;
  return select(below < kGone, Floats{}, exp_bounded(below));
}

// Fills w.block_max; returns their maximum, which knows nothing of NaN.
float find_peak(const Row& row, Scratch& w) {
  float peak = -kInfinity;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    Floats most = splat<Floats>(-kInfinity);
    for (int64_t at = block * kBlock; at < row.end_of(block); at += kLanes) {
      const Floats z = load_logits(row, at);
      most = select(z > most, z, most);
    }
    w.block_max[block] = max_of(most);
    peak = std::max(peak, w.block_max[block]);
  }
  return peak;
}

// The sum of all weights, NaN if a logit is; fills w.block_mass, and w.weights if they are stored.
template <bool stored>
double sum_weights(const Row& given, Scratch& w) {
  const Row row = given;  // a copy: what the stores might alias would be read again each time
  double total = 0;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    Floats sum{};
    for (int64_t at = block * kBlock; at < row.end_of(block); at += kLanes) {
      const Floats e = weights(row, load_logits(row, at));
      if constexpr (stored) store_floats(&w.weights[at], e);
      sum += e;
    }
    w.block_mass[block] = sum_of(sum);
    total += w.block_mass[block];
  }
  return total;
}
