"""A run on a quantised base is merged into the full-precision one."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import make_model, make_tokenizer
from grpo_engine.cli import main
from grpo_engine.config import LoraConfig
from grpo_engine.trainer import Trainer
from oracles import stock_logprobs
from runs import tiny_config

PROMPT, COMPLETION = list(range(3, 15)), list(range(30, 50))


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    return stock_logprobs(model.eval(), PROMPT, COMPLETION)


def stock(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("base", ["8bit", "4bit"])
def test_a_run_on_rounded_weights_is_merged_into_unrounded_ones(base, tmp_path, capsys):
    folder = tmp_path / "base"
    make_model(hidden_size=64).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    config = tiny_config(
        folder,
        tmp_path,
        lora=LoraConfig(rank=4),
        model={"base": base},
        train={"steps": 2, "lr": 0.02},
    )
    Trainer(config).run()
    run, out = Path(config.train.out), tmp_path / "merged"
    capsys.readouterr()
    assert main(["export", str(run), str(out), "--merge"]) == 0
    said = capsys.readouterr().out
    assert said.count(f"trained on {base} weights, and is merged into unrounded ones") == 1
    by_peft = peft.PeftModel.from_pretrained(stock(folder), str(run / "adapter"))
    merged = stock(out)
    assert not hasattr(merged.config, "quantization_config")
    wanted = logprobs(by_peft)
    torch.testing.assert_close(logprobs(merged), wanted, atol=3e-5, rtol=0)
    assert (wanted - logprobs(stock(folder))).abs().max() > 0.01
    linear = merged.model.layers[0].self_attn.q_proj.weight
    assert linear.dtype == torch.float32
