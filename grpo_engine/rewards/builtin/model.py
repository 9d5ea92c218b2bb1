"""The reward of a reward model: any sequence classifier in the transformers format."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from ...errors import UserError, first_line, require
from .options import require_choice, require_int, require_option, text_of

Dtype = Literal["float32", "bfloat16", "float16"]


def reward_model(
    prompts: list,
    completions: list,
    *,
    path: str,
    label: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    dtype: Dtype = "float32",
) -> list[float | None]:
    """The logit that a sequence classifier gives to prompt and completion.

    Chat prompts go through the chat template of the classifier's tokenizer, with the completion as
    the assistant's message; strings are joined as they are. A text that is longer than the model's
    context gives None.

    path: a folder in the transformers format, with the tokenizer; loaded once.
    label: which logit; needed if the model has more than one.
    batch_size: texts of a forward, padded at the right; always 1 without a pad token in the config.
    device: auto is cuda where there is one, else cpu.
    """
    require_int("reward_model", "batch_size", batch_size, 1)
    require_choice("reward_model", "dtype", dtype, get_args(Dtype))
    if label is not None:
        require_int("reward_model", "label", label, 0)
    folder = Path(str(path)).expanduser()
    ok = (folder / "config.json").is_file()
    require_option("reward_model", "path", str(path), ok, "a folder with a config.json")
    if not completions:
        return []
    model, tokenizer = _loaded(str(folder), device, dtype)
    column = _column(model.config.num_labels, label)
    texts = [
        _ids(tokenizer, p, text_of(c), path) for p, c in zip(prompts, completions, strict=True)
    ]
    room = getattr(model.config, "max_position_embeddings", None)
    fits = [i for i, ids in enumerate(texts) if room is None or len(ids) <= room]
    fits.sort(key=lambda i: len(texts[i]))  # less padding
    size = 1 if model.config.pad_token_id is None else batch_size
    results: list[float | None] = [None] * len(texts)
    for first in range(0, len(fits), size):
        batch = fits[first : first + size]
        logits = _logits(model, [texts[i] for i in batch])
        for i, value in zip(batch, logits[:, column].tolist(), strict=True):
            results[i] = value
    return results


@lru_cache(maxsize=4)
def _loaded(folder: str, device: str, dtype: str) -> tuple[Any, Any]:
    transformers = require("transformers", "train", "the reward reward_model")
    torch = require("torch", "train", "the reward reward_model")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, trust_remote_code=False
        )
        if report["missing_keys"]:
            raise ValueError(
                f"it lacks the weights {', '.join(sorted(report['missing_keys'])[:3])}, so it is "
                "no trained sequence classifier; give the folder of one"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return model.to(device).eval(), tokenizer
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"rewards: reward_model: can't load {folder}: {first_line(error)}"
        ) from error


def _column(labels: int, label: int | None) -> int:
    if label is None:
        ok = labels == 1
        require_option("reward_model", "label", label, ok, f"one of 0 to {labels - 1}")
        return 0
    require_option("reward_model", "label", label, label < labels, f"below the model's {labels}")
    return label


def _ids(tokenizer: Any, prompt: str | list[dict], text: str, path: str) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt + text)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError(
            f"rewards: reward_model: the prompts are chats and the tokenizer of {path} has no chat "
            "template; give one that has, or string prompts"
        )
    messages = [*prompt, {"role": "assistant", "content": text}]
    # Not rendered first and encoded then: that would double the BOS.
    return list(
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    )


def _logits(model: Any, texts: list[list[int]]) -> Any:
    """[texts, labels] float32."""
    torch = require("torch", "train", "the reward reward_model")
    longest = max(len(ids) for ids in texts)
    pad = model.config.pad_token_id or 0
    rows = [ids + [pad] * (longest - len(ids)) for ids in texts]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts]
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
        )
    return output.logits.float()
