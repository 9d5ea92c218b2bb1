"""Scored groups made by hand, for the tests of what becomes of them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_engine.groups.batch import Batch, Origin
from grpo_engine.groups.fingerprints import Fingerprint
from grpo_engine.groups.make import Samples, make_batch
from grpo_engine.groups.rules import Rules
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.rewards.score import Scores
from grpo_engine.rollout import Rollout, SamplingParams
from grpo_engine.sample_config import ComponentConfig, GroupsConfig, ScoringConfig

TEMPERATURE = 0.7
STOPS, CUT, FAILED = "stop", "length", "error"
PRINT = Fingerprint("p", "data:0", 3, "a", "r", "s", 256)
PLAIN = ComponentConfig()


def rollout(prompt: list[int], length: int, finish: str = STOPS, seed: int = 0) -> Rollout:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids = torch.randint(3, 70, (length,), generator=generator).tolist()
    logp = -torch.rand(length, generator=generator)
    params = SamplingParams(temperature=TEMPERATURE, stop=("x",), seed=5)
    return Rollout(prompt, ids, logp, 2 * logp, finish, seed, 0, params, 3)


def samples_of(
    rewards: Sequence[Sequence[float | None]],
    finish: Sequence[Sequence[str]] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[list[int]] | None = None,
    components: dict[str, list[float | None]] | None = None,
    configs: dict[str, ComponentConfig] | None = None,
    **changes,
) -> Samples:
    """Groups; nested lists: a value a sample, `prompts`: one a group; `changes`: other fields.

    Without `components` there is one, "f", with the rewards.
    """
    finish = finish or [[STOPS] * len(group) for group in rewards]
    lengths = lengths or [[2 + i for i in range(len(group))] for group in rewards]
    prompts = prompts or [[5] * (3 + g) for g in range(len(rewards))]
    groups = [
        [
            rollout(prompt, n, f, seed=10 * g + i)
            for i, (n, f) in enumerate(zip(lengths[g], finish[g], strict=True))
        ]
        for g, prompt in enumerate(prompts)
    ]
    plain = {"f": [None if r is None else float(r) for group in rewards for r in group]}
    count = len(plain["f"])
    components = components or plain
    scores = Scores(components, [None] * count, [None] * count)
    scores.decider = "f" if "f" in components else None
    scores.configs = dict.fromkeys(components, PLAIN) | (configs or {})
    made = Samples(
        [Origin(task=g, row=7 * g) for g in range(len(rewards))],
        groups,
        ["t"] * count,
        scores,
        [PRINT] * count,
        [False] * count,
        [False] * count,
    )
    for name in ("failures", "env_failures", "steps", "decider"):
        if name in changes:
            setattr(scores, name, changes.pop(name))
    return replace(made, **changes)


def rules(
    scoring: dict | None = None, groups: dict | None = None, options: GRPOOptions | None = None
) -> Rules:
    return Rules(
        ScoringConfig(**(scoring or {})), GroupsConfig(**(groups or {})), options or GRPOOptions()
    )


def batch_of(
    rewards: Sequence[Sequence[float | None]],
    *args,
    truncated: str = "mask",
    options: GRPOOptions | None = None,
    **kwargs,
) -> Batch:
    """A batch of such groups."""
    chosen = rules(groups={"truncated": truncated}, options=options)
    return make_batch(samples_of(rewards, *args, **kwargs), chosen)
