#include <map>

#include "../simd.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

// Runs the kernels by a lesser instruction set than the best of this CPU, to try it.
void use_isa(const std::string& name) {
  const std::map<std::string, grpo::Isa> known{
      {"plain", grpo::Isa::plain}, {"avx2", grpo::Isa::avx2}, {"avx512", grpo::Isa::avx512}};
  const auto found = known.find(name);
  if (found == known.end() || found->second > grpo::best_isa()) {
    throw std::invalid_argument("this CPU and build have no " + name);
  }
  grpo::current_isa() = found->second;
}

}  // namespace

void bind_isa(py::module_& m) {
  m.def("use_isa", &use_isa);
  m.def("best_isa", [] {
    const char* names[] = {"plain", "avx2", "avx512"};
    return names[static_cast<int>(grpo::best_isa())];
  });
}

}  // namespace grpo::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of grpo_engine; called through grpo_engine.ops.";
  grpo::bindings::bind_pack(m);
  grpo::bindings::bind_loss(m);
  grpo::bindings::bind_head(m);
  grpo::bindings::bind_decode(m);
  grpo::bindings::bind_layers(m);
  grpo::bindings::bind_slots(m);
  grpo::bindings::bind_sampling(m);
  grpo::bindings::bind_isa(m);
}
