// Arrays of Python, checked at the border: what every file of bindings uses.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "../dtype.hpp"

namespace grpo::bindings {

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using MaybeArray = std::optional<Array<T>>;

// Nothing is converted: a copy would be written to, or made again in each call.
inline py::arg as_is(const char* name) {
  py::arg argument(name);
  return argument.noconvert();
}

template <typename T>
const T* data_of(const MaybeArray<T>& a, const char* name, py::ssize_t size) {
  if (!a) return nullptr;
  if (a->size() != size) {
    throw std::invalid_argument(std::string(name) + " must hold " + std::to_string(size) +
                                " values; given " + std::to_string(a->size()));
  }
  return a->data();
}

inline const uint8_t* flags_of(const MaybeArray<bool>& a, const char* name, py::ssize_t size) {
  return reinterpret_cast<const uint8_t*>(data_of(a, name, size));
}

inline void check_offsets(const Array<int32_t>& offsets, const char* name, py::ssize_t total) {
  const int32_t* at = offsets.data();
  bool rising = offsets.size() > 0 && at[0] == 0 && at[offsets.size() - 1] == total;
  for (py::ssize_t i = 1; rising && i < offsets.size(); ++i) rising = at[i - 1] <= at[i];
  if (!rising) {
    throw std::invalid_argument(std::string(name) + " must start at 0, never fall and end at " +
                                std::to_string(total) + "; given " +
                                py::str(offsets.attr("tolist")()).cast<std::string>());
  }
}

inline Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::float32;
  if (name == "bfloat16") return Dtype::bfloat16;
  if (name == "float16") return Dtype::float16;
  throw std::invalid_argument("no kernel for " + name);
}

inline void require_matrix(const py::array& a, const char* name, py::ssize_t rows,
                           py::ssize_t columns, py::ssize_t itemsize) {
  const bool contiguous = (a.flags() & py::array::c_style) != 0;
  if (a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != columns || a.itemsize() != itemsize ||
      !contiguous) {
    throw std::invalid_argument(std::string(name) + " must be contiguous [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "]");
  }
}

// Each adds the functions of one part of csrc/ to the module.
void bind_pack(py::module_& m);
void bind_loss(py::module_& m);
void bind_head(py::module_& m);
void bind_decode(py::module_& m);
void bind_layers(py::module_& m);
void bind_slots(py::module_& m);
void bind_sampling(py::module_& m);
void bind_isa(py::module_& m);

}  // namespace grpo::bindings
