#include <array>

#include "../cpu_decode.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// Holds the arrays, whose values may change between steps.
struct Tables {
  Array<int32_t> prefix_table, prefix_len, suffix_table, suffix_len, slot_group, order, cu_slots;

  grpo::PageTables view() const {
    return {prefix_table.data(), prefix_len.data(),     suffix_table.data(),  suffix_len.data(),
            slot_group.data(),   order.data(),          cu_slots.data(),      prefix_len.size(),
            slot_group.size(),   prefix_table.shape(1), suffix_table.shape(1)};
  }
};

Tables tables_of(Array<int32_t> prefix_table, Array<int32_t> prefix_len,
                 Array<int32_t> suffix_table, Array<int32_t> suffix_len, Array<int32_t> slot_group,
                 Array<int32_t> order, Array<int32_t> cu_slots) {
  const py::ssize_t rows = prefix_len.size(), slots = slot_group.size();
  const auto check = [](const Array<int32_t>& a, const char* name, int dims, py::ssize_t size) {
    if (a.ndim() == dims && a.shape(0) == size) return;
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(dims) +
                                " dimensions, the first of " + std::to_string(size));
  };
  check(slot_group, "slot_group", 1, slots);
  check(prefix_len, "prefix_len", 1, rows);
  check(prefix_table, "prefix_table", 2, rows);
  check(suffix_table, "suffix_table", 2, slots);
  check(suffix_len, "suffix_len", 1, slots);
  check(order, "order", 1, slots);
  check(cu_slots, "cu_slots", 1, rows + 1);
  return {prefix_table, prefix_len, suffix_table, suffix_len, slot_group, order, cu_slots};
}

// An address and the strides of slots and heads, in elements.
using View = std::array<int64_t, 3>;

grpo::HeadRows rows_of(const View& x) { return {reinterpret_cast<const void*>(x[0]), x[1], x[2]}; }

// Addresses, not arrays: what an array costs to make is more than a small step takes.
// The caller answers for them. sizes: slots, heads, kv_heads, dim, pages, page.
void group_decode(const Tables& tables, const std::string& dtype,
                  const std::array<int64_t, 6>& sizes, const View& q, const View& k, const View& v,
                  int64_t k_pages, int64_t v_pages, int64_t out, float scale,
                  std::optional<float> softcap, std::optional<int64_t> window) {
  const auto [slots, heads, kv_heads, dim, pages, page] = sizes;
  const grpo::PageTables view = tables.view();
  const grpo::DecodeStep step{rows_of(q),
                              rows_of(k),
                              rows_of(v),
                              reinterpret_cast<void*>(k_pages),
                              reinterpret_cast<void*>(v_pages),
                              reinterpret_cast<void*>(out),
                              dtype_of(dtype),
                              slots,
                              heads,
                              kv_heads,
                              dim,
                              pages,
                              page,
                              scale,
                              softcap.value_or(0),
                              window.value_or(0)};
  py::gil_scoped_release release;
  grpo::group_decode(step, view);
}

}  // namespace

void bind_decode(py::module_& m) {
  py::class_<Tables>(m, "DecodeTables")
      .def(py::init(&tables_of), as_is("prefix_table"), as_is("prefix_len"), as_is("suffix_table"),
           as_is("suffix_len"), as_is("slot_group"), as_is("order"), as_is("cu_slots"));
  m.def("group_decode", &group_decode);
}

}  // namespace grpo::bindings
