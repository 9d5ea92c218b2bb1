// Pages of the key-value cache: which are free, and how many owners the others have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace grpo {

class PagePool {
 public:
  explicit PagePool(int32_t n_pages);

  // The page freed last is taken first. Each gets `owners` references. Throws std::runtime_error,
  // with nothing changed, when fewer than `count` are free.
  std::vector<int32_t> alloc(int32_t count, int32_t owners = 1);
  // All three throw std::invalid_argument for an id out of range, these two also for a free page.
  void retain(int32_t id);
  void release(int32_t id);
  int32_t count(int32_t id) const;

  size_t pages() const { return owners_.size(); }
  size_t free() const { return free_.size(); }
  size_t used() const { return pages() - free(); }
  size_t peak() const { return peak_; }

 private:
  int32_t& owners_of_used(int32_t id);

  std::vector<int32_t> owners_;  // [pages]; 0: free
  std::vector<int32_t> free_;    // a stack
  size_t peak_ = 0;
};

}  // namespace grpo
