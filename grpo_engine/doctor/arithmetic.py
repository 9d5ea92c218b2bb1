"""Teaching groups through the statistics of a config: what single rewards do to advantages."""

from collections.abc import Sequence

import numpy as np

from ..groups.advantages import compute_advantages
from ..groups.preprocess import PercentileWindow
from ..groups.rules import Rules
from ..groups.signal import signal_causes
from ..groups.states import SCORED, Judged
from ..rewards.total import Components
from ..sample_config import ComponentConfig
from .checks import FAIL, OK, WARNING, Check

EQUAL = (0.3, 0.3, 0.3, 0.3)
EXTREME, PLAIN = (0.1, 0.1, 0.1, 10.0), (0.1, 0.1, 0.1, 0.9)
SHIFT = 10.0
NEAR = 1e-3
SMALL_EPSILON = 1e-3  # of loss.epsilon_std; a larger one makes the size of a spread count


def advantages_of(rewards: Sequence[float], rules: Rules) -> np.ndarray:
    """[n] float32 advantages of a group of valid samples with these totals, by a fresh window."""
    count, config = len(rewards), ComponentConfig()
    judged = Judged(
        [SCORED] * count,
        [None] * count,
        valid=np.ones(count, bool),
        in_loss=np.ones(count, bool),
        penalties=np.zeros(count),
        declared=np.full(count, np.nan),
        weights=np.ones(count),
    )
    totals = np.array(rewards, np.float64)
    spans, none = [0, count], [None] * count
    row = totals[None]
    components = Components(["reward"], row, [config], none, none, [1] * count, {}, row)
    causes = signal_causes(
        *(totals, totals, judged.valid, judged.states, none, spans),
        *(rules.groups, rules.options.min_std),
    )
    window = PercentileWindow(rules.scoring.clip_window)
    return compute_advantages(judged, components, spans, causes, rules, window).samples


def check_arithmetic(rules: Rules) -> list[Check]:
    """The teaching groups under these options."""
    return [_one_better(rules), _equal(rules), _shift(rules), _extreme(rules)]


def _teaching(rules: Rules) -> list[float]:
    """One right answer among wrong ones, [0, 0, 0, 1] unless the config calls others so."""
    return [rules.groups.low_at] * 3 + [rules.groups.correct_at]


def _one_better(rules: Rules) -> Check:
    name, rewards = "one better answer", _teaching(rules)
    found = advantages_of(rewards, rules)
    text = f"rewards {_shown(rewards)} give {_shown(found)}"
    if not found.any():
        least = rules.options.min_std
        return Check(name, FAIL, f"{text}: no signal; loss.min_std {least:g} is too high")
    ordered = found[3] > 0 and all(found[3] > found[:3]) and len(set(found[:3].tolist())) == 1
    faults = [] if ordered else ["the better answer is not ahead of equal others"]
    if _centred(rules, found):
        if not all(found[:3] < 0):
            faults.append("the worse ones are not negative")
        if abs(found.sum()) > NEAR:
            faults.append(f"their sum is {found.sum():.4f}, not 0")
    return Check(name, FAIL if faults else OK, "; ".join([text, *faults]))


def _centred(rules: Rules, found: np.ndarray) -> bool:
    """Whether the advantages have mean 0: not about a median, nor cut."""
    options = rules.options
    cut = options.advantage_clip is not None and np.abs(found).max() >= options.advantage_clip
    mean = options.baseline != "median" or rules.scoring.aggregate == "normalize_then_sum"
    return mean and not cut


def _equal(rules: Rules) -> Check:
    found = advantages_of(EQUAL, rules)
    text = f"rewards {_shown(EQUAL)} give {_shown(found)}"
    return Check("equal rewards", FAIL if found.any() else OK, text)


def _shift(rules: Rules) -> Check:
    rewards = _teaching(rules)
    before, after = (
        advantages_of(rewards, rules),
        advantages_of([r + SHIFT for r in rewards], rules),
    )
    gap = float(np.abs(after - before).max())
    text = f"rewards higher by {SHIFT:g} move advantages by {gap:.1e}"
    return Check("shift", OK if gap < NEAR else FAIL, text)


def _extreme(rules: Rules) -> Check:
    name, options = "extreme reward", rules.options
    one, other = advantages_of(EXTREME, rules), advantages_of(PLAIN, rules)
    gap = float(np.abs(one - other).max())
    text = f"{_shown(EXTREME)} gives {_shown(one)}, {_shown(PLAIN)} gives {_shown(other)}"
    plain_sum = rules.scoring.aggregate == "sum"
    if gap < NEAR:
        return Check(name, OK, text)
    if not (one.any() and other.any()):
        return Check(name, OK, f"{text}: loss.min_std {options.min_std:g} is between them")
    if plain_sum and options.scale_rewards == "none":
        return Check(name, OK, f"{text}: loss.scale_rewards none leaves an outlier its size")
    if options.epsilon_std > SMALL_EPSILON:
        text += f": by loss.epsilon_std {options.epsilon_std:g} the size of a spread counts"
        return Check(name, WARNING, text)
    return Check(name, FAIL, text)


def _shown(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value + 0.0:.4g}' for value in values)}]"  # no -0
