"""The run as frozen dataclasses. Every default says where it comes from; checks need no model."""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from .curriculum.config import AnchorsConfig, CurriculumConfig, ReplayConfig, VariantsConfig
from .errors import UserError
from .guards.config import GuardsConfig, KlConfig, StopConfig
from .kernels.options import GRPOOptions
from .paths import expand_home
from .sample_config import GroupsConfig, RewardConfig, SamplingConfig, ScoringConfig

LR_LORA = 1e-5
LR_ALL_WEIGHTS = 1e-6
GYM = "reasoning_gym:"
EVAL_GYM = {"size": 200, "seed": 1}


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    path: str
    """a folder in the transformers format, or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """of the weights; trained weights that are not float32 get float32 masters"""
    base: Literal["none", "8bit", "4bit"] = "none"
    """quantise the frozen linears with bitsandbytes (LLM.int8, or NF4 with double quantisation)"""
    reference: str | None = None
    """folder or hub id of the reference of the KL; null: the model as it is before training"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    device: str = "auto"
    """a torch device; auto: cuda where there is one, else cpu"""

    def __post_init__(self) -> None:
        expand_home(self, "model", "path", "reference")


@dataclass(frozen=True)
class LoraConfig:
    """LoRA through peft; `lora: null` trains all weights."""

    rank: int = 16
    """as in peft's and TRL's GRPO examples"""
    alpha: int = 32
    """scale is alpha / rank; twice the rank is common practice"""
    targets: str | list[str] = "all-linear"
    """all linears but the head (QLoRA), or a name or names of modules"""
    dropout: float = 0.0
    """only in the training forward, never while sampling or scoring; dropout of the model itself
    is off, for it would be noise in the ratio"""
    adapter: str | None = None
    """folder of an adapter to go on training; its rank, alpha and targets then hold, and a second
    frozen copy of it is the reference"""

    def __post_init__(self) -> None:
        expand_home(self, "lora", "adapter")


@dataclass(frozen=True)
class DataConfig:
    """The tasks."""

    path: str
    """a JSONL or Parquet file, a folder saved by `datasets`, builtin:arithmetic or
    reasoning_gym:NAME"""
    prompt_column: str = "prompt"
    """strings, or chat messages; they go through the chat template"""
    answer_column: str = "answer"
    """what the built-in rewards compare with"""
    eval_path: str | None = None
    """held-out tasks in one of the forms of `path`"""
    eval_limit: int | None = None
    """evaluate only the first so many of them"""
    as_chat: bool = False
    """send a string prompt through the chat template as a user's message"""
    system: str | None = None
    """system message put before chat prompts that have none"""
    gym: dict[str, Any] = field(default_factory=dict)
    """of reasoning_gym:NAME: size (1000), seed (0), and the options of its data set"""
    eval_gym: dict[str, Any] = field(default_factory=EVAL_GYM.copy)
    """the same for eval_path and regression_path"""
    task_column: str | None = None
    """names the kind of task of a row; the KL is then recorded by it"""
    regression_path: str | None = None
    """what the model could do before, in one of the forms of `path`: evaluated beside the held-out
    tasks, and its fall is a guard"""
    now: str | None = None
    """what a chat template that writes the date takes for now, as 2026-12-31 or 2026-12-31T18:30;
    null: when the run began. A resume, eval and sample of the run keep to it"""

    def __post_init__(self) -> None:
        expand_home(self, "data", "path", "eval_path", "regression_path")
        try:
            datetime.fromisoformat(self.now or "2026-12-31")
        except ValueError as error:
            raise UserError(
                f"data.now must be a date and time like 2026-12-31T18:30; given {self.now}"
            ) from error
        others = [path or "" for path in (self.eval_path, self.regression_path)]
        if self.eval_gym != EVAL_GYM and not any(path.startswith(GYM) for path in others):
            raise UserError(
                f"data.eval_gym is for a data.eval_path or data.regression_path of {GYM}NAME: "
                "leave it out"
            )
        if self.gym and not self.path.startswith(GYM):
            raise UserError(
                f"data.gym is for a data.path of {GYM}NAME; data.path is {self.path}: leave out gym"
            )


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 200
    """optimiser steps"""
    prompts_per_step: int = 8
    """groups of a generation"""
    num_iterations: int = 1
    """optimiser steps on one generation (mu of the GRPO paper)"""
    lr: float | None = None
    """null: 1e-5 for LoRA, 1e-6 for all weights (TRL)"""
    schedule: Literal["constant", "cosine"] = "constant"
    """after the warm-up; cosine falls to 0"""
    warmup: float = 0.03
    """share of the steps over which the learning rate rises"""
    max_grad_norm: float = 1.0
    """the gradient is clipped to this norm (TRL)"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """torch's AdamW, or the 8-bit one of bitsandbytes"""
    weight_decay: float = 0.0
    """TRL's default"""
    token_budget: int = 8192
    """tokens of a micro-batch with its prompts, padding may double them; bounds memory alone"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward: less memory, about a third more time"""
    seed: int = 0
    """of everything: adapter, order of the tasks, sampling"""
    eval_every: int = 20
    """steps between evaluations; there is one before and one after in any case"""
    checkpoint_every: int = 20
    """steps between checkpoints"""
    keep_checkpoints: int = 2
    """the newest so many are kept, and the one with the best held-out reward"""
    audit_every: int | None = 500
    """steps after which the highest rewards since then are listed, for a person to look at"""
    tensorboard: bool = False
    """write the metrics for TensorBoard as well"""
    out: str = "runs/first"
    """the run folder"""

    def __post_init__(self) -> None:
        expand_home(self, "train", "out")


