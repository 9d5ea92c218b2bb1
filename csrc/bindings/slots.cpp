#include "../slots.hpp"

#include <memory>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace grpo::bindings {
namespace {

using Ints = std::vector<int32_t>;

// Shares the scheduler's memory and keeps it alive.
py::array shared(const py::object& scheduler, const std::vector<int64_t>& shape, int64_t start) {
  grpo::DecodeTables& tables = scheduler.cast<grpo::SlotScheduler&>().tables();
  return py::array_t<int32_t>(shape, tables.buffer.data() + start, scheduler);
}

py::array tables(const py::object& scheduler) {
  grpo::DecodeTables& tables = scheduler.cast<grpo::SlotScheduler&>().tables();
  return shared(scheduler, {static_cast<int64_t>(tables.buffer.size())}, 0);
}

py::dict views(const py::object& scheduler) {
  py::dict found;
  for (const auto& view : scheduler.cast<grpo::SlotScheduler&>().tables().views) {
    found[view.name] = shared(scheduler, view.shape, view.start);
  }
  return found;
}

py::dict layout(grpo::SlotScheduler& scheduler) {
  py::dict found;
  for (const auto& view : scheduler.tables().views) {
    found[view.name] = py::make_tuple(view.start, py::tuple(py::cast(view.shape)));
  }
  return found;
}

void bind_pool(py::module_& m) {
  using grpo::PagePool;
  py::class_<PagePool>(m, "PagePool", R"(Pages with reference counts; ids are in [0, n_pages).

Raises ValueError for a bad argument, RuntimeError when there are not enough free pages; then
nothing has changed.)")
      .def(py::init<int32_t>(), as_is("n_pages"))
      .def("alloc", &PagePool::alloc, as_is("count"), as_is("owners") = 1,
           "Ids of `count` pages, the one freed last first, each with `owners` references.")
      .def("retain", &PagePool::retain, as_is("id"), "One more reference to a used page.")
      .def("release", &PagePool::release, as_is("id"), "One less; the last one frees the page.")
      .def("count", &PagePool::count, as_is("id"), "References to the page; 0: free.")
      .def_property_readonly("free", &PagePool::free)
      .def_property_readonly("used", &PagePool::used)
      .def_property_readonly("peak", &PagePool::peak, "The most pages used at once.");
}

}  // namespace

void bind_slots(py::module_& m) {
  using grpo::SlotScheduler;
  bind_pool(m);
  py::class_<SlotScheduler>(m, "SlotScheduler",
                            R"(Samples in W decode slots, first in, first out.

slots: W; page: tokens of a page; n_pages: pages of the pool.
prompt_len: [P] tokens, >= 1; limits: [S] most own tokens of each sample, >= 1; cu_groups: [P+1]
sample offsets of the groups. Samples are numbered over all groups. Integers of any width.
A sample's pages are reserved when it is placed, those of a prompt with its group's first sample.
Raises ValueError that names the argument, also when a prompt and one sample don't fit n_pages.)")
      .def(py::init([](int32_t slots, int32_t page, int32_t n_pages, Ints prompt_len, Ints limits,
                       Ints cu_groups) {
             return std::make_unique<SlotScheduler>(
                 slots, page, n_pages,
                 grpo::Samples{std::move(prompt_len), std::move(limits), std::move(cu_groups)});
           }),
           as_is("slots"), as_is("page"), as_is("n_pages"), as_is("prompt_len"), as_is("limits"),
           as_is("cu_groups"))
      .def(
          "admit",
          [](SlotScheduler& scheduler) {
            grpo::Admission now = scheduler.admit();
            return std::pair(std::move(now.groups), std::move(now.placed));
          },
          R"(Fills the free slots with the next samples, as far as the pages go.

Returns groups, a list of (group, row) whose prompts must be prefilled now, and placed, a list of
(slot, sample). A placed sample has suffix_len 0: its first token comes from the prompt.
Raises RuntimeError when nothing runs and pages that were taken from the pool are missing.)")
      .def("advance", &SlotScheduler::advance, as_is("slots"),
           R"(Before a decode step: adds 1 to the suffix_len of the slots that decode now.

Raises ValueError, with nothing changed, for a slot that is idle, given twice or at its limit.)")
      .def("finish", &SlotScheduler::finish, as_is("slot"),
           "The sample ended: its pages are free and the slot is idle. ValueError if it was.")
      .def("move", &SlotScheduler::move, as_is("source"), as_is("to"),
           "What sits in slot `source` sits in the idle slot `to` from now on.")
      .def_property_readonly("waiting", &SlotScheduler::waiting, "Some samples have no slot yet.")
      .def_property_readonly("done", &SlotScheduler::done, "All samples have finished.")
      .def_property_readonly("active", &SlotScheduler::active, "Slots that hold a sample.")
      .def_property_readonly("pool", &SlotScheduler::pool)
      .def_property_readonly("tables", &tables, "[n] int32; all views in one piece, not copied.")
      .def_property_readonly("views", &views, R"(Name -> view into `tables`, int32, as DecodeTables.

They stay valid and see later changes. Table entries past the pages in use hold any id.)")
      .def_property_readonly("layout", &layout, R"(Name -> (start, shape) of the view in `tables`.

So a copy of `tables` on a device has the same views. Every start is a multiple of 4.)");
}

}  // namespace grpo::bindings
