// Norms, activations and rotations; compiled by cpu_layers.cpp for each instruction set.

#include "tanh.inl"

// As it is once it has been stored.
template <typename T>
GRPO_INLINE Floats rounded(Floats x) {
  return Format<T>::widen(Format<T>::narrow(x));
}
template <>
GRPO_INLINE Floats rounded<float>(Floats x) {
  return x;
}

template <typename T>
void norm_row(const RmsNorm& n, int64_t row) {
  const T* x = static_cast<const T*>(n.x) + row * n.width;
  const T* weight = static_cast<const T*>(n.weight);
  T* out = static_cast<T*>(n.out) + row * n.width;
  Floats squares{};
  for (int64_t i = 0; i < n.width; i += kLanes) {
    const Floats value = load_some(x + i, n.width - i);
    squares += value * value;
  }
  const float factor = 1 / std::sqrt(sum_of(squares) / static_cast<float>(n.width) + n.epsilon);
  for (int64_t i = 0; i < n.width; i += kLanes) {
    const int64_t left = n.width - i;
    const Floats value = load_some(x + i, left) * factor, w = load_some(weight + i, left);
    store_some(out + i, n.gemma ? value * (1 + w) : rounded<T>(value) * w, left);
  }
}

GRPO_INLINE Floats silu(Floats x) { return x / (1 + exp_fast(-x)); }

GRPO_INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1 + tanh_of(inner));
}

template <typename T>
void gated_part(const Gated& in, int64_t first, int64_t count) {
  const T* gate = static_cast<const T*>(in.gate) + first;
  const T* up = static_cast<const T*>(in.up) + first;
  T* out = static_cast<T*>(in.out) + first;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats g = load_some(gate + i, count - i), u = load_some(up + i, count - i);
    const Floats activated = in.activation == Activation::silu ? silu(g) : gelu_tanh(g);
    store_some(out + i, rounded<T>(activated) * u, count - i);
  }
}

template <typename T>
void rotate_row(const Rotation& in, int64_t row) {
  const int64_t half = in.dim / 2;
  const T* cos = static_cast<const T*>(in.cos) + row * in.dim;
  const T* sin = static_cast<const T*>(in.sin) + row * in.dim;
  T* x = static_cast<T*>(in.x) + row * in.heads * in.dim;
  for (int64_t head = 0; head < in.heads; ++head, x += in.dim) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t left = half - i;
      const Floats a = load_some(x + i, left), b = load_some(x + half + i, left);
      const auto turned = [&](Floats kept, Floats added, int64_t at) {
        return rounded<T>(kept * load_some(cos + at, left)) +
               rounded<T>(added * load_some(sin + at, left));
      };
      store_some(x + i, turned(a, -b, i), left);
      store_some(x + half + i, turned(b, a, half + i), left);
    }
  }
}

void any_norm_row(const RmsNorm& n, int64_t row) {
  switch (n.dtype) {
    case Dtype::float32:
      return norm_row<float>(n, row);
    case Dtype::bfloat16:
      return norm_row<BFloat16>(n, row);
    case Dtype::float16:
      return norm_row<Float16>(n, row);
  }
}

void any_gated_part(const Gated& in, int64_t first, int64_t count) {
  switch (in.dtype) {
    case Dtype::float32:
      return gated_part<float>(in, first, count);
    case Dtype::bfloat16:
      return gated_part<BFloat16>(in, first, count);
    case Dtype::float16:
      return gated_part<Float16>(in, first, count);
  }
}

void any_rotate_row(const Rotation& in, int64_t row) {
  switch (in.dtype) {
    case Dtype::float32:
      return rotate_row<float>(in, row);
    case Dtype::bfloat16:
      return rotate_row<BFloat16>(in, row);
    case Dtype::float16:
      return rotate_row<Float16>(in, row);
  }
}
