"""Reward functions called on four samples, in this process or in a worker."""

from grpo_engine.rewards.load import load_rewards, reward_of
from grpo_engine.rewards.score import Scorer, Scores
from grpo_engine.sample_config import RewardConfig, ScoringConfig

ARGUMENTS = {
    "prompts": ["p0", "p1", "p2", "p3"],
    "completions": ["a", "bb", "ccc", "dddd"],
    "completion_ids": [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]],
    "finish_reasons": ["stop", "stop", "length", "stop"],
    "raw_completions": ["a<eos>", "bb<eos>", "ccc", "dddd<eos>"],
    "prompt_tail": ["t0", "t1", "t2", "t3"],
    "step": 12,
}
COLUMNS = {"answer": [1, 2, 3, 4], "level": ["x", "y", "z", None]}
LENIENT = ScoringConfig(max_failed=1.0)
CORE = {name: ARGUMENTS[name] for name in ("prompts", "completions", "completion_ids")}


def run(*functions, weights=(1.0, 1.0, 1.0), arguments=ARGUMENTS, columns=COLUMNS) -> Scores:
    rewards = [reward_of(f, name=f"r{i}", weight=weights[i]) for i, f in enumerate(functions)]
    return Scorer(rewards, LENIENT).score(arguments, columns)


def totals(scores: Scores) -> list[float | None]:
    return scores.rewards([1] * len(scores.failures), floor=0.0)


def of_file(target: str, arguments=ARGUMENTS, columns=COLUMNS, **config) -> Scores:
    """In a worker, as a run has it."""
    with Scorer(load_rewards([RewardConfig(target, **config)]), LENIENT) as scorer:
        return scorer.score(arguments, columns)


def gives(*values):
    """A reward function that returns `values` whatever it gets."""
    return lambda **_: list(values)
