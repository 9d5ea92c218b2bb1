#include <vector>

#include "../cpu_head.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// bfloat16 and float16 come as the 16-bit integers that hold them.
grpo::Tile tile_of(py::array& tile, const py::array& hidden, const py::array& weight,
                   const Array<int64_t>& targets, py::ssize_t first_column,
                   const std::string& dtype) {
  const grpo::Dtype kind = dtype_of(dtype);
  const py::ssize_t itemsize = kind == grpo::Dtype::float32 ? 4 : 2;
  const py::ssize_t rows = targets.size();
  if (weight.ndim() != 2) throw std::invalid_argument("weight must be [columns, width]");
  const py::ssize_t columns = weight.shape(0), width = weight.shape(1);
  require_matrix(tile, "tile", rows, columns, itemsize);
  require_matrix(hidden, "hidden", rows, width, itemsize);
  require_matrix(weight, "weight", columns, width, itemsize);
  for (py::ssize_t i = 0; first_column == 0 && i < rows; ++i) {
    if (targets.data()[i] < 0) throw std::invalid_argument("targets must be >= 0");
  }
  return {tile.mutable_data(), hidden.data(), weight.data(), kind, rows, columns, width,
          first_column,        targets.data()};
}

grpo::LogitMap map_of(const MaybeArray<float>& bias, const Array<float>& inv_temperature,
                      std::optional<float> softcap, float logit_scale, const grpo::Tile& tile) {
  if (inv_temperature.size() != tile.rows) {
    throw std::invalid_argument("inv_temperature must hold one value a row");
  }
  return {data_of(bias, "bias", tile.columns), inv_temperature.data(), softcap.value_or(0),
          logit_scale};
}

// logp, entropy, lse, target_weight, each [rows].
std::vector<Array<float>> softmax_rows(py::array& tile, const py::array& hidden,
                                       const py::array& weight, const Array<int64_t>& targets,
                                       const std::string& dtype, const MaybeArray<float>& bias,
                                       const Array<float>& inv_temperature,
                                       std::optional<float> softcap, float logit_scale,
                                       bool gradient) {
  const grpo::Tile t = tile_of(tile, hidden, weight, targets, 0, dtype);
  for (int64_t row = 0; row < t.rows; ++row) {
    if (t.targets[row] >= t.columns) throw std::invalid_argument("targets must be under V");
  }
  const grpo::LogitMap map = map_of(bias, inv_temperature, softcap, logit_scale, t);
  std::vector<Array<float>> out;
  for (int i = 0; i < (gradient ? 4 : 3); ++i) out.emplace_back(t.rows);
  const grpo::RowStats stats{out[0].mutable_data(), out[1].mutable_data(), out[2].mutable_data(),
                             gradient ? out[3].mutable_data() : nullptr};
  py::gil_scoped_release release;
  grpo::softmax_rows(t, map, gradient, stats);
  return out;
}

void gradient_rows(py::array& tile, const py::array& hidden, const py::array& weight,
                   const Array<int64_t>& targets, const std::string& dtype,
                   const MaybeArray<float>& bias, const Array<float>& inv_temperature,
                   std::optional<float> softcap, float logit_scale, py::ssize_t first_column,
                   const Array<float>& lse, const Array<float>& logp,
                   const Array<float>& upstream) {
  const grpo::Tile t = tile_of(tile, hidden, weight, targets, first_column, dtype);
  const grpo::LogitMap map = map_of(bias, inv_temperature, softcap, logit_scale, t);
  for (const auto* a : {&lse, &logp, &upstream}) {
    if (a->size() != t.rows) throw std::invalid_argument("lse, logp, upstream: one value a row");
  }
  py::gil_scoped_release release;
  grpo::gradient_rows(t, map, lse.data(), logp.data(), upstream.data());
}

// sum [rows, columns] float32 += x in half precision, both contiguous.
void accumulate(Array<float>& sum, const py::array& x, const std::string& dtype) {
  if (sum.ndim() != 2) throw std::invalid_argument("sum must be [rows, columns]");
  require_matrix(x, "x", sum.shape(0), sum.shape(1), 2);
  float* to = sum.mutable_data();
  py::gil_scoped_release release;
  grpo::accumulate(to, x.data(), dtype_of(dtype), sum.size());
}

}  // namespace

void bind_head(py::module_& m) {
  m.def("softmax_rows", &softmax_rows, as_is("tile"), as_is("hidden"), as_is("weight"),
        as_is("targets"), py::arg("dtype"), as_is("bias"), as_is("inv_temperature"),
        py::arg("softcap"), py::arg("logit_scale"), py::arg("gradient"));
  m.def("gradient_rows", &gradient_rows, as_is("tile"), as_is("hidden"), as_is("weight"),
        as_is("targets"), py::arg("dtype"), as_is("bias"), as_is("inv_temperature"),
        py::arg("softcap"), py::arg("logit_scale"), py::arg("first_column"), as_is("lse"),
        as_is("logp"), as_is("upstream"));
  m.def("accumulate", &accumulate, as_is("sum"), as_is("x"), py::arg("dtype"));
  m.def(
      "prefer_huge_pages",
      [](py::array& a) { grpo::prefer_huge_pages(a.mutable_data(), a.nbytes()); }, as_is("array"));
}

}  // namespace grpo::bindings
