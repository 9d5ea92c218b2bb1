#include "cpu_decode.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block.hpp"
#include "simd.hpp"

namespace grpo {
namespace {

// Sums are split by these lengths alone, so that their order never hangs on W or the threads.
constexpr int64_t kChunk = 256;      // least keys of a prompt that are one task
constexpr int64_t kMostChunks = 16;  // of a prompt: bounds what is kept of each row

constexpr int64_t kTaskRows = 48;  // query rows that read a chunk together
constexpr float kNoPeak = -3.4e38f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// An active slot, in the order of the groups.
struct Member {
  int64_t slot, row, prompt, own;
  int64_t seen;              // the first position that its window covers
  int64_t partials, chunks;  // its first partial result, and how many: one for each chunk
};

// Members of one group that read its prompt together.
struct Tile {
  int64_t member, members;
  int64_t first_chunk, chunk_keys;
};

struct PromptTask {
  int64_t tile, chunk;
};

struct Plan {
  std::vector<Member> members;
  std::vector<Tile> tiles;
  std::vector<PromptTask> prompt_tasks;
  int64_t partials = 0;  // of [heads] rows each
};

// What a thread keeps of the query rows of a task and of a block of keys.
struct Scratch {
  int64_t width;                        // dim, up to whole vectors
  float* queries;                       // [rows, width], scaled
  float* out;                           // [rows, width]
  float* weights;                       // [rows, kBlock]; the scores first
  float* sums;                          // [rows, 16]; sum of the weights, by lanes
  float* peaks;                         // [rows], up to whole vectors
  float* highest;                       // as peaks; of a block
  float* factors;                       // as peaks; of what was summed before a block
  float* floats;                        // [kBlock, width]; keys, then values
  std::vector<int64_t> seen;            // [rows]; the first key that a row sees
  std::array<int64_t, kBlock> offsets;  // of the keys of the block, in the pool
  std::array<const float*, kBlock> values;

  Scratch(Memory& memory, int64_t dim, int64_t rows) : width(round_up(dim, 16)), seen(rows) {
    rows = round_up(rows, 16);
    float* at = memory.reserve(rows * (2 * width + kBlock + 19) + width * kBlock);
    const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
    queries = take(rows * width);
    out = take(rows * width);
    weights = take(rows * kBlock);
    sums = take(rows * 16);
    peaks = take(rows);
    highest = take(rows);
    factors = take(rows);
    floats = take(width * kBlock);
  }
};

// Results over part of the keys, a row for each query head: [width] sums of values, peak, sum.
struct Partials {
  float* data;
  int64_t heads, width;

  int64_t stride() const { return width + 16; }
  float* row(int64_t partial, int64_t head) const {
    return data + (partial * heads + head) * stride();
  }
};

}  // namespace
}  // namespace grpo

#define GRPO_KERNEL "decode_kernel.inl"
#include "each_isa.inl"

