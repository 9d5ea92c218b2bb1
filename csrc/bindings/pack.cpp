#include "../pack.hpp"

#include <tuple>
#include <vector>

#include "arrays.hpp"

namespace grpo::bindings {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;
using PySlice = std::tuple<int32_t, int32_t, int32_t>;

void require_1d(const IntArray& a, const char* name, py::ssize_t size) {
  if (a.ndim() != 1 || a.size() != size) {
    throw std::invalid_argument(std::string(name) + " must be a vector of " + std::to_string(size) +
                                " int32; given " + std::to_string(a.size()) + " values in " +
                                std::to_string(a.ndim()) + " dimensions");
  }
}

std::vector<std::vector<PySlice>> pack_groups(const IntArray& prompt_len,
                                              const IntArray& completion_len,
                                              const IntArray& cu_groups, int64_t token_budget,
                                              bool shared_prompt) {
  const py::ssize_t groups = prompt_len.size();
  require_1d(prompt_len, "prompt_len", groups);
  require_1d(cu_groups, "cu_groups", groups + 1);
  require_1d(completion_len, "completion_len", cu_groups.data()[groups]);
  const grpo::Lengths lengths{prompt_len.data(), completion_len.data(), cu_groups.data(),
                              static_cast<int32_t>(groups)};
  std::vector<grpo::MicroBatch> batches;
  {
    py::gil_scoped_release release;
    batches = grpo::pack_groups(lengths, token_budget, shared_prompt);
  }
  std::vector<std::vector<PySlice>> result(batches.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    for (const auto& s : batches[b]) result[b].emplace_back(s.group, s.first, s.last);
  }
  return result;
}

}  // namespace

void bind_pack(py::module_& m) {
  m.def("pack_groups", &pack_groups, py::arg("prompt_len"), py::arg("completion_len"),
        py::arg("cu_groups"), py::arg("token_budget"), py::arg("shared_prompt"));
}

}  // namespace grpo::bindings
