"""`PagePool` against a list and a count for each page."""

import random
from collections import Counter

import pytest

from grpo_engine import _C


@pytest.mark.parametrize("seed", range(40))
def test_a_pool_is_a_stack_of_free_pages_and_a_count_for_each(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    pool, stack, counts, peak = _C.PagePool(n), list(range(n))[::-1], Counter(), 0
    for _ in range(200):
        used = [i for i in range(n) if counts[i]]
        wanted, owners, page = rng.randint(0, 4), rng.randint(1, 3), rng.choice(used or [None])
        act = rng.choice(["alloc", "alloc", "retain", "release", "release", "release"])
        if act == "alloc" and wanted <= len(stack):
            ids = [stack.pop() for _ in range(wanted)]
            assert pool.alloc(wanted, owners) == ids
            counts.update({i: owners for i in ids})
        elif act == "alloc":
            with pytest.raises(RuntimeError, match=f"^{wanted} pages asked for; {len(stack)} of"):
                pool.alloc(wanted)
        elif page is not None:
            getattr(pool, act)(page)
            counts[page] += 1 if act == "retain" else -1
            if counts[page] == 0:
                stack.append(page)
        peak = max(peak, n - len(stack))
        assert [pool.count(i) for i in range(n)] == [counts[i] for i in range(n)]
        assert (pool.free, pool.used, pool.peak) == (len(stack), n - len(stack), peak)


def test_the_page_freed_last_is_taken_first():
    pool = _C.PagePool(4)
    assert pool.alloc(3) == [0, 1, 2]
    pool.release(0)
    pool.release(2)
    assert pool.alloc(0) == []
    assert pool.alloc(3) == [2, 0, 3]


@pytest.mark.parametrize(
    ("message", "act"),
    [
        ("n_pages must be >= 1; given 0", lambda pool: _C.PagePool(0)),
        ("count must be >= 0; given -1", lambda pool: pool.alloc(-1)),
        ("owners must be >= 1; given 0", lambda pool: pool.alloc(1, 0)),
        ("id 2 is a free page", lambda pool: pool.release(2)),
        ("id 2 is a free page", lambda pool: pool.retain(2)),
        ("id must be in .0, 3.; given 3", lambda pool: pool.release(3)),
        ("id must be in .0, 3.; given -1", lambda pool: pool.count(-1)),
    ],
)
def test_a_pool_refuses_by_name_and_changes_nothing(message, act):
    pool = _C.PagePool(3)
    pool.alloc(2)
    with pytest.raises(ValueError, match=message):
        act(pool)
    assert [pool.count(i) for i in range(3)] == [1, 1, 0]
