#include "pack.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace grpo {
namespace {

struct CostedSlice {
  Slice slice;
  int64_t tokens;
};

[[noreturn]] void reject(const std::string& what) { throw std::invalid_argument(what); }

void check(const Lengths& l, int64_t token_budget) {
  if (token_budget < 1) reject("token_budget must be >= 1; given " + std::to_string(token_budget));
  if (l.cu_groups[0] != 0) reject("cu_groups must start at 0");
  for (int32_t g = 0; g < l.groups; ++g) {
    if (l.cu_groups[g + 1] < l.cu_groups[g]) {
      reject("cu_groups must not fall; it does after entry " + std::to_string(g));
    }
    if (l.prompt[g] < 0) reject("prompt_len of group " + std::to_string(g) + " is negative");
  }
  for (int32_t s = 0; s < l.cu_groups[l.groups]; ++s) {
    if (l.completion[s] < 0)
      reject("completion_len of sample " + std::to_string(s) + " is negative");
  }
}

// Cuts one group into the slices that fit; a group that fits whole stays whole.
void cut_group(const Lengths& l, int32_t group, int64_t budget, bool shared_prompt,
               std::vector<CostedSlice>& out) {
  const int64_t prompt = l.prompt[group];
  const int32_t end = l.cu_groups[group + 1];
  CostedSlice open{{group, l.cu_groups[group], l.cu_groups[group]}, 0};
  for (int32_t s = l.cu_groups[group]; s < end; ++s) {
    const int64_t alone = prompt + l.completion[s];
    if (alone > budget) {
      reject("sample " + std::to_string(s) + " of group " + std::to_string(group) + " has " +
             std::to_string(alone) + " tokens with its prompt, over the token_budget of " +
             std::to_string(budget));
    }
    const bool pays_prompt = !shared_prompt || open.slice.first == s;
    const int64_t added = l.completion[s] + (pays_prompt ? prompt : 0);
    if (open.tokens + added > budget) {
      out.push_back(open);
      open = {{group, s, s}, alone};
    } else {
      open.tokens += added;
    }
    open.slice.last = s + 1;
  }
  if (open.slice.last > open.slice.first) out.push_back(open);
}

}  // namespace

std::vector<MicroBatch> pack_groups(const Lengths& lengths, int64_t token_budget,
                                    bool shared_prompt) {
  check(lengths, token_budget);
  std::vector<CostedSlice> slices;
  for (int32_t g = 0; g < lengths.groups; ++g) {
    cut_group(lengths, g, token_budget, shared_prompt, slices);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const CostedSlice& a, const CostedSlice& b) { return a.tokens > b.tokens; });

  std::vector<MicroBatch> batches;
  std::vector<int64_t> used;
  for (const auto& [slice, tokens] : slices) {
    const auto fits = [&, need = tokens](int64_t u) { return u + need <= token_budget; };
    const auto at = std::find_if(used.begin(), used.end(), fits) - used.begin();
    if (at == static_cast<std::ptrdiff_t>(used.size())) {
      used.push_back(0);
      batches.emplace_back();
    }
    used[at] += tokens;
    batches[at].push_back(slice);
  }
  for (auto& batch : batches) {
    std::sort(batch.begin(), batch.end(),
              [](const Slice& a, const Slice& b) { return a.first < b.first; });
  }
  return batches;
}

}  // namespace grpo
