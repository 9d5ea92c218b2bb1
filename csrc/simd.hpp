// Which of the instruction sets that a kernel was compiled for this CPU has.
#pragma once

// Inlined into each caller: what a kernel calls must be compiled as the kernel is.
#define GRPO_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GRPO_HAS_ISA
#include <immintrin.h>
#endif

namespace grpo {

enum class Isa { plain, avx2, avx512 };

// The best that this CPU has.
inline Isa best_isa() {
#ifdef GRPO_HAS_ISA
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::plain;
}

// What the kernels run by; tests choose a lesser one to try it.
inline Isa& current_isa() {
  static Isa isa = best_isa();
  return isa;
}

// The version of `name` for this CPU.
#ifdef GRPO_HAS_ISA
#define GRPO_BEST(name)                               \
  (current_isa() == Isa::avx512 ? &grpo::avx512::name \
   : current_isa() == Isa::avx2 ? &grpo::avx2::name   \
                                : &grpo::plain::name)
#else
#define GRPO_BEST(name) (&grpo::plain::name)
#endif

}  // namespace grpo
