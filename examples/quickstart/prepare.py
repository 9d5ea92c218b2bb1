"""Makes the quickstart's starting point: a tiny decoder that adds 2-digit numbers badly.

A Llama of about a million parameters with random weights and a tokenizer of single characters,
trained for a few seconds on written-out sums, and stopped while it is clearly imperfect. What GRPO
makes of it is then up to `grpo train`. Nothing is downloaded.
"""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_engine.data import load_tasks

PAD, EOS = "<pad>", "<eos>"
BATCH, LR = 256, 2e-3
CHECK_EVERY, MOST_STEPS = 10, 400
ENOUGH = 0.4  # share of right answers at which the cold start ends


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: digits, + and =."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """About a million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def cold_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Supervised steps on written-out sums until ENOUGH of a batch of them come out right.

    The loss is on the answers alone. Returns the share of right answers at the end.
    """
    tasks = load_tasks("builtin:arithmetic", "prompt")
    texts = [f"{task.prompt}{task.columns['answer']}{EOS}" for task in tasks]
    ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    labels[:, : len(tasks[0].prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(1, MOST_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 20)
        rows = torch.randint(len(ids), (BATCH,))
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CHECK_EVERY == 0:
            right = share_right(model, ids[rows], labels[rows])
            if right >= ENOUGH:
                break
    return right


@torch.no_grad()
def share_right(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose whole answer is the most likely one, token by token."""
    guess = model(input_ids=ids).logits[:, :-1].argmax(-1)
    wrong = (guess != labels[:, 1:]) & (labels[:, 1:] != -100)
    return float((~wrong.any(1)).float().mean())


def main() -> None:
    """Writes the model folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    started = time.monotonic()
    right = cold_start(model, tokenizer)
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    count = sum(p.numel() for p in model.parameters())
    seconds = time.monotonic() - started
    print(f"cold start: {count:,} parameters, {seconds:.0f} s, {right:.0%} right -> {given.out}")


if __name__ == "__main__":
    main()
