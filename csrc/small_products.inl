// Products of matrices that lie in the cache.

// A tile of a product stays in registers: 24 of AVX-512's 32, 12 of the others' 16.
constexpr int kTileRows = 6, kTileVectors = GRPO_REGISTER == 64 ? 4 : 2;

// c [rows, vectors] = a [rows, depth] b [depth, vectors], added to what c holds if `adds`.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* const* b;  // [depth]; its rows
  float* c;
  int64_t c_stride;
  int64_t rows, depth, vectors;
  bool adds;
};

// Each element is summed in the order of `depth`, whatever the tile.
template <int rows, int vectors>
void multiply_tile(const Product& p, int64_t row, int64_t vector) {
  const int64_t column = vector * kLanes, depth = p.depth, stride = p.a_stride;
  const float* a = p.a + row * stride;
  const float* const* b = p.b;
  float* c = p.c + row * p.c_stride + column;
  Floats sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      sum[r][v] = p.adds ? load_as_floats(c + r * p.c_stride + v * kLanes) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats x[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) x[v] = load_as_floats(b[k] + column + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const float factor = a[r * stride + k];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] += factor * x[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) store_floats(c + r * p.c_stride + v * kLanes, sum[r][v]);
  }
}

template <int rows, int vectors>
GRPO_INLINE void multiply_rows(const Product& p, int64_t row, int64_t count, int64_t vector) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_rows<rows - 1, vectors>(p, row, count, vector);
  }
  multiply_tile<rows, vectors>(p, row, vector);
}

template <int vectors>
GRPO_INLINE void multiply_columns(const Product& p, int64_t vector, int64_t count) {
  if constexpr (vectors > 1) {
    if (count < vectors) return multiply_columns<vectors - 1>(p, vector, count);
  }
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows, height = (p.rows + tiles - 1) / tiles;
  for (int64_t row = 0; row < p.rows; row += height) {
    multiply_rows<kTileRows, vectors>(p, row, std::min(height, p.rows - row), vector);
  }
}

inline void multiply(const Product& p) {
  for (int64_t v = 0; v < p.vectors; v += kTileVectors) {
    multiply_columns<kTileVectors>(p, v, p.vectors - v);
  }
}
