// A block of columns of a linear layer; compiled by cpu_linear.cpp for each instruction set.

#include "dot_products.inl"

// Columns [column, column + kColumns) of the rows of x.
template <typename T>
void block(const Linear& layer, const FloatRows& x, int64_t column, float* scratch) {
  float* weights = std::exchange(scratch, scratch + kColumns * kDepth);
  float* sums = scratch;  // [x.count, kColumns]
  const int64_t columns = std::min(kColumns, layer.columns - column);
  const T* weight = static_cast<const T*>(layer.weight) + column * layer.width;
  for (int64_t at = 0; at < layer.width; at += kDepth) {
    const int64_t depth = std::min(kDepth, layer.width - at);
    const T* rows[kColumns];
    for (int64_t i = 0; i < columns; ++i) rows[i] = weight + i * layer.width + at;
    const Dots<T> dots{x.data + at, x.stride, rows,  sums,  kColumns,
                       x.count,     columns,  depth, at > 0};
    multiply_widened(dots, weights, kDepth);
  }
  const T* bias = static_cast<const T*>(layer.bias);
  T* out = static_cast<T*>(layer.out) + x.first * layer.columns + column;
  for (int64_t row = 0; row < x.count; ++row, out += layer.columns, sums += kColumns) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      Floats y = load_as_floats(sums + i);
      if (bias) y += load_some(bias + column + i, columns - i);
      store_some(out + i, y, columns - i);
    }
  }
}

void any_widen(const Linear& layer, int64_t row, float* to) {
  const int64_t at = row * layer.x_stride;
  if (layer.dtype == Dtype::bfloat16) {
    widen_row(static_cast<const BFloat16*>(layer.x) + at, layer.width, to);
  } else {
    widen_row(static_cast<const Float16*>(layer.x) + at, layer.width, to);
  }
}

void any_block(const Linear& layer, const FloatRows& x, int64_t column, float* scratch) {
  switch (layer.dtype) {
    case Dtype::float32:
      return block<float>(layer, x, column, scratch);
    case Dtype::bfloat16:
      return block<BFloat16>(layer, x, column, scratch);
    case Dtype::float16:
      return block<Float16>(layer, x, column, scratch);
  }
}
