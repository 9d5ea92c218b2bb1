// What kernels that multiply small matrices keep in the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace grpo {

constexpr int64_t kBlock = 64;  // rows that are transposed together: columns of a block

// Floats that start on a cache line; grows, never shrinks.
class Memory {
 public:
  float* reserve(int64_t count) {
    if (count > size_) {
      data_.reset(new (std::align_val_t{64}) float[static_cast<size_t>(count)]);
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> data_;
  int64_t size_ = 0;
};

}  // namespace grpo
