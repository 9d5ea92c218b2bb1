// Products of matrices that lie in the cache, and rows of keys transposed.

// A tile of a product stays in registers: 24 of AVX-512's 32, 12 of the others' 16.
constexpr int kTileRows = 6, kTileVectors = GRPO_REGISTER == 64 ? 4 : 2, kWords = kLanes;

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

// Words of rows, whatever they hold: shuffles of floats are the ones that compilers know best.
typedef float RowWords __attribute__((vector_size(4 * kWords)));
constexpr int64_t kPiece = 16;  // bytes of a row that are transposed together

// A piece of each fourth row: its lanes of 128 bits.
GRPO_INLINE RowWords pieces(const char* const* rows, int64_t at) {
#if GRPO_REGISTER == 64
  const auto piece = [&](int i) { return _mm_loadu_ps((const float*)(rows[i] + at)); };
  __m512 x = _mm512_castps128_ps512(piece(0));
  x = _mm512_insertf32x4(x, piece(4), 1);
  x = _mm512_insertf32x4(x, piece(8), 2);
  return _mm512_insertf32x4(x, piece(12), 3);
#elif GRPO_REGISTER == 32
  const auto piece = [&](int i) { return _mm_loadu_ps((const float*)(rows[i] + at)); };
  return _mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(4), 1);
#else
  RowWords x;
  std::memcpy(&x, rows[0] + at, sizeof x);
  return x;
#endif
}

// Lane i of a and b laid end to end; known to the compiler, else a shuffle is not seen as one.
template <int i>
GRPO_INLINE float lane(RowWords a, RowWords b) {
  if constexpr (i < kWords) {
    return a[i];
  } else {
    return b[i - kWords];
  }
}

// Of each 128 bits a0 b0 a1 b1, or a2 b2 a3 b3.
template <bool high, int... i>
GRPO_INLINE RowWords zip(RowWords a, RowWords b, std::integer_sequence<int, i...>) {
  return RowWords{lane<i / 4 * 4 + i % 4 / 2 + 2 * high + i % 2 * kWords>(a, b)...};
}
// Of each 128 bits a0 a1 b0 b1, or a2 a3 b2 b3.
template <bool high, int... i>
GRPO_INLINE RowWords zip_pairs(RowWords a, RowWords b, std::integer_sequence<int, i...>) {
  return RowWords{lane<i / 4 * 4 + i % 2 + 2 * high + i % 4 / 2 * kWords>(a, b)...};
}

// A piece of kWords rows: word i of each becomes to[i * kBlock], side by side.
GRPO_INLINE void transpose_piece(const char* const* rows, int64_t at, float* to) {
  constexpr auto lanes = std::make_integer_sequence<int, kWords>{};
  RowWords x[4], y[4];
  for (int i = 0; i < 4; ++i) x[i] = pieces(rows + i, at);
  y[0] = zip<false>(x[0], x[1], lanes);
  y[1] = zip<true>(x[0], x[1], lanes);
  y[2] = zip<false>(x[2], x[3], lanes);
  y[3] = zip<true>(x[2], x[3], lanes);
  x[0] = zip_pairs<false>(y[0], y[2], lanes);
  x[1] = zip_pairs<true>(y[0], y[2], lanes);
  x[2] = zip_pairs<false>(y[1], y[3], lanes);
  x[3] = zip_pairs<true>(y[1], y[3], lanes);
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * kBlock, &x[i], sizeof x[i]);
}

// Word i of row j becomes to[i * kBlock + j]; `count` rows, a multiple of kWords, of `bytes` each,
// filled up with zeros to whole pieces.
inline void transpose(const char* const* rows, int64_t count, int64_t bytes, float* to) {
  const int64_t whole = bytes / kPiece * kPiece;
  for (int64_t row = 0; row < count; row += kWords) {
    for (int64_t at = 0; at < whole; at += kPiece) {
      transpose_piece(rows + row, at, to + at / 4 * kBlock + row);
    }
    if (whole == bytes) continue;
    char rest[kWords][kPiece] = {};
    const char* rests[kWords];
    for (int i = 0; i < kWords; ++i) {
      std::memcpy(rest[i], rows[row + i] + whole, bytes - whole);
      rests[i] = rest[i];
    }
    transpose_piece(rests, 0, to + whole / 4 * kBlock + row);
  }
}

// Words [dim / 2, kBlock], two numbers in each, to floats [dim, kBlock].
template <typename T>
__attribute__((noinline)) void widen_pairs(const float* words, int64_t count, int64_t dim,
                                           float* to) {
  for (int64_t pair = 0; 2 * pair < dim; ++pair, words += kBlock, to += 2 * kBlock) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Words both = bits_as<Words>(load_as_floats(words + i));
      store_floats(to + i, Format<T>::widen(both & 0xffffu));
      store_floats(to + kBlock + i, Format<T>::widen(both >> 16));
    }
  }
}

// [depth, kBlock] floats, a column from each of `count` rows, which are a multiple of kLanes.
// words: as much room as for the result.
template <typename T>
void transpose_rows(const T* const* rows, int64_t count, int64_t depth, float* words, float* to) {
  const char* bytes[kBlock];
  for (int64_t i = 0; i < count; ++i) bytes[i] = reinterpret_cast<const char*>(rows[i]);
  if constexpr (sizeof(T) == 4) {
    transpose(bytes, count, depth * 4, to);
  } else {
    transpose(bytes, count, depth * 2, words);
    widen_pairs<T>(words, count, depth, to);
  }
}
