#include "slots.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "refusals.hpp"

namespace grpo {
namespace {

using std::to_string;

int32_t pages_of(int32_t tokens, int32_t page) { return tokens / page + (tokens % page > 0); }

int32_t most(const std::vector<int32_t>& lengths) {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

void check_lengths(const Samples& s) {
  const std::vector<int32_t>& cu = s.cu_groups;
  if (cu.size() != s.prompt_len.size() + 1) {
    reject("cu_groups must hold " + to_string(s.prompt_len.size() + 1) +
           " values, one more than prompt_len; given " + to_string(cu.size()));
  }
  if (cu.front() != 0 || !std::is_sorted(cu.begin(), cu.end()) ||
      static_cast<size_t>(cu.back()) != s.limits.size()) {
    reject("cu_groups must start at 0, never fall and end at " + to_string(s.limits.size()) +
           ", the size of limits");
  }
  for (size_t g = 0; g < s.prompt_len.size(); ++g) {
    at_least(1, s.prompt_len[g], "prompt_len of group " + to_string(g));
  }
  for (size_t i = 0; i < s.limits.size(); ++i) {
    at_least(1, s.limits[i], "limits of sample " + to_string(i));
  }
}

// With these pages whatever is next can be placed, at the latest when all before it have ended.
void check_pages(const Samples& s, int32_t page, int32_t n_pages) {
  for (size_t g = 0; g < s.prompt_len.size(); ++g) {
    const int32_t *first = s.limits.data() + s.cu_groups[g],
                  *last = s.limits.data() + s.cu_groups[g + 1];
    if (first == last) continue;
    const int64_t prompt = pages_of(s.prompt_len[g], page);
    const int64_t own = pages_of(*std::max_element(first, last), page);
    if (prompt + own > n_pages) {
      reject("n_pages: group " + to_string(g) + " needs " + to_string(prompt + own) + ", " +
             to_string(prompt) + " for its prompt and " + to_string(own) +
             " for its longest sample; given " + to_string(n_pages));
    }
  }
}

Samples checked(int32_t slots, int32_t page, int32_t n_pages, Samples samples) {
  at_least(1, slots, "slots");
  at_least(1, page, "page");
  at_least(1, n_pages, "n_pages");
  check_lengths(samples);
  check_pages(samples, page, n_pages);
  return samples;
}

}  // namespace

SlotScheduler::SlotScheduler(int32_t slots, int32_t page, int32_t n_pages, Samples samples)
    : page_(page),
      samples_(checked(slots, page, n_pages, std::move(samples))),
      pool_(n_pages),
      tables_(slots, pages_of(most(samples_.prompt_len), page),
              pages_of(most(samples_.limits), page)),
      seats_(slots),
      rows_(slots),
      cursor_(slots + size_t{1}) {
  find_next_group();
}

Admission SlotScheduler::admit() {
  Admission now;
  int32_t row = 0, slot = 0;
  for (; static_cast<size_t>(slot) < seats_.size() && has_next(); ++slot) {
    if (seats_[slot].sample != idle) continue;
    if (pages_for_next() > static_cast<int64_t>(pool_.free())) break;
    if (next_opens_group()) {
      while (rows_[row].group != idle) ++row;
      now.groups.emplace_back(next_group_, row);
      open_next_group(row);
    }
    now.placed.emplace_back(slot, next_);
    place_next(slot);
  }
  if (active_ == 0 && has_next()) {
    throw std::runtime_error("sample " + to_string(next_) + " of group " + to_string(next_group_) +
                             " needs " + to_string(pages_for_next()) + " pages; " +
                             to_string(pool_.free()) + " of " + to_string(pool_.pages()) +
                             " are free, and no slot is active that could free more");
  }
  if (!now.placed.empty()) sort_slots();
  return now;
}

void SlotScheduler::advance(const std::vector<int32_t>& slots) {
  std::vector<bool> given(seats_.size());
  for (const int32_t slot : slots) {
    const int32_t limit = samples_.limits[active_seat(slot).sample];
    if (given[slot]) reject("slots: slot " + to_string(slot) + " is given twice");
    if (tables_.suffix_len[slot] >= limit) {
      reject("slots: slot " + to_string(slot) + " is at its limit of " + to_string(limit));
    }
    given[slot] = true;
  }
  for (const int32_t slot : slots) ++tables_.suffix_len[slot];
}

void SlotScheduler::finish(int32_t slot) {
  const auto [sample, row] = active_seat(slot);
  Row& live = rows_[row];
  release(tables_.suffix_row(slot), own_pages(sample));
  release(tables_.prefix_row(row), prompt_pages(live.group));
  if (--live.unfinished == 0) {
    live = {};
    tables_.prefix_len[row] = 0;
  }
  seats_[slot] = {};
  tables_.suffix_len[slot] = 0;
  tables_.slot_group[slot] = idle;
  --active_;
  sort_slots();
}

void SlotScheduler::move(int32_t source, int32_t to) {
  const Seat seat = active_seat(source);
  require_below(seats_.size(), to, "to");
  if (seats_[to].sample != idle) reject("to: slot " + to_string(to) + " is not idle");
  std::copy_n(tables_.suffix_row(source), tables_.suffix_pages, tables_.suffix_row(to));
  tables_.suffix_len[to] = std::exchange(tables_.suffix_len[source], 0);
  tables_.slot_group[to] = std::exchange(tables_.slot_group[source], idle);
  seats_[to] = seat;
  seats_[source] = {};
  sort_slots();
}

int32_t SlotScheduler::prompt_pages(int32_t group) const {
  return pages_of(samples_.prompt_len[group], page_);
}

int32_t SlotScheduler::own_pages(int32_t sample) const {
  return pages_of(samples_.limits[sample], page_);
}

int64_t SlotScheduler::pages_for_next() const {
  return int64_t{own_pages(next_)} + (next_opens_group() ? prompt_pages(next_group_) : 0);
}

void SlotScheduler::find_next_group() {
  while (has_next() && samples_.cu_groups[next_group_ + 1] <= next_) ++next_group_;
}

void SlotScheduler::open_next_group(int32_t row) {
  const int32_t size = samples_.cu_groups[next_group_ + 1] - samples_.cu_groups[next_group_];
  const std::vector<int32_t> pages = pool_.alloc(prompt_pages(next_group_), size);
  std::copy(pages.begin(), pages.end(), tables_.prefix_row(row));
  tables_.prefix_len[row] = samples_.prompt_len[next_group_];
  rows_[row] = {next_group_, size};
  next_row_ = row;
}

void SlotScheduler::place_next(int32_t slot) {
  const std::vector<int32_t> pages = pool_.alloc(own_pages(next_));
  std::copy(pages.begin(), pages.end(), tables_.suffix_row(slot));
  tables_.slot_group[slot] = next_row_;
  seats_[slot] = {next_, next_row_};
  ++active_;
  ++next_;
  find_next_group();
}

// Last page first, so that whoever takes them next has them in rising order again.
void SlotScheduler::release(const int32_t* pages, int32_t count) {
  while (count > 0) pool_.release(pages[--count]);
}

const SlotScheduler::Seat& SlotScheduler::active_seat(int32_t slot) const {
  require_below(seats_.size(), slot, "slot");
  if (seats_[slot].sample == idle) reject("slot " + to_string(slot) + " is idle");
  return seats_[slot];
}

// By row, then slot; the idle ones count as a last row.
void SlotScheduler::sort_slots() {
  const int32_t slots = static_cast<int32_t>(seats_.size());
  std::fill_n(tables_.cu_slots, slots + 1, 0);
  for (const Seat& seat : seats_) {
    if (seat.row != idle) ++tables_.cu_slots[seat.row + 1];
  }
  std::partial_sum(tables_.cu_slots, tables_.cu_slots + slots + 1, tables_.cu_slots);
  std::copy_n(tables_.cu_slots, slots + 1, cursor_.begin());
  for (int32_t slot = 0; slot < slots; ++slot) {
    const int32_t row = seats_[slot].row == idle ? slots : seats_[slot].row;
    tables_.order[cursor_[row]++] = slot;
  }
}

}  // namespace grpo
