// Compiles GRPO_KERNEL for AVX-512, for AVX2 and plain, each in a namespace of its own: the vectors
// of a function are fitted to the registers before it is inlined, so its helpers come along.
// GRPO_REGISTER: bytes of a register; the macros of the compiler are the same for all three.

#define GRPO_REGISTER 16
namespace grpo::plain {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::plain
#undef GRPO_REGISTER

#ifdef GRPO_HAS_ISA
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define GRPO_REGISTER 32
namespace grpo::avx2 {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::avx2
#undef GRPO_REGISTER
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define GRPO_REGISTER 64
namespace grpo::avx512 {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::avx512
#undef GRPO_REGISTER
#pragma GCC pop_options
#endif
