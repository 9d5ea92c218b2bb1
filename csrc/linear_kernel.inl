// A block of columns of a linear layer; compiled by cpu_linear.cpp for each instruction set.

#include "small_products.inl"

template <typename T>
void widen(const Linear& layer, int64_t row, float* to) {
  const T* from = static_cast<const T*>(layer.x) + row * layer.x_stride;
  const int64_t whole = layer.width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store_floats(to + i, load_as_floats(from + i));
  if (whole < layer.width) {
    const int64_t rest = layer.width - whole;
    store_some(to + whole, load_some(from + whole, rest), rest);
  }
}

// Columns [column, column + kBlock) of `count` rows, from `first` on; x: [count, width].
template <typename T>
void block(const Linear& layer, int64_t first, int64_t count, int64_t column, const float* x,
           float* scratch) {
  float* weights = std::exchange(scratch, scratch + kBlock * kDepth);
  float* words = std::exchange(scratch, scratch + kBlock * kDepth);
  float* sums = scratch;  // [count, kBlock]
  const float* depths[kDepth];
  for (int64_t i = 0; i < kDepth; ++i) depths[i] = weights + i * kBlock;
  const int64_t columns = std::min(kBlock, layer.columns - column);
  const int64_t vectors = (columns + kLanes - 1) / kLanes;
  const T* weight = static_cast<const T*>(layer.weight) + column * layer.width;
  for (int64_t at = 0; at < layer.width; at += kDepth) {
    const int64_t depth = std::min(kDepth, layer.width - at);
    const T* rows[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      rows[i] = weight + std::min(i, columns - 1) * layer.width + at;
    }
    transpose_rows(rows, vectors * kLanes, depth, words, weights);
    multiply({x + at, layer.width, depths, sums, kBlock, count, depth, vectors, at > 0});
  }
  const T* bias = static_cast<const T*>(layer.bias);
  T* out = static_cast<T*>(layer.out) + first * layer.columns + column;
  for (int64_t row = 0; row < count; ++row, out += layer.columns, sums += kBlock) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      Floats y = load_as_floats(sums + i);
      if (bias) y += load_some(bias + column + i, columns - i);
      store_some(out + i, y, columns - i);
    }
  }
}

void any_widen(const Linear& layer, int64_t row, float* to) {
  switch (layer.dtype) {
    case Dtype::float32:
      return widen<float>(layer, row, to);
    case Dtype::bfloat16:
      return widen<BFloat16>(layer, row, to);
    case Dtype::float16:
      return widen<Float16>(layer, row, to);
  }
}

void any_block(const Linear& layer, int64_t first, int64_t count, int64_t column, const float* x,
               float* scratch) {
  switch (layer.dtype) {
    case Dtype::float32:
      return block<float>(layer, first, count, column, x, scratch);
    case Dtype::bfloat16:
      return block<BFloat16>(layer, first, count, column, x, scratch);
    case Dtype::float16:
      return block<Float16>(layer, first, count, column, x, scratch);
  }
}
