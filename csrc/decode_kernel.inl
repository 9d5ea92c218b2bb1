// The parts of decode attention; compiled by cpu_decode.cpp for each instruction set.

#include "dot_products.inl"
#include "small_products.inl"
#include "tanh.inl"

// Keys [first, end) of a prompt or of a slot, of one head.
template <typename T>
struct Span {
  const T *k_pages, *v_pages;  // at the head
  const int32_t* ids;
  int64_t page, token_stride;
  int64_t first, end;

  void find(int64_t key, int64_t count, int64_t* offsets) const {
    int64_t at = key / page, token = key % page;
    for (int64_t i = 0; i < count; ++i) {
      offsets[i] = (ids[at] * page + token) * token_stride;
      if (++token == page) ++at, token = 0;
    }
  }
};

template <typename T>
Span<T> span_of(const DecodeStep& s, const int32_t* ids, int64_t kv_head, int64_t first,
                int64_t end) {
  const int64_t at = kv_head * s.dim;
  return {static_cast<const T*>(s.k_pages) + at,
          static_cast<const T*>(s.v_pages) + at,
          ids,
          s.page,
          s.kv_heads * s.dim,
          first,
          end};
}

// e^below for below <= 0, exactly 0 where float32 has no normal number for it.
template <typename X>
GRPO_INLINE X weight_of(X below) {
  return select(below < -87.0f, X{}, exp_bounded(below));
}

// Finishes the scores of a row: those before `hidden` and from `count` on become -inf; the largest.
__attribute__((noinline)) float finish_scores(float* scores, int64_t count, int64_t hidden,
                                              float softcap) {
  const Mask lanes = lane_ids();
  const auto first = static_cast<int32_t>(std::clamp<int64_t>(hidden, 0, kBlock));
  const auto last = static_cast<int32_t>(count);
  Floats most = splat<Floats>(-kInfinity);
  for (int32_t i = 0; i < last; i += kLanes) {
    Floats x = load_as_floats(scores + i);
    if (softcap != 0) x = softcap * tanh_of(x);
    if (i < first || i + kLanes > last) {
      const Mask place = lanes + i;
      x = select((place < first) | (place >= last), splat<Floats>(-kInfinity), x);
    }
    store_floats(scores + i, x);
    most = select(x > most, x, most);
  }
  return max_of(most);
}

// The peaks rise to the highest of the block; s.factors of all that was summed under the last ones.
GRPO_INLINE void raise_peaks(int64_t rows, Scratch& s) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    const Floats peak = load_as_floats(s.peaks + row), block = load_as_floats(s.highest + row);
    const Floats higher = select(block > peak, block, peak);
    store_floats(s.factors + row, weight_of(peak - higher));
    store_floats(s.peaks + row, higher);
  }
}

// The scores of a row become weights e^(score - peak); returns their sum by lanes.
__attribute__((noinline)) Floats weigh(float* scores, int64_t count, float peak) {
  Floats sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats weight = weight_of(load_as_floats(scores + i) - peak);
    store_floats(scores + i, weight);
    sum += weight;
  }
  return sum;
}

__attribute__((noinline)) void rescale(float* x, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += kLanes) store_floats(x + i, load_as_floats(x + i) * factor);
}

// s.weights of the query rows and `count` keys.
template <typename T>
void score(const T* pages, int64_t rows, int64_t count, int64_t dim, Scratch& s) {
  const T* keys[kBlock];
  for (int64_t i = 0; i < count; ++i) keys[i] = pages + s.offsets[i];
  const Dots<T> dots{s.queries, s.width, keys, s.weights, kBlock, rows, count, dim, false};
  multiply_widened(dots, s.floats, s.width);
}

// s.values of `count` rows of whole vectors: in place if they are, 0 after `dim`.
template <typename T>
void load_values(const T* pages, int64_t count, int64_t dim, Scratch& s) {
  for (int64_t i = 0; i < count; ++i) {
    const T* from = pages + s.offsets[i];
    if constexpr (sizeof(T) == 4) {
      s.values[i] = from;
      if (dim == s.width) continue;
    }
    float* row = s.floats + i * s.width;
    widen_row(from, dim, row);
    std::fill_n(row + dim, s.width - dim, 0.0f);
    s.values[i] = row;
  }
}

