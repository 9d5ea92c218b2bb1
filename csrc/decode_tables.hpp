// The tables of a decode step, as kernels/reference_decode.py::DecodeTables, in one buffer.
#pragma once

#include <cstdint>
#include <vector>

namespace grpo {

struct DecodeTables {
  struct View {
    const char* name;
    std::vector<int64_t> shape;
    int64_t start;  // in the buffer
  };

  // Everything is 0 but slot_group, which is idle, and order, which counts the slots up.
  DecodeTables(int32_t slots, int32_t prefix_pages, int32_t suffix_pages);
  DecodeTables(const DecodeTables&) = delete;

  int32_t* prefix_row(int64_t row) { return prefix_table + row * prefix_pages; }
  int32_t* suffix_row(int64_t slot) { return suffix_table + slot * suffix_pages; }

  static constexpr int32_t idle = -1;
  const int64_t prefix_pages, suffix_pages;
  std::vector<View> views;
  std::vector<int32_t> buffer;
  int32_t *prefix_table, *prefix_len, *suffix_table, *suffix_len, *slot_group, *order, *cu_slots;
};

}  // namespace grpo
