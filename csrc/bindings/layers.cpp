#include "../cpu_layers.hpp"
#include "../cpu_linear.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// Addresses, not arrays, as in decode.cpp: the caller answers for them.
void* at(int64_t address) { return reinterpret_cast<void*>(address); }

void linear(const std::string& dtype, int64_t x, int64_t x_stride, int64_t weight, int64_t bias,
            int64_t out, int64_t rows, int64_t width, int64_t columns) {
  const grpo::Linear layer{at(x),    at(weight), at(bias), at(out), dtype_of(dtype),
                           x_stride, rows,       width,    columns};
  py::gil_scoped_release release;
  grpo::linear(layer);
}

void rms_norm(const std::string& dtype, int64_t x, int64_t weight, int64_t out, int64_t rows,
              int64_t width, float epsilon, bool gemma) {
  py::gil_scoped_release release;
  grpo::rms_norm({at(x), at(weight), at(out), dtype_of(dtype), rows, width, epsilon, gemma});
}

void gated(const std::string& dtype, int64_t gate, int64_t up, int64_t out, int64_t count,
           bool gelu) {
  const auto activation = gelu ? grpo::Activation::gelu_tanh : grpo::Activation::silu;
  py::gil_scoped_release release;
  grpo::gated({at(gate), at(up), at(out), dtype_of(dtype), count, activation});
}

void rotate(const std::string& dtype, int64_t x, int64_t cos, int64_t sin, int64_t rows,
            int64_t heads, int64_t dim) {
  py::gil_scoped_release release;
  grpo::rotate({at(x), at(cos), at(sin), dtype_of(dtype), rows, heads, dim});
}

}  // namespace

void bind_layers(py::module_& m) {
  m.def("linear", &linear);
  m.def("rms_norm", &rms_norm);
  m.def("gated", &gated);
  m.def("rotate", &rotate);
  m.def("has_bfloat16_units", &grpo::has_bfloat16_units);
}

}  // namespace grpo::bindings
