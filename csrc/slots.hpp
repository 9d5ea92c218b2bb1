// Which sample sits in which decode slot, and on which pages: first in, first out.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decode_tables.hpp"
#include "pages.hpp"

namespace grpo {

// Samples are numbered over all groups.
struct Samples {
  std::vector<int32_t> prompt_len;  // [groups]
  std::vector<int32_t> limits;      // [samples]; most own tokens of each
  std::vector<int32_t> cu_groups;   // [groups + 1]
};

struct Admission {
  std::vector<std::pair<int32_t, int32_t>> groups;  // (group, row); their prompts are new
  std::vector<std::pair<int32_t, int32_t>> placed;  // (slot, sample)
};

// A group is live from the placing of its first sample to the end of its last. Then it has a row,
// and the pages of its prompt have one owner for each of its samples that has not ended. Samples
// are placed in their order, so every live group but the newest sits in a slot: W rows suffice.
class SlotScheduler {
 public:
  // page: tokens of a page. Throws std::invalid_argument that names the argument.
  SlotScheduler(int32_t slots, int32_t page, int32_t n_pages, Samples samples);

  // The lowest free slots and rows take the next samples, until slots or pages run out. Throws
  // std::runtime_error when nothing runs and pages that others took from the pool are missing.
  Admission admit();
  // Counts one more token in each of the slots. This, finish and move throw std::invalid_argument,
  // with nothing changed, for a slot that is out of range or idle, this also if given twice or
  // full.
  void advance(const std::vector<int32_t>& slots);
  void finish(int32_t slot);
  // What sits in `source` sits in the idle slot `to` from now on, on the pages it has.
  void move(int32_t source, int32_t to);

  // Samples are left that sit in no slot yet.
  bool waiting() const { return has_next(); }
  bool done() const { return active_ == 0 && !has_next(); }
  int32_t active() const { return active_; }
  PagePool& pool() { return pool_; }
  DecodeTables& tables() { return tables_; }

 private:
  static constexpr int32_t idle = DecodeTables::idle;
  struct Seat {
    int32_t sample = idle, row = idle;
  };
  struct Row {
    int32_t group = idle, unfinished = 0;
  };

  bool has_next() const { return static_cast<size_t>(next_) < samples_.limits.size(); }
  bool next_opens_group() const { return next_ == samples_.cu_groups[next_group_]; }
  int32_t prompt_pages(int32_t group) const;
  int32_t own_pages(int32_t sample) const;
  int64_t pages_for_next() const;
  void find_next_group();
  void open_next_group(int32_t row);
  void place_next(int32_t slot);
  void release(const int32_t* pages, int32_t count);
  const Seat& active_seat(int32_t slot) const;
  void sort_slots();

  const int32_t page_;
  const Samples samples_;
  PagePool pool_;
  DecodeTables tables_;
  std::vector<Seat> seats_;      // [slots]
  std::vector<Row> rows_;        // [slots]
  std::vector<int32_t> cursor_;  // [slots + 1]; scratch of sort_slots
  int32_t next_ = 0;             // the sample to be placed next,
  int32_t next_group_ = 0;       // its group,
  int32_t next_row_ = idle;      // and the row of that, once it is live
  int32_t active_ = 0;
};

}  // namespace grpo
