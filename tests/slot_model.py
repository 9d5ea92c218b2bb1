"""The rules of `SlotScheduler` in plain Python, and the two compared after every step."""

from collections import Counter
from itertools import accumulate

from grpo_engine import _C


class Model:
    """The rules of the scheduler; pages are only counted, and everything is derived anew."""

    def __init__(self, slots, page, n_pages, prompt_len, limits, cu_groups):
        self.slots, self.page, self.n_pages = slots, page, n_pages
        self.prompt_len, self.limits = prompt_len, limits
        self.members = dict(enumerate(map(list, map(range, cu_groups, cu_groups[1:]))))
        self.queue = [(g, s) for g, samples in self.members.items() for s in samples]
        self.rows, self.seats, self.lengths, self.peak = {}, {}, {}, 0

    def pages(self, tokens):
        return -(-tokens // self.page)

    def group_of(self, slot):
        return next(g for g, samples in self.members.items() if self.seats[slot] in samples)

    def used(self):
        prompts = sum(self.pages(self.prompt_len[g]) for g in self.rows)
        return prompts + sum(self.pages(self.limits[s]) for s in self.seats.values())

    def admit(self):
        groups, placed = [], []
        while self.queue and len(self.seats) < self.slots:
            group, sample = self.queue[0]
            need = self.pages(self.limits[sample])
            if group not in self.rows:
                need += self.pages(self.prompt_len[group])
            if self.used() + need > self.n_pages:
                break
            if group not in self.rows:
                row = min(set(range(self.slots)) - set(self.rows.values()))
                self.rows[group] = row
                groups.append((group, row))
            slot = min(set(range(self.slots)) - set(self.seats))
            self.seats[slot], self.lengths[slot] = sample, 0
            placed.append((slot, sample))
            del self.queue[0]
            self.peak = max(self.peak, self.used())
        return groups, placed

    def advance(self, slots):
        for slot in slots:
            self.lengths[slot] += 1

    def finish(self, slot):
        group = self.group_of(slot)
        self.members[group].remove(self.seats.pop(slot))
        del self.lengths[slot]
        if not self.members[group]:
            del self.rows[group]

    def tables(self):
        slots = range(self.slots)
        row = {s: self.rows[self.group_of(s)] for s in self.seats}
        starts = accumulate([list(row.values()).count(r) for r in slots], initial=0)
        prompts = {r: self.prompt_len[g] for g, r in self.rows.items()}
        return {
            "prefix_len": [prompts.get(r, 0) for r in slots],
            "suffix_len": [self.lengths.get(s, 0) for s in slots],
            "slot_group": [row.get(s, -1) for s in slots],
            "order": sorted(slots, key=lambda s: (row.get(s, self.slots), s)),
            "cu_slots": list(starts),
        }


class Pair:
    """The scheduler and its model side by side, compared after every step."""

    def __init__(self, *args):
        self.real, self.model = _C.SlotScheduler(*args), Model(*args)
        self.views = self.real.views  # taken once: they see what comes later
        self.owned = {}  # (group or slot with sample) -> its pages, which must stay
        self.compare()

    def admit(self):
        admission = self.real.admit()
        assert admission == self.model.admit()
        self.compare()
        return admission

    def advance(self, slots):
        self.real.advance(slots)
        self.model.advance(slots)
        self.compare()

    def finish(self, slot):
        self.real.finish(slot)
        self.model.finish(slot)
        self.compare()

    def compare(self):
        real, model = self.real, self.model
        for name, expected in model.tables().items():
            assert self.views[name].tolist() == expected, name
        assert real.active == len(model.seats)
        assert real.done == (not model.queue and not model.seats)
        assert (real.pool.used, real.pool.peak) == (model.used(), model.peak)
        assert real.pool.free == model.n_pages - model.used()
        owned, owners = {}, Counter()
        for group, row in model.rows.items():
            ids = self.views["prefix_table"][row, : model.pages(model.prompt_len[group])].tolist()
            owned["group", group] = ids
            owners.update({i: len(model.members[group]) for i in ids})
        for slot, sample in model.seats.items():
            ids = self.views["suffix_table"][slot, : model.pages(model.limits[sample])].tolist()
            owned[slot, sample] = ids
            owners.update(ids)
        assert len(owners) == sum(map(len, owned.values()))  # each page is in one place
        assert [real.pool.count(i) for i in range(model.n_pages)] == [
            owners[i] for i in range(model.n_pages)
        ]
        assert all(owned[who] == ids for who, ids in self.owned.items() if who in owned)
        self.owned = owned
        for name in ("prefix_table", "suffix_table"):  # whatever stands beyond is an id as well
            assert ((self.views[name] >= 0) & (self.views[name] < model.n_pages)).all()
