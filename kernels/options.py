"""Options of the GRPO loss: one frozen object for every implementation, checked once, here."""

from dataclasses import dataclass
from typing import Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True)
class GRPOOptions:
    """What the loss computes; names as in TRL, equations in the README's list of loss types.

    Raises ValueError, naming the option, for a value or a combination that has no meaning.
    """

    loss_type: LossType = "grpo"
    """grpo: DeepSeekMath eq. 3; bnpo, dr_grpo: Understanding R1-Zero-like training; dapo; cispo:
    MiniMax-M1; sapo; luspo; vespo: the papers of these names"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """one ratio per token, or one per sample (GSPO)"""
    epsilon: float = 0.2
    """lower clip range of the ratio (PPO)"""
    epsilon_high: float | None = None
    """upper clip range, epsilon when null; for cispo the absolute cap of the ratio"""
    delta: float | None = None
    """cap of the ratio where the advantage is negative (two-sided clip, INTELLECT-2)"""
    beta: float = 0.04
    """weight of the KL to the reference (DeepSeekMath); 0: no reference is read"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimators of http://joschu.net/blog/kl-approx.html"""
    use_bias_correction_kl: bool = False
    """weight the KL by the token ratio (DeepSeek-V3.2)"""
    baseline: Literal["mean", "median", "loo"] = "mean"
    """what is subtracted from a reward; loo: the mean of the other valid samples"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """the standard deviation that divides: of the group, of all valid samples, none (Dr. GRPO)"""
    ddof: Literal[0, 1] = 0
    """0: the group is the whole population; 1: Bessel's correction, as TRL does"""
    epsilon_std: float = 1e-4
    """added to the standard deviation (TRL)"""
    min_std: float = 0.0
    """a group whose standard deviation is not above this carries no signal"""
    advantage_clip: float | None = 5.0
    """advantages are clamped to [-c, c]; null: not clamped"""
    sapo_temperature_pos: float = 1.0
    """temperature of sapo's gate where the advantage is positive (SAPO, section 4)"""
    sapo_temperature_neg: float = 1.05
    """temperature of sapo's gate elsewhere"""
    vespo_k_pos: float = 2.0
    """exponent of the sequence weight for advantages >= 0 (VESPO)"""
    vespo_lambda_pos: float = 3.0
    """decay of the sequence weight for advantages >= 0"""
    vespo_k_neg: float = 3.0
    """exponent of the sequence weight for negative advantages"""
    vespo_lambda_neg: float = 2.0
    """decay of the sequence weight for negative advantages"""
    max_completion_length: int | None = None
    """the constant length that dr_grpo divides by; the other loss types ignore it"""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        _check_combinations(self)

    @classmethod
    def preset(cls, name: str, **changes: object) -> "GRPOOptions":
        """`default` | `trl` (TRL's defaults) | `dr_grpo`, with fields replaced by `changes`."""
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}; given {name!r}")
        return cls(**{**PRESETS[name], **changes})

    @property
    def clip_high(self) -> float:
        """The upper clip range with its default resolved."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


PRESETS: dict[str, dict] = {
    "default": {},
    "trl": {
        "loss_type": "dapo",
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "ddof": 1,
        "advantage_clip": None,
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}

CHOICES = {
    "loss_type": LossType.__args__,
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
    "baseline": ("mean", "median", "loo"),
    "scale_rewards": ("group", "batch", "none"),
    "ddof": (0, 1),
}
NOT_NEGATIVE = (
    "epsilon epsilon_high beta epsilon_std min_std "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
).split()
POSITIVE = (
    "delta advantage_clip sapo_temperature_pos sapo_temperature_neg max_completion_length".split()
)
MAY_BE_NONE = "epsilon_high delta advantage_clip max_completion_length".split()


def _check_choices(o: GRPOOptions) -> None:
    for name, allowed in CHOICES.items():
        if (value := getattr(o, name)) not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(map(str, allowed))}; given {value!r}"
            )


def _check_ranges(o: GRPOOptions) -> None:
    for name in (*NOT_NEGATIVE, *POSITIVE):
        value = getattr(o, name)
        if value is None and name in MAY_BE_NONE:
            continue
        least = "> 0" if name in POSITIVE else ">= 0"
        number = isinstance(value, int | float) and 0 <= value < float("inf")
        if not number or (value == 0 and name in POSITIVE):
            raise ValueError(f"{name} must be a finite number {least}; given {value!r}")


def _check_combinations(o: GRPOOptions) -> None:
    clipped = ", ".join(CLIPPED_LOSSES)
    if o.delta is not None and o.loss_type not in CLIPPED_LOSSES:
        raise ValueError(f"delta goes only with loss_type {clipped}; given {o.loss_type}")
    if o.importance_sampling_level == "sequence" and o.loss_type not in CLIPPED_LOSSES:
        raise ValueError(
            "importance_sampling_level 'sequence' goes only with loss_type "
            f"{clipped}; given {o.loss_type}"
        )
    if o.loss_type == "cispo" and o.epsilon_high is None:
        raise ValueError("loss_type cispo needs epsilon_high, the absolute cap of the ratio")
    if o.loss_type == "dr_grpo" and o.max_completion_length is None:
        raise ValueError("loss_type dr_grpo needs max_completion_length, the length it divides by")
