"""What a sample is drawn with, and what comes back."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn; vLLM's names. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop))
        checks = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "max_tokens": self.max_tokens >= 1,
            "stop": all(self.stop),
            "seed": self.seed is None or 0 <= self.seed < 2**64,
        }
        for name, holds in checks.items():
            if not holds:
                raise ValueError(f"{name} is out of range; given {getattr(self, name)!r}")


@dataclass
class Rollout:
    """One sample, token in, token out: its text is never tokenised again."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """with the EOS that ended it, if one did"""
    logp_sampler: Tensor
    """[len] f32; of the temperature-scaled, untruncated distribution"""
    logp_processed: Tensor
    """[len] f32; of the distribution it was drawn from"""
    finish_reason: str
    """stop | length | budget | error"""
    group: int
    sample: int
    params: SamplingParams
    policy_version: int

    @property
    def cut(self) -> bool:
        """Whether it ended before it was whole: by max_tokens, the context or a budget."""
        return self.finish_reason in ("length", "budget")
