"""A finished run as something that can be used: its policy in memory, or a folder of weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .config import ModelConfig, RunConfig
from .disk import write_folder
from .errors import UserError
from .forward import causal_lm
from .model import Policy, load_causal_lm, load_policy
from .parsing import load_run
from .resume import probe

PROBED = "A farmer has 17 sheep. All but 9 run away, so she buys 4 more. How many are there now?"
# Of the log-probs of PROBED, in the mean: merged weights are rounded once more than those of an
# adapter beside its base, and a model merged wrongly is off by whole nats.
MERGE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


def open_run(
    run: Path, step: int | None = None, *, trust_remote_code: bool = False
) -> tuple[RunConfig, Policy]:
    """The config and the trained policy of a run, or of its checkpoint at `step`.

    trust_remote_code: whether code that the model brings may run, whatever the run's config says.
    """
    config, weights = _weights(run, step, trust_remote_code)
    return config, _load(run, config, weights)


def export_run(
    run: Path, out: Path, step: int | None, merge: bool, *, trust_remote_code: bool = False
) -> float | None:
    """Copies the weights of a run to `out`, or merges its adapter into a copy of the base model in
    full precision; returns by how many nats the log-probs of a text differ then, in the mean.

    Raises UserError if `out` exists, or the merged model is another one than the policy.
    """
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    config, weights = _weights(run, step, trust_remote_code or not merge)
    if not merge or config.lora is None:
        write_folder(out, lambda folder: shutil.copytree(weights, folder, dirs_exist_ok=True))
        return None
    config = replace(config, model=replace(config.model, base="none"))
    return merge_policy(_load(run, config, weights), config.model, out)


def _load(run: Path, config: RunConfig, weights: Path) -> Policy:
    path = Path(config.model.path)
    if path.is_absolute() and not path.exists():
        raise UserError(
            f"the model that {run} was trained from is gone: {path}; put it back, or write where "
            f"it is as model.path into {run / 'config.yaml'}"
        )
    return load_policy(config.model, config.lora, needs_reference=False, resume=weights)


def merge_policy(policy: Policy, config: ModelConfig, out: Path) -> float:
    """Writes the policy with its adapter merged, which it has no longer afterwards, to `out`."""
    ids = policy.tokenizer(PROBED)["input_ids"]
    wanted = torch.tensor(probe(policy.model, ids))
    merged = Policy(_merged(policy.model), policy.tokenizer, policy.device, reference=None)
    gap = float("nan")

    def write(folder: Path) -> None:
        nonlocal gap
        merged.save(folder)
        loaded = load_causal_lm(config, str(folder), policy.device)
        gap = float((torch.tensor(probe(loaded, ids)) - wanted).abs().mean())
        if not gap <= MERGE_TOLERANCE[config.dtype]:
            raise UserError(
                f"the merged model differs from the policy by {gap:.3g} nats on the tokens of a "
                "text: nothing is written; export without --merge and load the adapter on its base"
            )

    write_folder(out, write)
    return gap


def _merged(model: nn.Module) -> nn.Module:
    """The base model with the adapter merged, its head untied where embeddings alone changed."""
    base = causal_lm(model)
    configs = base.config, base.config.get_text_config()
    head = base.get_output_embeddings()
    if not (configs[1].tie_word_embeddings and isinstance(head, nn.Linear)):
        return model.merge_and_unload()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in configs:
        config.tie_word_embeddings = False
    merged = model.merge_and_unload()
    head, embeddings = merged.get_output_embeddings(), merged.get_input_embeddings()
    if torch.equal(head.weight, embeddings.weight):
        head.weight = embeddings.weight
        for config in configs:
            config.tie_word_embeddings = True
    return merged


def run_config(run: Path, *, trust_remote_code: bool = False) -> RunConfig:
    """The config of a run folder; UserError if it is none, or if its model has code of its own and
    that is not trusted here: what the folder itself says of it is no reason."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no config.yaml")
    config = load_run(run / "config.yaml")
    if config.model.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"the model of {run} ({config.model.path}) comes with code of its own, which would run "
            "here; if you trust it, say so: --trust-remote-code"
        )
    return replace(config, model=replace(config.model, trust_remote_code=trust_remote_code))


def _weights(run: Path, step: int | None, trusted: bool) -> tuple[RunConfig, Path]:
    config = run_config(run, trust_remote_code=trusted)
    name = config.weights_name
    folder = run / name if step is None else run / "checkpoints" / f"step-{step:06d}" / name
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; a run writes it at its end, checkpoints before")
    return config, folder
