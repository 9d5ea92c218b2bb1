// Checks of plain integers that throw std::invalid_argument, which Python sees as a ValueError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace grpo {

[[noreturn]] inline void reject(const std::string& what) { throw std::invalid_argument(what); }

inline int32_t at_least(int32_t least, int32_t value, const std::string& name) {
  if (value < least) {
    reject(name + " must be >= " + std::to_string(least) + "; given " + std::to_string(value));
  }
  return value;
}

inline void require_below(size_t end, int32_t value, const std::string& name) {
  if (value < 0 || static_cast<size_t>(value) >= end) {
    reject(name + " must be in [0, " + std::to_string(end) + "); given " + std::to_string(value));
  }
}

}  // namespace grpo
