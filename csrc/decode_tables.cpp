#include "decode_tables.hpp"

#include <algorithm>
#include <numeric>

namespace grpo {
namespace {

// Every view starts at 16 bytes, which Triton compiles for: so it does once, whatever the sizes.
constexpr int64_t alignment = 4;

}  // namespace

DecodeTables::DecodeTables(int32_t slots, int32_t prefix_pages, int32_t suffix_pages)
    : prefix_pages(prefix_pages), suffix_pages(suffix_pages) {
  int64_t size = 0;
  const auto add = [&](const char* name, const std::vector<int64_t>& shape) {
    views.push_back({name, shape, size});
    const int64_t used =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    size += (used + alignment - 1) / alignment * alignment;
  };
  add("prefix_table", {slots, prefix_pages});
  add("prefix_len", {slots});
  add("suffix_table", {slots, suffix_pages});
  add("suffix_len", {slots});
  add("slot_group", {slots});
  add("order", {slots});
  add("cu_slots", {int64_t{slots} + 1});
  buffer.resize(size);
  int32_t** const tables[] = {&prefix_table, &prefix_len, &suffix_table, &suffix_len,
                              &slot_group,   &order,      &cu_slots};
  for (size_t i = 0; i < views.size(); ++i) *tables[i] = buffer.data() + views[i].start;
  std::fill_n(slot_group, slots, idle);
  std::iota(order, order + slots, 0);
}

}  // namespace grpo