@dataclass(frozen=True)
class RunConfig:
    """A run of `grpo train`."""

    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig]
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    variants: VariantsConfig = field(default_factory=VariantsConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss: GRPOOptions = field(default_factory=GRPOOptions)
    kl: KlConfig = field(default_factory=KlConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    early_stop: StopConfig = field(default_factory=StopConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_json(self.to_dict(), "")
        if not self.rewards:
            raise UserError("rewards is empty: name one, as in rewards: [{function: math}]")
        if self.data.regression_path is not None and self.data.eval_path is None:
            raise UserError(
                "data.regression_path is evaluated beside data.eval_path: give that as well"
            )
        if self.sampling.preset == "mixed" and self.curriculum.temperature is not None:
            raise UserError(
                "curriculum.temperature and sampling.preset mixed both say the temperature: leave "
                "out one"
            )
        if self.model.base != "none" and self.lora is None:
            raise UserError(
                f"model.base {self.model.base} can't train all weights: give lora, or base: none"
            )

    @property
    def weights_name(self) -> str:
        """The folder of the weights, in a run and in its checkpoints."""
        return "model" if self.lora is None else "adapter"

    @property
    def out(self) -> Path:
        """The run folder."""
        return Path(self.train.out)

    @property
    def lr(self) -> float:
        """The peak learning rate with its default resolved."""
        if self.train.lr is not None:
            return self.train.lr
        return LR_ALL_WEIGHTS if self.lora is None else LR_LORA

    def to_dict(self) -> dict:
        """Plain values, as they lie in config.yaml."""
        return dataclasses.asdict(self)


def _check_json(value: Any, key: str) -> None:
    """A checkpoint, which is JSON, must hold the config: a resume compares with it."""
    if type(value) in (str, int, float, bool, type(None)):
        return
    if not isinstance(value, dict | list | tuple):
        raise UserError(
            f"{key} is a {type(value).__name__}, which a checkpoint can't hold: give texts, "
            "numbers, lists or mappings"
        )
    items = value if isinstance(value, dict) else dict(enumerate(value))
    for name, inner in items.items():
        _check_json(inner, f"{key}.{name}".strip("."))
    try:
        alike = len(json.loads(json.dumps(dict.fromkeys(items)))) < len(items)
    except TypeError:
        alike = True
    if alike:
        raise UserError(f"{key}: its keys, {list(items)}, are no texts, or not apart as texts")


AT_LEAST_ONE = (
    "train.steps train.prompts_per_step train.num_iterations train.token_budget train.eval_every "
    "train.checkpoint_every train.keep_checkpoints train.audit_every lora.rank data.eval_limit"
).split()


def _check_numbers(run: RunConfig) -> None:
    for name in AT_LEAST_ONE:
        _require(run, name, lambda v: v >= 1, "at least 1")
    for name in ("train.lr", "train.max_grad_norm", "lora.alpha"):
        _require(run, name, lambda v: 0 < v < float("inf"), "finite and above 0")
    for name in ("train.weight_decay", "train.seed"):
        _require(run, name, lambda v: 0 <= v < float("inf"), "finite and not negative")
    _require(run, "train.warmup", lambda v: 0 <= v <= 1, "between 0 and 1")
    _require(run, "train.seed", lambda v: v < 2**32, "below 2**32")
    _require(run, "lora.dropout", lambda v: 0 <= v < 1, "at least 0 and below 1")


def _require(run: RunConfig, name: str, holds, wanted: str) -> None:
    group, key = name.split(".")
    section = getattr(run, group)
    value = None if section is None else getattr(section, key)
    if value is not None and not holds(value):
        raise UserError(f"{name} must be {wanted}; given {value}")