// Asks for rows of the pool that are read soon.
template <typename T>
__attribute__((noinline)) void prefetch_rows(const T* pages, const int64_t* offsets, int64_t count,
                                             int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < dim; c += kLine) __builtin_prefetch(pages + offsets[i] + c);
  }
}

// Adds the keys of the span to the state of the first `rows` query rows, block by block.
template <typename T>
void attend(const Span<T>& span, int64_t rows, int64_t dim, float softcap, Scratch& s) {
  for (int64_t at = span.first; at < span.end; at += kBlock) {
    const int64_t count = std::min(kBlock, span.end - at);
    span.find(at, count, s.offsets.data());
    score(span.k_pages, rows, count, dim, s);
    prefetch_rows(span.v_pages, s.offsets.data(), count, dim);
    for (int64_t row = 0; row < rows; ++row) {
      s.highest[row] = finish_scores(s.weights + row * kBlock, count, s.seen[row] - at, softcap);
    }
    raise_peaks(rows, s);
    for (int64_t row = 0; row < rows; ++row) {
      const float factor = s.factors[row];
      float* sums = s.sums + row * kLanes;
      const Floats added = weigh(s.weights + row * kBlock, count, s.peaks[row]);
      store_floats(sums, load_as_floats(sums) * factor + added);
      if (factor != 1) rescale(s.out + row * s.width, s.width, factor);
    }
    load_values(span.v_pages, count, dim, s);
    if (at + kBlock < span.end) {
      const int64_t next = std::min(kBlock, span.end - at - kBlock);
      span.find(at + kBlock, next, s.offsets.data());
      prefetch_rows(span.k_pages, s.offsets.data(), next, dim);
    }
    multiply(
        {s.weights, kBlock, s.values.data(), s.out, s.width, rows, count, s.width / kLanes, true});
  }
}

// The query rows of a slot that read one head of keys, scaled; their state before any key.
template <typename T>
void begin_rows(const DecodeStep& step, int64_t slot, int64_t kv_head, int64_t seen, int64_t row,
                Scratch& s) {
  const int64_t repeat = step.heads / step.kv_heads;
  const float scale = step.softcap != 0 ? step.scale / step.softcap : step.scale;
  const T* q = static_cast<const T*>(step.q.data) + slot * step.q.slot_stride +
               kv_head * repeat * step.q.head_stride;
  for (int64_t r = row; r < row + repeat; ++r, q += step.q.head_stride) {
    for (int64_t i = 0; i < step.dim; i += kLanes) {
      store_floats(s.queries + r * s.width + i, load_some(q + i, step.dim - i) * scale);
    }
    std::fill_n(s.out + r * s.width, s.width, 0.0f);
    store_floats(s.sums + r * kLanes, Floats{});
    s.peaks[r] = kNoPeak;
    s.seen[r] = seen;
  }
}

// A chunk of a prompt for the members of a tile.
template <typename T>
void prompt_part(const DecodeStep& step, const PageTables& tables, const Plan& plan,
                 const PromptTask& task, int64_t kv_head, const Partials& partials, Scratch& s) {
  const int64_t repeat = step.heads / step.kv_heads;
  const Tile& tile = plan.tiles[task.tile];
  const Member* members = plan.members.data() + tile.member;
  int64_t seen = members[0].seen;
  for (int64_t m = 0; m < tile.members; ++m) {
    begin_rows<T>(step, members[m].slot, kv_head, members[m].seen, m * repeat, s);
    seen = std::min(seen, members[m].seen);
  }
  const int64_t start = task.chunk * tile.chunk_keys;
  const int64_t end = std::min(start + tile.chunk_keys, members[0].prompt);
  const int64_t first = start + std::max<int64_t>(0, seen - start) / kBlock * kBlock;
  const int32_t* ids = tables.prefix_table + members[0].row * tables.prefix_pages;
  attend(span_of<T>(step, ids, kv_head, first, end), tile.members * repeat, step.dim, step.softcap,
         s);
  for (int64_t row = 0; row < tile.members * repeat; ++row) {
    const int64_t partial = members[row / repeat].partials + task.chunk - tile.first_chunk;
    float* to = partials.row(partial, kv_head * repeat + row % repeat);
    std::memcpy(to, s.out + row * s.width, s.width * sizeof(float));
    to[s.width] = s.peaks[row];
    to[s.width + 1] = sum_of(load_as_floats(s.sums + row * kLanes));
  }
}

