// bfloat16 and float16 as the 16 bits they are stored in, a register of floats at a time.

#include "vector_math.inl"

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

GRPO_INLINE Words select(Mask condition, Words yes, Words no) { return condition ? yes : no; }

template <typename T>
struct Format;

template <>
struct Format<BFloat16> {
  static GRPO_INLINE Floats widen(Words half) { return bits_as<Floats>(half << 16); }

  // Round to nearest, ties to even; NaN is kept.
  static GRPO_INLINE Words narrow(Floats x) {
    const Words u = bits_as<Words>(x);
    const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return select((u & 0x7fffffffu) > 0x7f800000u, Words{} + 0x7fc0u, rounded);
  }
};

template <>
struct Format<Float16> {
  static GRPO_INLINE Floats widen(Words half) {
    const Words sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
    // 2^112 moves the exponent to its new bias, subnormal numbers included.
    const Words finite = bits_as<Words>(bits_as<Floats>(magnitude) * 0x1p112f);
    const Words value = select(magnitude >= 0x0f800000u, magnitude | 0x7f800000u, finite);
    return bits_as<Floats>(value | sign);
  }

  static GRPO_INLINE Words narrow(Floats x) {
    const Words sign = (bits_as<Words>(x) >> 16) & 0x8000u;
    const Words u = bits_as<Words>(x) & 0x7fffffffu;
    // Normal numbers: rebias, round the 13 bits that go. Below 2^-14 the addition rounds at 2^-24.
    const Words normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
    const Words small = bits_as<Words>(bits_as<Floats>(u) + 0.5f) - 0x3f000000u;
    Words half = select(u < 0x38800000u, small, normal);
    half = select(u >= 0x477ff000u, Words{} + 0x7c00u, half);
    return select(u > 0x7f800000u, Words{} + 0x7e00u, half) | sign;
  }
};

GRPO_INLINE Words words_of(Halves halves) {
#if GRPO_REGISTER == 64
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);  // which GCC makes two and a join of
#elif GRPO_REGISTER == 32
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

template <typename T>
GRPO_INLINE Floats load_as_floats(const T* x) {
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  return Format<T>::widen(words_of(halves));
}
template <>
GRPO_INLINE Floats load_as_floats<float>(const float* x) {
  Floats y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

template <typename T>
GRPO_INLINE void store_floats(T* to, Floats x) {
  const Halves halves = __builtin_convertvector(Format<T>::narrow(x), Halves);
  std::memcpy(to, &halves, sizeof halves);
}
template <>
GRPO_INLINE void store_floats<float>(float* to, Floats x) {
  std::memcpy(to, &x, sizeof x);
}

// The first `count` lanes from memory, 0 in the others.
template <typename T>
GRPO_INLINE Floats load_some(const T* x, int64_t count) {
  if (count >= kLanes) return load_as_floats(x);
  T lanes[kLanes] = {};
  std::memcpy(lanes, x, count * sizeof(T));
  return load_as_floats(lanes);
}

template <typename T>
GRPO_INLINE void store_some(T* to, Floats x, int64_t count) {
  if (count >= kLanes) return store_floats(to, x);
  T lanes[kLanes];
  store_floats(lanes, x);
  std::memcpy(to, lanes, count * sizeof(T));
}
