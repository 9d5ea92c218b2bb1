// Group-aware batching: ragged groups into micro-batches under a token budget.
#pragma once

#include <cstdint>
#include <vector>

namespace grpo {

// Samples [first, last) of one group that go through the model together.
struct Slice {
  int32_t group;
  int32_t first;
  int32_t last;
};

using MicroBatch = std::vector<Slice>;

struct Lengths {
  const int32_t* prompt;      // [groups]
  const int32_t* completion;  // [samples]
  const int32_t* cu_groups;   // [groups + 1]
  int32_t groups;
};

// First-fit decreasing: at most 11/9 of the fewest micro-batches, plus 6/9 (Dosa 2007), over the
// slices. A group is cut only when it alone exceeds the budget. `shared_prompt`: a slice pays for
// its prompt once instead of once per sample. Throws std::invalid_argument.
std::vector<MicroBatch> pack_groups(const Lengths& lengths, int64_t token_budget,
                                    bool shared_prompt);

}  // namespace grpo
