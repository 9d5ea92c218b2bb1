#include "../cpu_linear.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// Addresses, not arrays, as in decode.cpp: the caller answers for them.
void linear(const std::string& dtype, int64_t x, int64_t x_stride, int64_t weight, int64_t bias,
            int64_t out, int64_t rows, int64_t width, int64_t columns) {
  const auto at = [](int64_t address) { return reinterpret_cast<void*>(address); };
  const grpo::Linear layer{at(x),    at(weight), at(bias), at(out), dtype_of(dtype),
                           x_stride, rows,       width,    columns};
  py::gil_scoped_release release;
  grpo::linear(layer);
}

}  // namespace

void bind_layers(py::module_& m) {
  m.def("linear", &linear);
  m.def("has_bfloat16_units", &grpo::has_bfloat16_units);
}

}  // namespace grpo::bindings
