// A block of columns of a linear layer; compiled by cpu_linear.cpp for each instruction set.

// A tile of products stays in registers: 24 of AVX-512's 32, 12 of the others' 16.
constexpr int kTileRows = GRPO_REGISTER == 64 ? 4 : 3, kTileColumns = GRPO_REGISTER == 64 ? 6 : 4;

// sums [rows, kColumns] (+)= x [rows, depth] w [columns, depth]^T
struct Products {
  const float *x, *w;
  int64_t x_stride, w_stride, depth;
  float* sums;
  bool adds;
};

// Each sum goes along its own lanes, whatever the tile.
template <int rows, int columns>
void multiply_tile(const Products& p, int64_t row, int64_t column) {
  const float* x = p.x + row * p.x_stride;
  const float* w = p.w + column * p.w_stride;
  Floats sum[rows][columns] = {};
  const auto add = [&](const auto& load, int64_t at) __attribute__((always_inline)) {
    Floats left[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) left[r] = load(x + r * p.x_stride + at);
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) {
      const Floats right = load(w + c * p.w_stride + at);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sum[r][c] += left[r] * right;
    }
  };
  const int64_t whole = p.depth / kLanes * kLanes;
  for (int64_t at = 0; at < whole; at += kLanes) {
    add([](const float* from) __attribute__((always_inline)) { return load_as_floats(from); }, at);
  }
  if (const int64_t rest = p.depth - whole) {
    add([rest](const float* from) __attribute__((always_inline)) { return load_some(from, rest); },
        whole);
  }
  float* to = p.sums + row * kColumns + column;
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) {
      float& element = to[r * kColumns + c];
      element = (p.adds ? element : 0.0f) + sum_of(sum[r][c]);
    }
  }
}

template <int rows, int columns>
void multiply_columns(const Products& p, int64_t row, int64_t column, int64_t count) {
  if constexpr (columns > 1) {
    if (count < columns) return multiply_columns<rows, columns - 1>(p, row, column, count);
  }
  multiply_tile<rows, columns>(p, row, column);
}

template <int rows>
void multiply_rows(const Products& p, int64_t row, int64_t count, int64_t columns) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_rows<rows - 1>(p, row, count, columns);
  }
  for (int64_t c = 0; c < columns; c += kTileColumns) {
    multiply_columns<rows, kTileColumns>(p, row, c, std::min<int64_t>(kTileColumns, columns - c));
  }
}

template <typename T>
void widen_row(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_some(to + i, load_some(from + i, count - i), count - i);
  }
}

// Rows of numbers as floats: in place if they are.
template <typename T>
const float* as_float_rows(const T* from, int64_t stride, int64_t rows, int64_t count, float* to) {
  if constexpr (sizeof(T) == 4) {
    return from;
  } else {
    for (int64_t i = 0; i < rows; ++i) widen_row(from + i * stride, count, to + i * kDepth);
    return to;
  }
}

// Columns [column, column + kColumns) of the rows of x.
template <typename T>
void block(const Linear& layer, const FloatRows& x, int64_t column, float* scratch) {
  float* weights = std::exchange(scratch, scratch + kColumns * kDepth);
  float* sums = scratch;  // [x.count, kColumns]
  const int64_t columns = std::min(kColumns, layer.columns - column);
  const T* weight = static_cast<const T*>(layer.weight) + column * layer.width;
  for (int64_t at = 0; at < layer.width; at += kDepth) {
    const int64_t depth = std::min(kDepth, layer.width - at);
    const float* w = as_float_rows(weight + at, layer.width, columns, depth, weights);
    const int64_t w_stride = sizeof(T) == 4 ? layer.width : kDepth;
    const Products p{x.data + at, w, x.stride, w_stride, depth, sums, at > 0};
    for (int64_t row = 0; row < x.count; row += kTileRows) {
      multiply_rows<kTileRows>(p, row, x.count - row, columns);
    }
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