// Adds a partial result to the state of a row.
GRPO_INLINE void merge(const float* partial, int64_t row, Scratch& s) {
  const float peak = partial[s.width], higher = std::max(s.peaks[row], peak);
  const float kept = weight_of(s.peaks[row] - higher), added = weight_of(peak - higher);
  float* out = s.out + row * s.width;
  for (int64_t i = 0; i < s.width; i += kLanes) {
    store_floats(out + i, load_as_floats(out + i) * kept + load_as_floats(partial + i) * added);
  }
  s.sums[row * kLanes] = s.sums[row * kLanes] * kept + partial[s.width + 1] * added;
  s.peaks[row] = higher;
}

template <typename T>
void write_token(const DecodeStep& step, int64_t slot, int64_t kv_head, const HeadRows& from,
                 void* pages, int64_t token) {
  const T* row =
      static_cast<const T*>(from.data) + slot * from.slot_stride + kv_head * from.head_stride;
  T* to = static_cast<T*>(pages) + (token * step.kv_heads + kv_head) * step.dim;
  std::memcpy(to, row, step.dim * sizeof(T));
}

// Merges the chunks of the prompt, writes the new token, adds the slot's own keys, and divides.
template <typename T>
void own_part(const DecodeStep& step, const PageTables& tables, const Plan& plan,
              const Member& member, int64_t kv_head, const Partials& partials, Scratch& s) {
  const int64_t repeat = step.heads / step.kv_heads, head = kv_head * repeat;
  const int32_t* ids = tables.suffix_table + member.slot * tables.suffix_pages;
  const int64_t last = member.own - 1, token = ids[last / step.page] * step.page + last % step.page;
  write_token<T>(step, member.slot, kv_head, step.k, step.k_pages, token);
  write_token<T>(step, member.slot, kv_head, step.v, step.v_pages, token);
  const int64_t seen = std::max<int64_t>(0, member.seen - member.prompt);
  begin_rows<T>(step, member.slot, kv_head, seen, 0, s);
  for (int64_t c = 0; c < member.chunks; ++c) {
    for (int64_t r = 0; r < repeat; ++r) merge(partials.row(member.partials + c, head + r), r, s);
  }
  attend(span_of<T>(step, ids, kv_head, seen / kBlock * kBlock, member.own), repeat, step.dim,
         step.softcap, s);
  T* out = static_cast<T*>(step.out) + (member.slot * step.heads + head) * step.dim;
  for (int64_t r = 0; r < repeat; ++r, out += step.dim) {
    const float share = 1 / sum_of(load_as_floats(s.sums + r * kLanes));
    for (int64_t i = 0; i < step.dim; i += kLanes) {
      store_some(out + i, load_as_floats(s.out + r * s.width + i) * share, step.dim - i);
    }
  }
}

void any_prompt_part(const DecodeStep& step, const PageTables& tables, const Plan& plan,
                     const PromptTask& task, int64_t kv_head, const Partials& partials,
                     Scratch& s) {
  switch (step.dtype) {
    case Dtype::float32:
      return prompt_part<float>(step, tables, plan, task, kv_head, partials, s);
    case Dtype::bfloat16:
      return prompt_part<BFloat16>(step, tables, plan, task, kv_head, partials, s);
    case Dtype::float16:
      return prompt_part<Float16>(step, tables, plan, task, kv_head, partials, s);
  }
}

void any_own_part(const DecodeStep& step, const PageTables& tables, const Plan& plan,
                  const Member& member, int64_t kv_head, const Partials& partials, Scratch& s) {
  switch (step.dtype) {
    case Dtype::float32:
      return own_part<float>(step, tables, plan, member, kv_head, partials, s);
    case Dtype::bfloat16:
      return own_part<BFloat16>(step, tables, plan, member, kv_head, partials, s);
    case Dtype::float16:
      return own_part<Float16>(step, tables, plan, member, kv_head, partials, s);
  }
}
