"""What tests compare with: plain forwards of one sequence, and a model that follows a script."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SURE = 20.0  # logit of a scripted token, over logits near 0


def stock_logprobs(
    model: nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[len] float64: a completion's log-probs from the model's own forward of that row alone."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    logp = (logits / temperature).log_softmax(-1)
    return logp[torch.arange(len(completion)), torch.tensor(completion, dtype=torch.int64)]


def script_model(tokens: Sequence[int], vocab: int = 75) -> GPT2LMHeadModel:
    """A model that follows position p with tokens[p], whatever it has read, and then is full.

    Its embeddings are of positions alone and its block adds nothing, so after a prompt of one
    token its greedy completion is `tokens`.
    """
    positions = len(tokens) + 1
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=positions,
        n_layer=1,
        n_head=1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.transformer.ln_f.weight.fill_(1.0)
        for position, token in enumerate(tokens):
            model.lm_head.weight[token, position] = SURE / positions**0.5
    return model
