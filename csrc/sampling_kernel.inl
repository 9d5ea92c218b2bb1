// Drawing a token from one row of logits; compiled by cpu_sampling.cpp for each instruction set.

#include "sampling_filters.inl"

// The token at which the running sum passes u total; w.block_mass is what `cut` leaves.
int64_t invert(const Row& row, const Cut& cut, double u, double total, const Scratch& w) {
  const double target = u * total;
  double before = 0;
  int64_t drawn = -1;  // the last block with mass, if rounding leaves the sum at the target
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (!(w.block_mass[block] > 0)) continue;
    if (drawn >= 0) before += w.block_mass[drawn];
    drawn = block;
    if (before + w.block_mass[block] > target) break;
  }
  int64_t token = -1;
  for (int64_t at = drawn * kBlock; at < row.end_of(drawn); at += kLanes) {
    const Floats z = load_logits(row, at);
    const Floats e = select(kept(cut, z, at), weights(row, z), Floats{});
    for (int i = 0; i < kLanes; ++i) {
      if (!(e[i] > 0)) continue;
      token = at + i;
      before += e[i];
      if (before > target) return token;
    }
  }
  return token;
}

int64_t first_of(const Row& row, float value, const Scratch& w) {
  const auto block = std::find(w.block_max.begin(), w.block_max.end(), value);
  const float* from = row.z + (block - w.block_max.begin()) * kBlock;
  return std::find(from, row.z + row.columns, value) - row.z;
}

// w.logits = the row, with logits of seen tokens divided by the penalty, or times it below 0.
void penalise(const Row& row, float penalty, const uint8_t* seen, Scratch& w) {
  for (int64_t at = 0; at < row.columns; at += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, row.columns - at);
    Bytes flags{};
    std::memcpy(&flags, seen + at, count);
    Floats z = load_logits(row, at);
    const Mask marked = __builtin_convertvector(flags, Mask) != 0;
    if (any(marked)) z = select(marked, select(z > 0, z / penalty, z * penalty), z);
    store_some(&w.logits[at], z, count);
  }
}

template <typename T>
const float* as_floats(const T* x, int64_t count, Scratch& w) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    for (int64_t at = 0; at < count; at += kLanes) {
      store_some(&w.logits[at], load_some(x + at, count - at), count - at);
    }
    return w.logits.data();
  }
}

double sum_weights(const Row& row, bool stored, Scratch& w) {
  return stored ? sum_weights<true>(row, w) : sum_weights<false>(row, w);
}

GRPO_INLINE double log_prob(float z, float peak, double temperature, double total) {
  return (static_cast<double>(z) - peak) / temperature - std::log(total);
}

// False if the row is no distribution.
template <typename T>
bool draw_row(const Sampling& in, int64_t i, const Filters& filters, const Draws& out, Scratch& w) {
  const T* logits = static_cast<const T*>(in.logits) + i * in.columns;
  const bool greedy = in.temperature[i] == 0, filtered = !greedy && filters.any();
  const bool penalised = filters.penalty != 1;
  const double temperature = greedy ? 1 : in.temperature[i];
  const auto inverse = static_cast<float>(std::min(1 / temperature, 3e38));  // 0 * inf is NaN
  Row row{as_floats(logits, in.columns, w), in.columns, 0, inverse};
  row.peak = find_peak(row, w);
  double total = sum_weights(row, filtered && !penalised, w);
  const float plain_peak = row.peak;
  const double plain_total = total;
  if (penalised) {
    penalise(row, static_cast<float>(filters.penalty), filters.seen, w);
    row.z = w.logits.data();
    row.peak = find_peak(row, w);
    total = sum_weights(row, filtered, w);
  }
  if (!is_finite(row.peak) || !(plain_total > 0) || !(total > 0)) return false;
  Cut cut{kLowest, row.columns - 1};
  if (filtered) total = filter(row, filters, temperature, cut, w);
  const int64_t token =
      greedy ? first_of(row, row.peak, w) : invert(row, cut, in.uniform[i], total, w);
  const float z = load_some(logits + token, 1)[0];
  const double plain = log_prob(z, plain_peak, temperature, plain_total);
  const double processed = greedy ? 0 : log_prob(row.z[token], row.peak, temperature, total);
  out.tokens[i] = token;
  out.logp_sampler[i] = static_cast<float>(plain);
  out.logp_processed[i] = static_cast<float>(processed);
  return true;
}

bool any_draw_row(const Sampling& in, int64_t i, const Filters& filters, const Draws& out,
                  Scratch& w) {
  switch (in.dtype) {
    case Dtype::float32:
      return draw_row<float>(in, i, filters, out, w);
    case Dtype::bfloat16:
      return draw_row<BFloat16>(in, i, filters, out, w);
    case Dtype::float16:
      return draw_row<Float16>(in, i, filters, out, w);
  }
  return false;
}
