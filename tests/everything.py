"""Configs with something else than the default in every key."""

import dataclasses

from grpo_engine.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from grpo_engine.curriculum.config import (
    AnchorsConfig,
    CurriculumConfig,
    ReplayConfig,
    VariantsConfig,
)
from grpo_engine.curriculum.presets import Setting
from grpo_engine.guards.config import GuardsConfig, KlConfig, StopConfig
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.sample_config import (
    ComponentConfig,
    GroupsConfig,
    RewardConfig,
    SamplingConfig,
    ScoringConfig,
)


def other(threshold: float | None) -> float:
    """A share stays one, a count whole."""
    if threshold is None:
        return 3.5
    return threshold + 1 if isinstance(threshold, int) else threshold / 2


EVERYTHING = RunConfig(
    model=ModelConfig("m", "float32", "4bit", "reference/model", True, "cpu"),
    data=DataConfig(
        *("reasoning_gym:sums", "question", "gold", "reasoning_gym:other", 5, True, "Be brief."),
        *({"size": 7, "min_terms": 2}, {"size": 3, "seed": 9}, "kind", "r.jsonl", "2026-12-31"),
    ),
    rewards=[
        RewardConfig(
            "my.py:shape",
            "form",
            {"pattern": "a+", "least": 2},
            {"a": ComponentConfig(weight=0.5, gate=1.0), "b": ComponentConfig(scale="group")},
            2.5,
            False,
            True,
            weight=-1.0,
            bounds=[-1.0, 2.5],
            per_tokens=40,
            scale="batch",
            gate=0.5,
            valid_from=0.25,
        ),
        RewardConfig("exact", weight=0.25),
    ],
    lora=LoraConfig(4, 12, ["q_proj", "v_proj"], 0.1, "an/adapter"),
    sampling=SamplingConfig(3, 0.7, 0.9, 20, 0.05, 1.1, 31, ["\n\n", "null", "42"], True),
    scoring=ScoringConfig(
        *("normalize_then_sum", "batch", -1.0, [5.0, 95.0], 99, True),
        workers=3,
        calls_per_worker=77,
        max_failed=0.25,
    ),
    groups=GroupsConfig(
        *("drop", 0.25, 0.75, 3, ["empty"], -1.0, -0.5, 0.1, 0.9, "resample", 0.25, 1.5),
    ),
    curriculum=CurriculumConfig(
        temperature={0: 1.2, 100: 0.9},
        preset={0: "early", 50: "late"},
        group_size={0: 16, 10: 4},
        shares={0: [0.1, 0.6, 0.3]},
        easy_at=0.9,
        hard_at=0.1,
        newest_weight=0.25,
        solved_after=4,
        solved_share=0.5,
    ),
    variants=VariantsConfig(["Q: {prompt}", "{prompt}"], "rewordings"),
    anchors=AnchorsConfig(0.05, "wrong"),
    replay=ReplayConfig("clone", 0.5, 0.2, 3, 7),
    loss=GRPOOptions(
        *("bnpo", "sequence", 0.1, 0.28, 3.0, 1e-3, "k1", True, "loo", "batch", 1, 1e-6, 0.01),
        *(None, 1.5, 1.7, 1.0, 1.2, 1.4, 1.6, 31),
    ),
    kl=KlConfig("decay", 0.01, 50, 0.2, 0.05, 0.25, 5.0, 3.0),
    guards=GuardsConfig(**{f.name: other(f.default) for f in dataclasses.fields(GuardsConfig)}),
    early_stop=StopConfig(5, 0.01),
    train=TrainConfig(
        *(7, 2, 3, 3e-7, "cosine", 0.1, 0.5, "adamw8bit", 0.01, 999, True, 11, 13, 17, 19),
        *(100, True, "r"),
    ),
)
# What goes with nothing above.
OTHERWISE = dataclasses.replace(
    EVERYTHING,
    lora=None,
    model=ModelConfig("m"),
    sampling=SamplingConfig(preset="mid"),
    curriculum=CurriculumConfig(
        preset={0: "mixed"}, mixture=[Setting(0.9, 0.95, 0.25), Setting(1.2, 1.0, 0.75)]
    ),
)
SECTIONS = [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("lora", "rewards")]
