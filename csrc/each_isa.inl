// Compiles GRPO_KERNEL for AVX-512, for AVX2 and plain, each in a namespace of its own: the vectors
// of a function are fitted to the registers before it is inlined, so its helpers come along.

namespace grpo::plain {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::plain

#ifdef GRPO_HAS_ISA
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace grpo::avx2 {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
namespace grpo::avx512 {
#include "half.inl"
#include GRPO_KERNEL
}  // namespace grpo::avx512
#pragma GCC pop_options
#endif
