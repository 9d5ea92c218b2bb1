"""What `check.py` does in its own process: exported weights, and a loop without our trainer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_engine as ge
from grpo_engine.export import open_run
from grpo_engine.packed import completion_logprobs

TEXT = "Bread is made of flour, water and salt, and it rises because yeast turns sugar into gas."
EXACT = 1e-4  # nats: float32 sums in another order


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """NaN does not."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "MISSED"
        return f"{self.name:32} {self.value:10.3g}   at most {self.limit:7.3g}   {verdict}"


@torch.no_grad()
def adapter_rows(run: Path, model: Path, adapter: Path, merged: Path, gap: float) -> Iterator[Row]:
    """The exported folders by peft and transformers in float32, and the run by its own forward."""
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = tokenizer(TEXT)["input_ids"]
    base = _load(model, torch.float32)
    before = _logprobs(base, ids)
    by_peft = _logprobs(PeftModel.from_pretrained(base, adapter), ids)
    by_merge = _logprobs(_load(merged, torch.float32), ids)
    policy = open_run(run)[1]
    own, _ = completion_logprobs(policy.model, [ids[:1]], [ids[1:]], [1.0])
    rounded = policy.model.dtype != torch.float32
    yield Row("export: unchanged by training", float(torch.equal(before, by_peft)), 0)
    yield Row("export: peft - ours", float((by_peft - own).abs().mean()), gap)
    yield Row(
        "export: merged - peft",
        float((by_merge - by_peft).abs().mean()),
        gap if rounded else EXACT,
    )


def library_rows(model: Path, dtype: str, tasks: list[str], gap: float) -> Iterator[Row]:
    """A loop of two steps on all weights: sampling, packed log-probs, loss, step."""
    causal, tokenizer = _load(model, getattr(torch, dtype)), AutoTokenizer.from_pretrained(model)
    sampler = ge.GroupSampler(causal, tokenizer)
    chat = bool(tokenizer.chat_template)
    prompts = [[{"role": "user", "content": task}] if chat else task for task in tasks]
    for step in (1, 2):
        groups = sampler.generate(prompts, 4, ge.SamplingParams(max_tokens=16, seed=step))
        logp, index = _forward(causal, groups)
        sampled = torch.cat([r.logp_sampler for group in groups for r in group])
        apart = float((sampled - logp.detach()).abs().mean())
        yield Row(f"library: sampler - loop, step {step}", apart, gap)
        rewards = torch.tensor([float(i % 4 < 2) for i in range(8)])
        out = ge.grpo_loss(
            logp,
            None,
            cu_seqlens=index.cu_seqlens,
            rewards=rewards,
            cu_groups=index.cu_groups,
            options=ge.GRPOOptions(beta=0.0),
        )
        out.loss.backward()
        _descend(causal)
        sampler.update_policy()
        with torch.no_grad():
            moved = _forward(causal, groups)[0] - logp
        lengths = index.cu_seqlens.diff().long()
        signs = (2 * rewards - 1).repeat_interleave(lengths)
        yield Row(f"library: gain missed, step {step}", float((signs * moved).sum() <= 0), 0)


def _forward(causal: nn.Module, groups: list[list[ge.Rollout]]) -> tuple[Tensor, Any]:
    completions = [[r.completion_ids for r in group] for group in groups]
    hidden, index = ge.group_hidden(causal, [g[0].prompt_ids for g in groups], completions)
    targets = torch.tensor([t for many in completions for ids in many for t in ids])
    logp, _ = ge.token_logprob(hidden, causal.get_output_embeddings().weight, targets)
    return logp, index


def _descend(causal: nn.Module) -> None:
    """A plain step of 0.03 % of the weights' norm, rounded to their dtype."""
    parameters = [p for p in causal.parameters() if p.grad is not None]
    size, slope = (
        torch.stack([t.float().norm() for t in tensors]).norm()
        for tensors in (parameters, [p.grad for p in parameters])
    )
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.float() - 3e-4 * size / slope * p.grad.float())
            p.grad = None


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _logprobs(model: nn.Module, ids: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
