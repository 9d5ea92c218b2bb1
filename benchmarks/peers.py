"""The peers as the benchmarks and tests/peers call them: the same data in, the same result out.

Each function imports its peer when called; requirements-peers.txt has the versions these fit.
Losses take padded float32 log-probs [S, T], advantages [S] and mask [S, T], and return a
differentiable scalar. What a peer has no option for raises ValueError.
"""

import functools
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.options import CLIPPED_LOSSES, GRPOOptions
from ..kernels.reference import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from trl import GRPOTrainer

TRL_NAMES = (
    "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl "
    "scale_rewards sapo_temperature_pos sapo_temperature_neg "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
).split()
LIGER_NAMES = (
    "loss_type importance_sampling_level delta beta use_bias_correction_kl max_completion_length "
    "sapo_temperature_pos sapo_temperature_neg "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
).split()


def eager_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    options: GRPOOptions,
) -> Tensor:
    """The clipped losses in plain PyTorch, as one would write them; what torch.compile is given.

    No metrics and no checks, and nothing that depends on values, so it compiles without a break:
    `torch.compile(eager_loss, fullgraph=True)`. mask is bool.
    """
    o = options
    if o.loss_type not in CLIPPED_LOSSES or o.kl_estimator != "k3":
        raise ValueError(f"eager_loss has no {o.loss_type} with {o.kl_estimator}")
    a, count = advantages[:, None], mask.sum(-1)
    log_ratio = torch.where(mask, logp - old_logp, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = token_ratio = log_ratio.exp()
    if o.importance_sampling_level == "sequence":
        ratio = (log_ratio.sum(-1) / count.clamp(min=1)).exp()[:, None]
    free = ratio if o.delta is None else ratio.clamp(max=o.delta)
    terms = -torch.minimum(free * a, ratio.clamp(1 - o.epsilon, 1 + o.clip_high) * a)
    if o.beta > 0:
        x = torch.where(mask, ref_logp - logp, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl = x.exp() - x - 1
        terms = terms + o.beta * (kl * token_ratio if o.use_bias_correction_kl else kl)
    terms = torch.where(mask, terms, 0.0)
    if o.loss_type == "grpo":
        return (terms.sum(-1) / count.clamp(min=1)).mean()
    if o.loss_type == "luspo":
        return terms.sum(-1).mean()
    if o.loss_type == "dr_grpo":
        return terms.sum() / (len(logp) * o.max_completion_length)
    return terms.sum() / count.sum().clamp(min=1)


def trl_eager_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    options: GRPOOptions,
) -> Tensor:
    """TRL's own loss of given log-probs, all of `_compute_loss`, metrics and their syncs included.

    A training step of TRL pays for those metrics as well; `eager_loss` is the chain without them.
    Give an int64 mask, as TRL keeps it: a bool one is converted in here.
    """
    trainer = trl_trainer(options)
    return trl_compute_loss(trainer, logp, mask, advantages, old_logp, ref_logp)


@functools.cache
def trl_trainer(options: GRPOOptions, **config: object) -> "GRPOTrainer":
    """A GRPOTrainer of `options`, in training mode, around a tiny model that is never run.

    config: further fields of GRPOConfig. Kept, so that a benchmark builds it once.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    if options.kl_estimator != "k3" or options.baseline != "mean":
        raise ValueError("TRL has kl_estimator k3 and baseline mean only")
    fields = {name: getattr(options, name) for name in TRL_NAMES}
    if options.max_completion_length is not None:
        fields["max_completion_length"] = options.max_completion_length
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among TRL and what it imports
        _save_tiny_model(Path(folder))  # from a folder, since TRL loads its reference by path
        trainer = GRPOTrainer(
            folder,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                **(fields | config),
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def trl_compute_loss(
    trainer: "GRPOTrainer",
    logp: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    **inputs: Tensor,
) -> Tensor:
    """`trainer._compute_loss` where the model's log-probs are `logp`; metrics: `trainer._metrics`.

    inputs: any of TRL's importance_sampling_ratio, tool_mask, num_items_in_batch (by default the
    tokens under the masks).
    """
    mask = mask.long()
    if "num_items_in_batch" not in inputs:
        counted = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        inputs["num_items_in_batch"] = counted.sum()
    # TRL has such a ratio only from vLLM, whose server a trainer built with use_vllm waits for.
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    entropy = logp.detach()  # any tensor of this shape: it goes into a metric alone
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropy, None)
    given = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,  # its shape alone is used
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old_logp,
        "ref_per_token_logps": ref_logp,
        **inputs,
    }
    return trainer._compute_loss(trainer.model, given)


def trl_chunked_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [N, D], weight [V, D], targets [N] -> log-prob [N] and entropy [N] by TRL.

    As GRPOTrainer calls it: entropy is asked for, chunks of TRL's own size of the vocabulary.
    """
    from trl.trainer import utils

    chunk_size = chunk_size or utils._CHUNKED_LOGPROB_CHUNK_SIZE
    apply = utils._ChunkedLogProbFunction.apply
    per_token = apply(
        hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, ("entropy",)
    )
    return per_token[0], per_token[1]


def liger_chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logp: Tensor | None,
    old_logp: Tensor | None,
    options: GRPOOptions,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    chunk_size: int = 1,
    compiled: bool = True,
) -> Tensor:
    """hidden [S, T, D], weight [V, D], targets [S, T] -> the loss by Liger-Kernel.

    Gradients in hidden, and in weight and bias where they ask for one; they are computed in the
    forward. chunk_size (samples) and compiled have Liger's defaults; the first compiled call of an
    options object spends many seconds in torch.compile.
    """
    loss, _ = liger_module(options, temperature, chunk_size, compiled)(
        hidden,
        weight,
        targets,
        mask.long(),
        advantages,
        bias=bias,
        ref_per_token_logps=ref_logp,
        old_per_token_logps=old_logp,
        vllm_is_ratio=importance_ratio,
    )
    return loss


def liger_module(
    options: GRPOOptions, temperature: float = 1.0, chunk_size: int = 1, compiled: bool = True
) -> torch.nn.Module:
    """Liger's LigerFusedLinearGRPOLoss of `options`; called, it returns (loss, metrics)."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    if options.kl_estimator != "k3":
        raise ValueError("Liger-Kernel has kl_estimator k3 only")
    return LigerFusedLinearGRPOLoss(
        epsilon_low=options.epsilon,
        epsilon_high=options.clip_high,
        use_ref_model=options.beta > 0,
        temperature=temperature,
        chunk_size=chunk_size,
        compiled=compiled,
        **{name: getattr(options, name) for name in LIGER_NAMES},
    )


def _save_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
