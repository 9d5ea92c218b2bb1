"""Why a step taught nothing, in a line: counts of states and causes, and the keys that decide."""

from collections import Counter
from collections.abc import Iterable

from ..sample_config import GroupsConfig
from .batch import Batch
from .states import BUDGET, ENV_FAILED, INVALID, TRUNCATED

DECIDES = {
    TRUNCATED: "truncated",
    BUDGET: "truncated",
    INVALID: "invalid_reward",
    ENV_FAILED: "env_failed_reward",
}
SHOWN = 3  # kinds of samples, of groups


def nothing_learned(batch: Batch, config: GroupsConfig) -> str:
    """How many samples are not in the loss and how many groups carry no signal, and why."""
    inside, signal = batch.in_loss.tolist(), batch.signal.tolist()
    states = zip(batch.states, batch.causes, inside, strict=True)
    samples = _counted(_of_sample(s, c, config) for s, c, counts in states if not counts)
    causes = zip(batch.signal_causes, signal, strict=True)
    groups = _counted(cause or "advantages of 0" for cause, taught in causes if not taught)
    return (
        f"{sum(inside)} of {len(inside)} samples are in the loss{samples}. {sum(signal)} of "
        f"{len(signal)} groups carry signal{groups}"
    )


def _of_sample(state: str, cause: str | None, config: GroupsConfig) -> str:
    key = DECIDES.get(state)
    if key is None:
        return state
    value = getattr(config, key)
    return f"{state}, {cause} (groups.{key} {'null' if value is None else value})"


def _counted(kinds: Iterable[str]) -> str:
    counts = Counter(kinds).most_common(SHOWN)
    return ": " * bool(counts) + "; ".join(f"{count} {kind}" for kind, count in counts)