namespace grpo {
namespace {

constexpr int64_t kSerialProducts = 1 << 17;  // fewer are done before a second thread has begun

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_pages(const int32_t* ids, int64_t count, int64_t pages, const char* message) {
  bool inside = true;
  for (int64_t i = 0; i < count; ++i) inside &= ids[i] >= 0 && ids[i] < pages;
  require(inside, message);
}

Member member_of(const DecodeStep& s, const PageTables& t, int64_t slot, int64_t row) {
  const int64_t prompt = t.prefix_len[row], own = t.suffix_len[slot];
  require(own <= t.suffix_pages * s.page, "suffix_len must fit into the pages of suffix_table");
  check_pages(t.suffix_table + slot * t.suffix_pages, ceil_div(own, s.page), s.pages,
              "suffix_table must hold pages of the pool");
  const int64_t seen = s.window ? std::max<int64_t>(0, prompt + own - s.window) : 0;
  return {slot, row, prompt, own, seen, 0, 0};
}

// The members of plan from `first` on are those of one row: tiles of them, and their tasks.
void plan_row(const DecodeStep& s, const PageTables& t, int64_t row, int64_t first, Plan& plan) {
  const int64_t prompt = t.prefix_len[row], repeat = s.heads / s.kv_heads;
  require(prompt >= 0 && prompt <= t.prefix_pages * s.page,
          "prefix_len must be >= 0 and fit into the pages of prefix_table");
  check_pages(t.prefix_table + row * t.prefix_pages, ceil_div(prompt, s.page), s.pages,
              "prefix_table must hold pages of the pool");
  const int64_t keys = std::max(kChunk, round_up(ceil_div(prompt, kMostChunks), kBlock));
  const int64_t chunks = ceil_div(prompt, keys);
  const int64_t most = std::max<int64_t>(1, kTaskRows / repeat);
  const int64_t end = static_cast<int64_t>(plan.members.size());
  for (int64_t at = first; at < end; at += most) {
    const int64_t count = std::min(most, end - at);
    int64_t seen = prompt;
    for (int64_t i = at; i < at + count; ++i) seen = std::min(seen, plan.members[i].seen);
    const int64_t first_chunk = seen < prompt ? seen / keys : chunks;
    for (int64_t i = at; i < at + count; ++i) {
      plan.members[i].partials = plan.partials;
      plan.members[i].chunks = chunks - first_chunk;
      plan.partials += chunks - first_chunk;
    }
    const auto tile = static_cast<int64_t>(plan.tiles.size());
    plan.tiles.push_back({at, count, first_chunk, keys});
    for (int64_t c = first_chunk; c < chunks; ++c) plan.prompt_tasks.push_back({tile, c});
  }
}

Plan plan_of(const DecodeStep& s, const PageTables& t) {
  require(t.slots == s.slots, "q must have as many slots as the tables");
  require(t.cu_slots[0] == 0, "cu_slots must start at 0");
  Plan plan;
  int64_t active = 0;
  for (int64_t i = 0; i < s.slots; ++i) active += t.slot_group[i] >= 0 && t.suffix_len[i] > 0;
  for (int64_t row = 0; row < t.rows; ++row) {
    const int64_t begin = t.cu_slots[row], end = t.cu_slots[row + 1];
    require(begin <= end && end <= s.slots, "cu_slots must never fall and end at most at W");
    const auto first = static_cast<int64_t>(plan.members.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = t.order[i];
      require(slot >= 0 && slot < s.slots, "order must hold slots");
      require(t.slot_group[slot] == row, "order must hold the slots of each row, as slot_group");
      if (t.suffix_len[slot] > 0) plan.members.push_back(member_of(s, t, slot, row));
    }
    if (static_cast<int64_t>(plan.members.size()) > first) plan_row(s, t, row, first, plan);
  }
  std::vector<bool> found(s.slots);
  for (const Member& m : plan.members) found[m.slot] = true;
  const auto distinct = std::count(found.begin(), found.end(), true);
  require(distinct == active && distinct == static_cast<int64_t>(plan.members.size()),
          "order must hold each active slot once");
  return plan;
}

void clear_idle(const DecodeStep& s, const Plan& plan) {
  const int64_t bytes = s.heads * s.dim * (s.dtype == Dtype::float32 ? 4 : 2);
  std::vector<bool> active(s.slots);
  for (const Member& m : plan.members) active[m.slot] = true;
  for (int64_t slot = 0; slot < s.slots; ++slot) {
    if (!active[slot]) std::memset(static_cast<char*>(s.out) + slot * bytes, 0, bytes);
  }
}

}  // namespace

void group_decode(const DecodeStep& s, const PageTables& t) {
  const Plan plan = plan_of(s, t);
  clear_idle(s, plan);
  thread_local Memory partial_memory;
  const int64_t width = round_up(s.dim, 16);
  const Partials partials{partial_memory.reserve(plan.partials * s.heads * (width + 16)), s.heads,
                          width};
  const auto prompt_part = GRPO_BEST(any_prompt_part);
  const auto own_part = GRPO_BEST(any_own_part);
  const auto prompt_items = static_cast<int64_t>(plan.prompt_tasks.size()) * s.kv_heads;
  const auto own_items = static_cast<int64_t>(plan.members.size()) * s.kv_heads;
  int64_t keys = 0;
  for (const Member& m : plan.members) keys += m.prompt + m.own - m.seen;
#pragma omp parallel if (keys * s.heads * s.dim > kSerialProducts)
  {
    thread_local Memory memory;
    Scratch scratch(memory, s.dim, std::max(kTaskRows, s.heads / s.kv_heads));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < prompt_items; ++i) {
      prompt_part(s, t, plan, plan.prompt_tasks[i / s.kv_heads], i % s.kv_heads, partials, scratch);
    }
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < own_items; ++i) {
      own_part(s, t, plan, plan.members[i / s.kv_heads], i % s.kv_heads, partials, scratch);
    }
  }
}

}  // namespace grpo
