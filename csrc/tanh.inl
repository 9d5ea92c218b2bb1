// tanh; part of kernels that are compiled for each instruction set.

// Cephes tanhf.
GRPO_INLINE Floats tanh_of(Floats x) {
  const Floats size = bits_as<Floats>(bits_as<Mask>(x) & 0x7fffffff), z = x * x;
  Floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats near = p * z * x + x;
  const Floats far = 1 - 2 / (exp_bounded(clamp(size * 2, 0.0f, 40.0f)) + 1);
  return select(size < 0.625f, near, select(x < 0.0f, -far, far));
}
