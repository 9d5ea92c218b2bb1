"""The step suite compares alike: TRL's loop samples, weighs and steps with the settings of ours."""

import math
from dataclasses import asdict

import pytest
import torch
import trl
from safetensors.torch import load_file

from grpo_engine import trainer
from grpo_engine.benchmarks import loops, step_suite
from grpo_engine.benchmarks.peers import TRL_NAMES

CPU = torch.device("cpu")
SMALL = step_suite.SHAPES["small"]


class Pace:
    def __init__(self) -> None:
        self.told: list[tuple[float, bool]] = []

    def before_step(self) -> None:
        pass

    def after_step(self, tokens: float, *finite: float) -> None:
        self.told.append((tokens, all(map(math.isfinite, finite))))


@pytest.fixture(scope="module")
def both() -> dict:
    """Both trainers after a step, what TRL sampled, and the weights from before."""
    made: dict[str, object] = {}

    class Theirs(trl.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made["theirs"] = self

        def _generate_and_score_completions(self, inputs):
            made["batch"] = super()._generate_and_score_completions(inputs)
            return made["batch"]

    class Ours(trainer.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made["ours"] = self

    problem = step_suite.Problem(SMALL, CPU)
    run = {"folder": str(problem.folder), "shape": asdict(SMALL), "steps": 1, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", Theirs)
        patch.setattr(trainer, "Trainer", Ours)
        for loop in (loops.trl, loops.ours):
            pace = Pace()
            loop(run, pace)
            assert pace.told == [(2 * 4 * 6, True)]
    made["before"] = load_file(problem.folder / "model" / "model.safetensors")
    return made


def test_trl_samples_as_many_tokens_of_the_same_distribution(both):
    args, config = both["theirs"].args, both["ours"].config
    batch = both["batch"]
    assert batch["completion_mask"].shape == (8, 6) and batch["completion_mask"].all()
    assert batch["prompt_mask"].shape == (8, 16) and batch["prompt_mask"].all()
    assert len({tuple(row) for row in batch["prompt_ids"].tolist()}) == 2
    sampling = config.sampling
    assert (args.temperature, args.top_p, args.top_k, args.min_p or 0.0) == (
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
    )  # fmt: skip
    assert (args.num_generations, args.max_completion_length) == (4, 6)
    assert (sampling.group_size, sampling.max_tokens) == (4, 6)


def test_both_have_the_same_loss_and_number_of_updates(both):
    args, config = both["theirs"].args, both["ours"].config
    for name in TRL_NAMES:
        assert getattr(args, name) == getattr(config.loss, name), name
    assert args.num_iterations == config.train.num_iterations == 1
    assert args.gradient_accumulation_steps == args.steps_per_generation == 1
    assert both["theirs"].ref_model is None and config.loss.beta == 0
    assert not args.mask_truncated_completions and config.groups.truncated == "keep"
    assert not args.gradient_checkpointing and not config.train.gradient_checkpointing


def test_both_step_all_float32_weights_by_the_same_adamw(both):
    theirs = both["theirs"].optimizer
    theirs = getattr(theirs, "optimizer", theirs)  # as accelerate wraps it
    ours = both["ours"].optimizer.inner
    assert isinstance(theirs, torch.optim.AdamW) and isinstance(ours, torch.optim.AdamW)
    for group in theirs.param_groups:
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert group[name] == ours.param_groups[0][name], name
    assert both["theirs"].args.max_grad_norm == both["ours"].config.train.max_grad_norm
    named = dict(both["theirs"].model.named_parameters())
    assert both["ours"].optimizer.parameters.keys() == named.keys()
    for name, parameter in named.items():
        assert parameter.dtype == torch.float32
        moved = (parameter.detach().double() - both["before"][name].double()).abs().max()
        assert 0.9e-6 < float(moved) < 1.2e-6, name
