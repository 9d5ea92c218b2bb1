// Arithmetic on a register of floats at once; compiled once for each instruction set by
// each_isa.inl.

constexpr float kInfinity = __builtin_huge_valf();

template <typename To, typename From>
GRPO_INLINE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "a view of the same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// What one register holds: vectors that compilers have to split end up in memory.
constexpr int kLanes = GRPO_REGISTER / 4;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));  // -1 or 0, as comparisons give it

template <typename X>
GRPO_INLINE X splat(float x) {
  return X{} + x;
}
GRPO_INLINE float select(bool condition, float yes, float no) { return condition ? yes : no; }
GRPO_INLINE Floats select(Mask condition, Floats yes, Floats no) { return condition ? yes : no; }

// NaN stays NaN, as in torch.clamp.
template <typename X>
GRPO_INLINE X clamp(X x, float low, float high) {
  x = select(x < low, splat<X>(low), x);
  return select(x > high, splat<X>(high), x);
}

GRPO_INLINE bool is_finite(float x) { return (bits_as<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
GRPO_INLINE Mask is_finite(Floats x) { return (bits_as<Mask>(x) & 0x7f800000) != 0x7f800000; }

GRPO_INLINE float power_of_two(float shifted) {
  return bits_as<float>((bits_as<uint32_t>(shifted) << 23) + 0x3f800000u);
}
GRPO_INLINE Floats power_of_two(Floats shifted) {
  return bits_as<Floats>((bits_as<Mask>(shifted) << 23) + 0x3f800000);
}

// e^x to 1 ulp (Cephes expf) for -87.3 <= x <= 88.
template <typename X>
GRPO_INLINE X exp_bounded(X x) {
  const X shifted = x * 1.44269504089f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const X n = shifted - 12582912.0f;
  const X r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  X p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return (p * r * r + r + 1.0f) * power_of_two(shifted);
}

// For any x: below the bounds the smallest normal float, above them the value at 88; NaN stays.
template <typename X>
GRPO_INLINE X exp_fast(X x) {
  return exp_bounded(clamp(x, -87.3f, 88.0f));
}

// Neither NaN nor beyond the bound.
GRPO_INLINE Mask within(Floats x, float bound) {
  return bits_as<Floats>(bits_as<Mask>(x) & 0x7fffffff) <= bound;
}

// Lane i + distance comes to lane i. Written lane by lane, for so it becomes one shuffle where
// there is one.
template <int distance, int... i>
GRPO_INLINE Floats rotated(Floats x, std::integer_sequence<int, i...>) {
  return Floats{x[(i + distance) % kLanes]...};
}

// Joins all lanes: halves meet until two lanes are left.
template <int distance = kLanes / 2, typename Join>
GRPO_INLINE float joined(Floats x, Join join) {
  if constexpr (distance == 1) {
    return join(x[0], x[1]);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    return joined<distance / 2>(join(x, rotated<distance>(x, lanes)), join);
  }
}

GRPO_INLINE float sum_of(Floats x) {
  return joined(x, [](auto a, auto b) { return a + b; });
}

GRPO_INLINE float max_of(Floats x) {
  return joined(x, [](auto a, auto b) { return select(b > a, b, a); });
}

template <int... i>
GRPO_INLINE Mask counted(std::integer_sequence<int, i...>) {
  return Mask{i...};
}
// 0, 1, 2, ...
GRPO_INLINE Mask lane_ids() { return counted(std::make_integer_sequence<int, kLanes>{}); }

GRPO_INLINE bool any(Mask condition) {
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= condition[i];
  return found != 0;
}
