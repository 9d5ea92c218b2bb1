// Products of matrices, both with the summed dimension along their rows; no row is transposed.

// A tile of sums stays in registers: 24 of AVX-512's 32, 12 of the others' 16.
constexpr int kDotRows = GRPO_REGISTER == 64 ? 6 : 3, kDotColumns = 4;

// sums [rows, columns] = a [rows, depth] b [columns, depth]^T, added to what is there if `adds`.
template <typename T>
struct Dots {
  const float* a;
  int64_t a_stride;
  const T* const* b;  // [columns]; its rows
  float* sums;
  int64_t sums_stride;
  int64_t rows, columns, depth;
  bool adds;
};

// Lane i of a and b laid end to end; known to the compiler, else a shuffle is not seen as one.
template <int i>
GRPO_INLINE float lane(Floats a, Floats b) {
  if constexpr (i < kLanes) {
    return a[i];
  } else {
    return b[i - kLanes];
  }
}

// Of each 128 bits a0 b0 a1 b1, or a2 b2 a3 b3.
template <bool high, int... i>
GRPO_INLINE Floats zip(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return Floats{lane<i / 4 * 4 + i % 4 / 2 + 2 * high + i % 2 * kLanes>(a, b)...};
}
// Of each 128 bits a0 a1 b0 b1, or a2 a3 b2 b3.
template <bool high, int... i>
GRPO_INLINE Floats zip_pairs(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return Floats{lane<i / 4 * 4 + i % 2 + 2 * high + i % 4 / 2 * kLanes>(a, b)...};
}

// The sums of four vectors at once.
GRPO_INLINE void sum_four(const Floats* x, float* sums) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  const Floats ab = zip<false>(x[0], x[1], lanes) + zip<true>(x[0], x[1], lanes);
  const Floats cd = zip<false>(x[2], x[3], lanes) + zip<true>(x[2], x[3], lanes);
  Floats all = zip_pairs<false>(ab, cd, lanes) + zip_pairs<true>(ab, cd, lanes);
  if constexpr (kLanes == 16) all += rotated<8>(all, lanes);
  if constexpr (kLanes >= 8) all += rotated<4>(all, lanes);
  std::memcpy(sums, &all, 4 * sizeof(float));
}

// Each sum goes along its own lanes, whatever the tile.
template <int rows, typename T>
void dot_tile(const Dots<T>& d, int64_t row, int64_t column) {
  const int64_t columns = std::min<int64_t>(kDotColumns, d.columns - column);
  const float* a = d.a + row * d.a_stride;
  const T* b[kDotColumns];
  for (int64_t c = 0; c < kDotColumns; ++c) b[c] = d.b[column + std::min(c, columns - 1)];
  Floats sum[rows][kDotColumns] = {};
  const auto add = [&](const auto& load, int64_t at) __attribute__((always_inline)) {
    Floats left[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) left[r] = load(a + r * d.a_stride + at);
#pragma GCC unroll 8
    for (int c = 0; c < kDotColumns; ++c) {
      const Floats right = load(b[c] + at);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sum[r][c] += left[r] * right;
    }
  };
  const int64_t whole = d.depth / kLanes * kLanes;
  for (int64_t at = 0; at < whole; at += kLanes) {
    add([](const auto* x) __attribute__((always_inline)) { return load_as_floats(x); }, at);
  }
  if (const int64_t rest = d.depth - whole) {
    add([rest](const auto* x) __attribute__((always_inline)) { return load_some(x, rest); }, whole);
  }
  float* to = d.sums + row * d.sums_stride + column;
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r, to += d.sums_stride) {
    float found[kDotColumns];
    sum_four(sum[r], found);
    for (int64_t c = 0; c < columns; ++c) to[c] = (d.adds ? to[c] : 0.0f) + found[c];
  }
}

template <int rows, typename T>
GRPO_INLINE void dot_rows(const Dots<T>& d, int64_t row) {
  if constexpr (rows > 1) {
    if (d.rows - row < rows) return dot_rows<rows - 1>(d, row);
  }
  for (int64_t c = 0; c < d.columns; c += kDotColumns) dot_tile<rows>(d, row, c);
}

template <typename T>
void multiply_dots(const Dots<T>& d) {
  for (int64_t row = 0; row < d.rows; row += kDotRows) dot_rows<kDotRows>(d, row);
}

template <typename T>
void widen_row(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_some(to + i, load_some(from + i, count - i), count - i);
  }
}

// The same with the rows of b as floats, `stride` apart from `floats` on, if it pays to widen them
// once for all rows of a.
template <typename T>
void multiply_widened(const Dots<T>& d, float* floats, int64_t stride) {
  if (sizeof(T) == 4 || d.rows <= kDotRows) return multiply_dots(d);
  const float* b[kBlock];
  for (int64_t i = 0; i < d.columns; ++i) {
    widen_row(d.b[i], d.depth, floats + i * stride);
    b[i] = floats + i * stride;
  }
  multiply_dots(
      Dots<float>{d.a, d.a_stride, b, d.sums, d.sums_stride, d.rows, d.columns, d.depth, d.adds});
}
