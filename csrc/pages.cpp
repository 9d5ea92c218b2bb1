#include "pages.hpp"

#include <algorithm>
#include <numeric>

#include "refusals.hpp"

namespace grpo {

PagePool::PagePool(int32_t n_pages) : owners_(at_least(1, n_pages, "n_pages")), free_(pages()) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

std::vector<int32_t> PagePool::alloc(int32_t count, int32_t owners) {
  at_least(0, count, "count");
  at_least(1, owners, "owners");
  if (static_cast<size_t>(count) > free()) {
    throw std::runtime_error(std::to_string(count) + " pages asked for; " + std::to_string(free()) +
                             " of " + std::to_string(pages()) + " are free");
  }
  std::vector<int32_t> ids(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (const int32_t id : ids) owners_[id] = owners;
  peak_ = std::max(peak_, used());
  return ids;
}

void PagePool::retain(int32_t id) { ++owners_of_used(id); }

void PagePool::release(int32_t id) {
  if (--owners_of_used(id) == 0) free_.push_back(id);
}

int32_t PagePool::count(int32_t id) const {
  require_below(pages(), id, "id");
  return owners_[id];
}

int32_t& PagePool::owners_of_used(int32_t id) {
  if (count(id) == 0) reject("id " + std::to_string(id) + " is a free page");
  return owners_[id];
}

}  // namespace grpo
