"""Drawing a token from logits: `sample_tokens` against transformers' logits warpers."""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from . import machine
from .harness import Case, Expected, Provider, Step
from .ours import implementations

if TYPE_CHECKING:
    from .sampler_suite import Shape

TEMPERATURE = 0.8
FILTERS = {"top-p": {"top_p": 0.9}, "temperature": {}, "top-k": {"top_k": 50}}
SPREAD = 3.0  # of the logits; their nucleus then is some thousands of 151,936 words
# torch's softmax adds 151,936 float32 in a row, which alone is 1e-4 of a probability.
PROBABILITY_TOLERANCE, LOGP_TOLERANCE, DRAW_TOLERANCE = 1e-4, 1e-3, 1e-4


class Problem:
    """Seeded normal logits [rows, V] f32 and, in float64, the distribution that is drawn from."""

    def __init__(self, shape: "Shape", filters: dict[str, float], device: torch.device) -> None:
        self.rows, self.device, self.filters = shape.rows, device, filters
        generator = torch.Generator().manual_seed(0)
        self.logits = SPREAD * torch.randn(shape.rows, shape.vocab, generator=generator)
        self.uniform = torch.rand(shape.rows, generator=generator, dtype=torch.float64)
        self.truth = truncated(self.logits.double() / TEMPERATURE, **filters)
        self.logits = self.logits.to(device)

    def expected(self) -> dict[str, Expected]:
        """Probabilities [rows * V]; of a drawn token its log-prob and its place, as errors."""
        zeros = torch.zeros(self.rows, dtype=torch.float64)
        return {
            "probabilities": Expected(self.truth.flatten(), PROBABILITY_TOLERANCE),
            "logp_gap": Expected(zeros, LOGP_TOLERANCE),
            "draw_gap": Expected(zeros, DRAW_TOLERANCE),
        }


def truncated(logits: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Probabilities [B, V] over the `top_k` first words, or the fewest that hold `top_p`."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    if top_k:
        p[:, top_k:] = 0.0
    if top_p < 1:
        p[p.cumsum(-1) - p >= top_p] = 0.0
    return torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))


def cases(shape: "Shape", device: torch.device) -> list[Case]:
    """One for each filter."""
    nbytes = 4 * shape.rows * shape.vocab
    return [_case(name, shape, device, nbytes) for name in FILTERS]


def _case(name: str, shape: "Shape", device: torch.device, nbytes: int) -> Case:
    problem = cache(lambda: Problem(shape, FILTERS[name], device))
    return Case(
        suite="sampler",
        name=f"token-{name}",
        shape=shape.used(),
        device=device,
        inputs=problem,
        expected=lambda: problem().expected(),
        providers=(
            *(
                Provider(f"ours-{i}", partial(_ours, i), check=partial(_check_ours, i), **limits)
                for i, limits in implementations(device).items()
            ),
            Provider("transformers", _warpers, check=_check_warpers),
        ),
        work=nbytes,
        rate_unit="GB/s",
        machine_rate=lambda: machine.copy_rate(nbytes, device),
    )


def _draw(impl: str, problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    column = partial(torch.full, (problem.rows,), device=problem.device)
    filters = {name: column(value) for name, value in problem.filters.items()}
    return lambda uniform: ops.sample_tokens(
        problem.logits, uniform, column(TEMPERATURE), **filters, impl=impl
    )


def _ours(impl: str, problem: Problem) -> Step:
    """With the log-probs of the tokens, which the others do not give."""
    draw = _draw(impl, problem)

    def step() -> dict[str, Tensor]:
        draw(torch.rand(problem.rows, dtype=torch.float64, device=problem.device))
        return {}

    return step


def _check_ours(impl: str, problem: Problem) -> Step:
    """At given random numbers: each must lie where its token stands in the distribution."""
    draw = _draw(impl, problem)

    def step() -> dict[str, Tensor]:
        tokens, _, logp = (x.cpu() for x in draw(problem.uniform.to(problem.device)))
        at = tokens[:, None]
        p, above = problem.truth.gather(-1, at), problem.truth.cumsum(-1).gather(-1, at)
        u = problem.uniform[:, None]
        outside = torch.relu(u - above) + torch.relu(above - p - u)
        return {
            "logp_gap": logp.double() - p.log().squeeze(-1),
            "draw_gap": outside.squeeze(-1),
        }

    return step


def _warpers(problem: Problem) -> Step:
    warp = _probabilities(problem)

    def step() -> dict[str, Tensor]:
        torch.multinomial(warp(), num_samples=1)
        return {}

    return step


def _check_warpers(problem: Problem) -> Step:
    warp = _probabilities(problem)
    return lambda: {"probabilities": warp().flatten()}


def _probabilities(problem: Problem) -> Callable[[], Tensor]:
    """As generate has them: the warpers one after the other, then softmax."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(TEMPERATURE)]
    if "top_k" in problem.filters:
        warpers.append(TopKLogitsWarper(problem.filters["top_k"]))
    if "top_p" in problem.filters:
        warpers.append(TopPLogitsWarper(problem.filters["top_p"]))

    def probabilities() -> Tensor:
        scores = problem.logits
        for warper in warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)

    return probabilities
