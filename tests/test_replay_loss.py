"""Old samples in the loss: the gradient by hand, and a changed reward on resume."""

from contextlib import contextmanager

import pytest
import torch

from conftest import make_model
from grpo_engine.curriculum.config import ReplayConfig
from grpo_engine.curriculum.replay import OldSample
from grpo_engine.errors import Interrupted
from grpo_engine.replay_loss import accumulate_replay
from grpo_engine.sample_config import RewardConfig
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, metrics_of, tiny_config

OLD = [
    OldSample(0, [5, 6, 7], [8, 9, 1], 0.7, 1.0, True, 3, "v"),
    OldSample(1, [5, 6], [20, 21, 22, 23, 1], 1.3, 1.0, True, 4, "v"),
]
TOKENS, WEIGHT = 8, 0.3


def token_logp(model, sample: OldSample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    chosen = torch.tensor(sample.completion_ids)[:, None]
    return (logits / sample.temperature).log_softmax(-1).gather(1, chosen)[:, 0]


def gradient(model) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return float((x - y).norm() / y.norm()) < 1e-5


@pytest.mark.parametrize("budget", [100, 8])
def test_cloning_raises_the_log_probs_of_old_samples(budget):
    model = make_model()
    loss = accumulate_replay(model, None, OLD, ReplayConfig("clone", weight=WEIGHT), budget)
    found = gradient(model)
    expected = -sum(token_logp(model, sample).sum() for sample in OLD) * WEIGHT / TOKENS
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert close(found, gradient(model))


@pytest.mark.parametrize("budget", [100, 8])
def test_kl_on_old_samples_holds_the_policy_to_the_reference(budget):
    model, other = make_model(), make_model(seed=1)

    @contextmanager
    def reference():
        yield other

    loss = accumulate_replay(model, reference, OLD, ReplayConfig("kl", weight=WEIGHT), budget)
    found = gradient(model)
    total = 0.0
    for sample in OLD:
        logp = token_logp(model, sample)
        x = token_logp(other, sample).detach() - logp
        total = total + (x.exp() - x - 1).sum()
    (total * WEIGHT / TOKENS).backward()
    assert loss == pytest.approx(total.item() * WEIGHT / TOKENS, rel=1e-4)
    assert close(found, gradient(model))
    assert all(p.grad is None for p in other.parameters())


def test_no_old_samples_no_gradient():
    model = make_model()
    assert accumulate_replay(model, None, [], ReplayConfig("clone"), 100) == 0.0
    assert all(p.grad is None for p in model.parameters())


def test_old_samples_are_scored_again_when_the_reward_changed(model_folder, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    config = tiny_config(
        model_folder,
        tmp_path,
        rewards=[RewardConfig(f"{path}:f")],
        replay={"mode": "clone", "share": 1.0, "steps": 2},
        train={"steps": 3},
    )
    trainer = StoppingTrainer(config)
    trainer.stop_after = 2
    with pytest.raises(Interrupted):
        trainer.run()
    assert metrics_of(config)[1]["replay_samples"] == 4  # the best of each of the 4 tasks
    # Now only answers with an "a" are right: of the 8 old tasks those that have one stay.
    path.write_text("def f(completions, **_):\n    return [float('a' in c) for c in completions]\n")
    resumed = Trainer(config, resume=True)
    generations = resumed.collector.state()["old"]["generations"]
    decode = resumed.policy.tokenizer.decode
    right = {
        old["task"]
        for generation in generations
        for old in generation
        if "a" in decode(old["completion_ids"], skip_special_tokens=True)
    }
    resumed.run()
    assert "the reward functions changed" in capsys.readouterr().out
    assert metrics_of(config)[2]["replay_samples"] == len(right) > 0
