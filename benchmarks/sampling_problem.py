"""What sampling is measured on: a model of random weights, prompts, and the routes to samples."""

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..rollout import Rollout
from . import models
from .harness import Expected

if TYPE_CHECKING:
    from .sampler_suite import Shape

# Of the sampler's log-probs to those of one forward over the whole sequence.
LOGP_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
LENGTH_SIGMA = 0.7  # of the lognormal lengths of the ragged case
MOST_OF_MEDIAN = 4
PAGE = 256  # tokens of a page of generate_batch, its own default
UNFILTERED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
MOST_LIKELY = UNFILTERED | {"top_k": 1}  # greedy by the route of sampling


class Problem:
    """A model of random weights that knows no EOS, prompts of random tokens, what is true of them.

    prompts: [prompts] lists of `prompt` ids, all equally long.
    """

    def __init__(self, shape: "Shape", device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = models.build(shape.model, shape.dtype, device)
        self.prompts = models.random_prompts(shape.model, shape.prompts, shape.prompt)

    @cached_property
    def lengths(self) -> list[int]:
        """[group] tokens of each sample of a group: lognormal, of median `new`, bounded."""
        normal = torch.randn(self.shape.group, generator=torch.Generator().manual_seed(0))
        drawn = self.shape.new * (LENGTH_SIGMA * normal).exp()
        return drawn.round().clamp(1, MOST_OF_MEDIAN * self.shape.new).int().tolist()

    def greedy(self, new: int) -> Tensor:
        """[prompts, new] the greedy continuation of each prompt alone, by generate."""
        ids = torch.tensor(self.prompts, device=self.device)
        rows = [_continued(self.model, row[None], new, do_sample=False) for row in ids]
        return torch.cat(rows)

    def expected(self, tokens: Tensor, samples: int) -> dict[str, Expected]:
        """`tokens`: the greedy ones of all samples; none of the samples lacks any.

        pages_beyond: of keys and values, those that the formula of group sampling does not allow.
        """
        return {
            "pages_beyond": Expected(torch.zeros((), dtype=torch.float64), 0.0),
            "tokens": Expected(tokens.double(), 0.0),
            "missing": Expected(torch.zeros(samples, dtype=torch.float64), 0.0),
            "logp_gap": Expected(
                torch.zeros((), dtype=torch.float64), LOGP_TOLERANCE[self.shape.dtype]
            ),
        }

    @torch.no_grad()
    def logp_gap(self, rollouts: Iterable[Rollout]) -> Tensor:
        """[] the most by which the sampler's log-probs differ from those of a whole forward."""
        gaps = []
        for r in rollouts:
            ids = torch.tensor([r.prompt_ids + r.completion_ids], device=self.device)
            count = len(r.completion_ids)
            logits = self.model(input_ids=ids, logits_to_keep=count + 1).logits[0, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, ids[0, -count:, None]).squeeze(-1)
            gaps.append((logp.cpu() - r.logp_sampler).abs().max())
        return torch.stack(gaps).max()

    @cached_property
    def paged_model(self) -> torch.nn.Module:
        """A copy for generate_batch, which changes the attention of the model it runs on."""
        return copy.deepcopy(self.model)


def repeated(problem: Problem, group: int, **sampling: object) -> Tensor:
    """[prompts * group, new] by generate: every prompt as often as it has samples, as TRL does."""
    ids = torch.tensor(problem.prompts, device=problem.device).repeat_interleave(group, dim=0)
    return _continued(problem.model, ids, problem.shape.new, **sampling)


def batched(problem: Problem, group: int, **sampling: object) -> Tensor:
    """[prompts * group, new] by generate_batch: a prompt is prefilled once and its pages forked."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    shape = problem.shape
    config = GenerationConfig(
        **sampling,
        max_new_tokens=shape.new,
        num_return_sequences=group,
        eos_token_id=-1,
        pad_token_id=models.PAD,
    )
    # What all samples need at most; left to itself it takes most of the memory for pages, and a
    # mask of the square of 8192 tokens.
    pages = -(-(shape.prompt + shape.new) // PAGE) * shape.prompts * group
    paging = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages + shape.prompts,
        max_batch_tokens=shape.prompts * max(shape.prompt, group),
    )
    outputs = problem.paged_model.generate_batch(
        problem.prompts, generation_config=config, continuous_batching_config=paging
    )
    found: dict[tuple[int, ...], list[list[int]]] = {tuple(p): [] for p in problem.prompts}
    for output in outputs.values():
        found[tuple(output.prompt_ids)].append(output.generated_tokens)
    return torch.tensor([tokens for samples in found.values() for tokens in samples])


def _continued(model: torch.nn.Module, ids: Tensor, new: int, **sampling: object) -> Tensor:
    """ids [B, P] -> [B, new] on the CPU."""
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=new, **sampling)
    return tokens[:, ids.shape[1] :].cpu()
