// Decode attention over pages of keys and values that groups share: the twin of
// kernels/reference_decode.py::group_decode.
#pragma once

#include <cstdint>

#include "dtype.hpp"

namespace grpo {

// Where the keys and values of the slots lie; the fields of reference_decode.py::DecodeTables.
struct PageTables {
  const int32_t *prefix_table, *prefix_len;  // [rows, prefix_pages], [rows]; a row per group
  const int32_t *suffix_table, *suffix_len;  // [slots, suffix_pages], [slots]
  const int32_t *slot_group, *order;         // [slots]
  const int32_t* cu_slots;                   // [rows + 1]
  int64_t rows, slots, prefix_pages, suffix_pages;
};

// A view [slots, heads, dim], contiguous in its last dimension; strides in elements.
struct HeadRows {
  const void* data;
  int64_t slot_stride, head_stride;
};

struct DecodeStep {
  HeadRows q, k, v;
  void *k_pages, *v_pages;  // [pages, page, kv_heads, dim]
  void* out;                // [slots, heads, dim]
  Dtype dtype;              // of all six
  int64_t slots, heads, kv_heads, dim, pages, page;
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
};

// Writes the new keys and values into their pages, then attends; idle slots give 0.
// The bits of a slot's result hang neither on the other slots nor on the number of threads.
// Throws std::invalid_argument for tables that point outside the pages or contradict each other.
void group_decode(const DecodeStep& step, const PageTables& tables);

}  // namespace grpo
