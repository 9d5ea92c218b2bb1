// bfloat16 and float16 as the 16 bits they are stored in, by integer arithmetic that vectorises.

#include "vector_math.inl"

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

GRPO_INLINE float widen(float x) { return x; }

GRPO_INLINE float widen(BFloat16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

GRPO_INLINE float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  // 2^112 moves the exponent to its new bias, subnormal numbers included.
  const float finite = bits_as<float>(magnitude) * 0x1p112f;
  const float special = bits_as<float>(magnitude | 0x7f800000u);
  const float value = magnitude >= 0x0f800000u ? special : finite;
  return bits_as<float>(bits_as<uint32_t>(value) | sign);
}

// Round to nearest, ties to even; NaN is kept.
template <typename T>
GRPO_INLINE T narrow(float x);

template <>
GRPO_INLINE float narrow<float>(float x) {
  return x;
}

template <>
GRPO_INLINE BFloat16 narrow<BFloat16>(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? 0x7fc0u : rounded)};
}

template <>
GRPO_INLINE Float16 narrow<Float16>(float x) {
  const uint32_t sign = (bits_as<uint32_t>(x) >> 16) & 0x8000u;
  const uint32_t u = bits_as<uint32_t>(x) & 0x7fffffffu;
  const float magnitude = bits_as<float>(u);
  // Normal numbers: rebias, round the 13 bits that go. Below 2^-14: the addition rounds at 2^-24.
  const uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  const uint32_t small = bits_as<uint32_t>(magnitude + 0.5f) - 0x3f000000u;
  uint32_t half = u < 0x38800000u ? small : normal;
  half = u >= 0x477ff000u ? 0x7c00u : half;
  half = u > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | sign)};
}
