"""Policy, reference and prompts on real samples, before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Messages
from ..forward import eos_ids, evaluating
from ..model import Policy
from ..ops import pack_groups
from ..packed import completion_logprobs
from ..prompts import prompt_tail
from ..rollout import Rollout
from .checks import FAIL, OK, WARNING, Check

KL_NEAR = 1e-6  # nats a token
# Nats, mean over tokens of sampler against trainer: float32 sums in another order; bfloat16 and
# quantised weights give 0.01 to 0.04, and guards.logp_gap speaks at this.
EXACT_GAP, MOST_GAP = 1e-3, 0.1


@dataclass(frozen=True)
class Logprobs:
    """Of the same completion tokens, [N] f32, under the policy as it is before training."""

    sampler: Tensor
    scored: Tensor
    """as old log-probs are made: by the forward of the loss, without dropout"""
    trained: Tensor
    """by the training forward itself"""
    reference: Tensor | None


@torch.no_grad()
def logprobs(policy: Policy, rollouts: Sequence[Rollout], token_budget: int) -> Logprobs:
    """Of the completions of one group, in micro-batches under a budget of tokens."""

    def scored(model: nn.Module) -> Tensor:
        with evaluating(model):
            return _forward(model, rollouts, token_budget)

    reference = None
    if policy.reference is not None:
        with policy.reference() as model:
            reference = scored(model)
    with evaluating(policy.model):  # puts the modes back
        policy.model.train()
        trained = _forward(policy.model, rollouts, token_budget)
    sampler = torch.cat([r.logp_sampler for r in rollouts])
    return Logprobs(sampler, scored(policy.model), trained, reference)


def check_logprobs(
    found: Logprobs,
    *,
    most_gap: float = MOST_GAP,
    dropout: float = 0.0,
    own_reference: bool = False,
) -> list[Check]:
    """Ratio 1 and KL 0 at step 0.

    most_gap: mean of sampler against trainer, nats. dropout: of LoRA, which the training forward
    alone has. own_reference: the reference is another model, whose KL to the policy is not 0.
    """
    return [
        _ratio((found.trained - found.scored).exp(), dropout),
        _gap((found.sampler - found.scored).abs(), most_gap),
        _kl(found, own_reference),
    ]


def _ratio(ratio: Tensor, dropout: float) -> Check:
    text = f"{ratio.min():.6f} to {ratio.max():.6f} over {len(ratio)} tokens"
    if bool((ratio == 1).all()):
        return Check("ratio at step 0", OK, text)
    if dropout > 0:
        text += f": lora.dropout {dropout:g} is noise in the ratio"
        return Check("ratio at step 0", WARNING, text)
    return Check("ratio at step 0", FAIL, f"{text}: a forward that is not the same twice")


def _gap(gap: Tensor, most: float) -> Check:
    text = f"mean {gap.mean():.2e}, most {gap.max():.2e} nats (mean up to {most:g} is usual)"
    bad = not gap.mean() <= most
    return Check("sampler against trainer", FAIL if bad else OK, text)


def _kl(found: Logprobs, own_reference: bool) -> Check:
    name = "KL at step 0"
    if found.reference is None:
        return Check(name, OK, "no reference: loss.beta is 0")
    x = found.reference - found.scored
    kl = float((x.exp() - x - 1).mean())
    text = f"{kl:.2e} nats a token"
    if own_reference:
        return Check(name, OK, f"{text}, to another model: model.reference")
    return Check(name, OK if abs(kl) <= KL_NEAR else FAIL, text)


def _forward(model: nn.Module, rollouts: Sequence[Rollout], token_budget: int) -> Tensor:
    lengths = [len(r.completion_ids) for r in rollouts]
    prompt = [len(rollouts[0].prompt_ids)]
    micros = pack_groups(prompt, lengths, [0, len(rollouts)], token_budget)
    spans = sorted((first, last) for micro in micros for _, first, last in micro)
    parts = [
        completion_logprobs(
            model,
            [r.prompt_ids for r in rollouts[first:last]],
            [r.completion_ids for r in rollouts[first:last]],
            [r.params.temperature for r in rollouts[first:last]],
        )[0]
        for first, last in spans
    ]
    return torch.cat(parts).float().cpu()


def check_bos(tokenizer: Any, prompt: str | Messages, ids: Sequence[int]) -> Check:
    """At most one BOS in front, and one where the tokenizer gives raw texts one.

    prompt: as it was sent; ids: its tokens.
    """
    bos, count = tokenizer.bos_token_id, 0
    if bos is None:
        return Check("BOS", OK, "the tokenizer has none")
    while count < len(ids) and ids[count] == bos:
        count += 1
    wanted = int(tokenizer("a")["input_ids"][:1] == [bos])
    text = f"{count} in front ({tokenizer.bos_token})"
    if count > 1:
        return Check("BOS", FAIL, f"{text}: at most one; remove the one in the text")
    if count < wanted and isinstance(prompt, str):
        return Check("BOS", FAIL, f"{text}: the tokenizer gives a text {wanted}")
    if count < wanted:
        return Check("BOS", WARNING, f"{text}: a text gets {wanted}, the chat template writes none")
    return Check("BOS", OK, text)


def check_tail(policy: Policy, prompt: str | Messages, ids: Sequence[int]) -> Check:
    """How the prompt ends, as the model sees it."""
    name, text = "prompt's tail", repr(prompt_tail(policy.tokenizer, ids))
    if ids[-1] in eos_ids(policy.model, policy.tokenizer):
        return Check(name, FAIL, f"{text} ends with an EOS: the answer has ended before it begins")
    if not isinstance(prompt, str):
        template = policy.tokenizer.apply_chat_template
        begun, bare = (
            template(prompt, tokenize=False, add_generation_prompt=begin) for begin in (True, False)
        )
        if begun == bare:
            return Check(name, WARNING, f"{text}: the chat template begins no answer")
    elif prompt.endswith(" "):
        return Check(
            name, WARNING, f"{text} ends with a blank, which most tokenizers join to the next word"
        )
    return Check(name, OK, text)


def check_ends(
    rollouts: Sequence[Rollout], ends: frozenset[int], prompt: str | Messages, tokenizer: Any
) -> Check:
    """At least one sample ends by itself; if none does, why.

    ends: the ids that end a completion. prompt: as it was sent.
    """
    params, name = rollouts[0].params, "EOS reached"
    stopped = sum(r.finish_reason == "stop" for r in rollouts)
    text = f"by {stopped} of {len(rollouts)} samples"
    if stopped:
        return Check(name, OK, text)
    if params.ignore_eos:
        return Check(name, FAIL, f"{text}: sampling.ignore_eos is on")
    if not ends:
        return Check(name, FAIL, f"{text}: the model names no EOS, and no stop string came")
    hint = "or the model does not end its answers"
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
        hint = "or the model waits for chat messages: set data.as_chat"
    longest = max(len(r.completion_ids) for r in rollouts)
    if longest < params.max_tokens:
        return Check(name, FAIL, f"{text}: the context was full after {longest} tokens; {hint}")
    return Check(
        name, FAIL, f"{text}: sampling.max_tokens {params.max_tokens} is too small, {hint}"
    )
