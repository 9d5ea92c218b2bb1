#include <tuple>

#include "../cpu_sampling.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// bfloat16 and float16 come as the 16-bit integers that hold them.
std::tuple<Array<int64_t>, Array<float>, Array<float>> sample_rows(
    const py::array& logits, const std::string& dtype, const Array<double>& uniform,
    const Array<double>& temperature, const MaybeArray<int64_t>& top_k,
    const MaybeArray<double>& top_p, const MaybeArray<double>& min_p,
    const MaybeArray<double>& penalty, const MaybeArray<bool>& seen) {
  const grpo::Dtype kind = dtype_of(dtype);
  const py::ssize_t rows = uniform.size(), columns = logits.ndim() == 2 ? logits.shape(1) : 0;
  require_matrix(logits, "logits", rows, columns, kind == grpo::Dtype::float32 ? 4 : 2);
  if (rows > 0 && columns < 1) throw std::invalid_argument("logits must have a column");
  if (temperature.size() != rows) throw std::invalid_argument("temperature: one value a row");
  if (penalty && !seen) throw std::invalid_argument("a repetition penalty needs what was seen");
  const grpo::Sampling in{logits.data(),
                          kind,
                          rows,
                          columns,
                          uniform.data(),
                          temperature.data(),
                          data_of(top_k, "top_k", rows),
                          data_of(top_p, "top_p", rows),
                          data_of(min_p, "min_p", rows),
                          data_of(penalty, "repetition_penalty", rows),
                          flags_of(seen, "seen", rows * columns)};
  Array<int64_t> tokens(rows);
  Array<float> logp_sampler(rows), logp_processed(rows);
  const grpo::Draws out{tokens.mutable_data(), logp_sampler.mutable_data(),
                        logp_processed.mutable_data()};
  int64_t failed;
  {
    py::gil_scoped_release release;
    failed = grpo::sample_rows(in, out);
  }
  if (failed >= 0) {
    throw std::invalid_argument("logits must be a distribution in every row; row " +
                                std::to_string(failed) + " has NaN or +inf, or only -inf");
  }
  return {tokens, logp_sampler, logp_processed};
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("sample_rows", &sample_rows, as_is("logits"), py::arg("dtype"), as_is("uniform"),
        as_is("temperature"), as_is("top_k"), as_is("top_p"), as_is("min_p"),
        as_is("repetition_penalty"), as_is("seen"));
}

}  // namespace grpo::bindings
