"""Loading: any transformers causal LM, quantised if asked, and the policy it is trained as."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import LoraConfig, ModelConfig
from .errors import UserError, first_line, require
from .forward import causal_lm, eos_ids, head_of
from .lora import TRAINED, attach_lora, is_adapter, load_adapter
from .prompts import end_of_turn
from .reference import check_reference
from .support import check_model

# transformers would put the adapter on the model without a word.
BOTH = (
    "{} holds a model and an adapter (adapter_config.json): move the adapter into a folder of its "
    "own, and give that as lora.adapter if it is to be trained on"
)
ReferenceScope = Callable[[], AbstractContextManager[nn.Module]]


@dataclass
class Policy:
    """The model that is trained, with what belongs to it."""

    model: nn.Module
    """a peft model, or the causal LM itself when all weights train"""
    tokenizer: Any
    device: torch.device
    reference: ReferenceScope | None
    """within this context the yielded model computes the reference; None: no reference"""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that train, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """The adapter, or the model, and its tokenizer, as safetensors that other tools load."""
        if is_adapter(self.model):
            self.model.save_pretrained(
                str(folder), selected_adapters=[TRAINED], save_embedding_layers=False
            )
        else:
            self.model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))
        self._save_ends(folder)

    def _save_ends(self, folder: Path) -> None:
        """The generation config, with all that ended a sample in training."""
        generation = copy.deepcopy(causal_lm(self.model).generation_config)
        ends = eos_ids(self.model, self.tokenizer) | end_of_turn(self.tokenizer)
        generation.eos_token_id = sorted(ends) or None
        # save_pretrained refuses what many a published config holds, once it was changed.
        generation.to_json_file(folder / "generation_config.json")


def load_policy(
    config: ModelConfig, lora: LoraConfig | None, *, needs_reference: bool, resume: Path | None
) -> Policy:
    """Model, tokenizer, LoRA and reference; weights from the folder `resume` where it is given."""
    device = pick_device(config.device)
    weights = resume or (Path(lora.adapter) if lora and lora.adapter else None)
    tokenizer = load_tokenizer(config, weights)
    all_weights_from = str(resume) if resume is not None and lora is None else config.path
    base = load_causal_lm(config, all_weights_from, device)
    model = base if lora is None else attach_lora(base, config, lora, weights)
    reference = None
    if needs_reference:
        reference = _reference(model, config, lora, device, resume)
    policy = Policy(model, tokenizer, device, reference)
    if reference is not None:
        check_reference(policy.trainable().items(), reference)
    return policy


def pick_device(name: str) -> torch.device:
    """The torch device of `auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    try:
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device {name!r} is no torch device") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device must be cpu or cuda; given {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device is {name}, but torch finds no CUDA device")
    return device


def load_tokenizer(config: ModelConfig, weights: Path | None = None) -> Any:
    """The tokenizer beside the trained weights, if there is one, or that of the model.

    Raises UserError if a token of the model's has another id in it.
    """
    source = _checked_source(config.path)
    tokenizer = _tokenizer_of(config, source)
    if weights is None or not (weights / "tokenizer_config.json").is_file():
        return tokenizer
    own = _tokenizer_of(config, str(weights))
    vocab = own.get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if vocab.get(token) != number:
            raise UserError(
                f"the tokenizer in {weights} has the id {vocab.get(token)} for {token!r}, and that "
                f"of {config.path} has {number}: remove its files there to use the model's"
            )
    return own


def _tokenizer_of(config: ModelConfig, source: str) -> Any:
    transformers = require("transformers", "train", "loading a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # of any type, by what is missing or damaged
        if not Path(source).exists():
            raise UserError(
                f"{config.path} is no folder here, and the hub gave no tokenizer of that name: "
                f"{first_line(error)}"
            ) from error
        raise UserError(
            f"no tokenizer in {source}: put the model's tokenizer files beside its config.json"
            f" ({first_line(error)})"
        ) from error


def load_causal_lm(config: ModelConfig, path: str, device: torch.device) -> nn.Module:
    """The causal LM in `path`, on `device`, quantised if the config says so.

    Raises UserError if it can't be loaded whole: a weight that is missing is not made up.
    """
    transformers = require("transformers", "train", "loading a model")
    source = _checked_source(path)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "use_safetensors": True}
    if config.base != "none":
        options["quantization_config"] = _quantization(config)
    if config.base != "none" or device.type == "meta":
        options["device_map"] = {"": str(device)}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else they are refused without their names
            **options,
        )
    except Exception as error:  # of any type, by what is missing or damaged
        raise UserError(f"can't load a causal LM from {path}: {first_line(error)}") from error
    if getattr(model, "peft_config", None):  # of the hub
        raise UserError(BOTH.format(path))
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{path} lacks {len(missing)} weights of its model, {missing[0]} for one")
    if mismatched := sorted(info["mismatched_keys"]):
        name, there, wanted = mismatched[0]
        raise UserError(f"{path} has {name} as {list(there)}; its config.json says {list(wanted)}")
    if config.base == "4bit" and device.type == "cpu":
        _keep_4bit_layout(model)
    _switch_dropout_off(model)
    return model if config.base != "none" else model.to(device)


def _checked_source(path: str) -> str:
    """The folder, its ~ expanded and its files looked at, or the hub id as it is."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not folder.exists():
        if looks_local:
            raise UserError(f"no such model folder: {path} (a hub id is OWNER/NAME)")
        return path  # a hub id
    adapter = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file():
        hint = ": it is an adapter: give its base here, and itself as lora.adapter"
        raise UserError(
            f"{path} has no config.json"
            + (hint if adapter else ": it is no folder of a transformers model")
        )
    if adapter:
        raise UserError(BOTH.format(path))
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{path} holds no *.safetensors: other formats are not loaded; convert it with "
            "save_pretrained of transformers"
        )
    return str(folder)


def _switch_dropout_off(model: nn.Module) -> None:
    """Dropout in the training forward alone would be noise in the ratio to the sampler."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _keep_4bit_layout(model: nn.Module) -> None:
    """Stops bitsandbytes from repacking 4-bit weights in eval mode on some CPUs.

    Its backward reads repacked weights as if they were not, so that a model which has sampled
    would get wrong gradients (bitsandbytes 0.50).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _quantization(config: ModelConfig) -> Any:
    require("bitsandbytes", "quant", f"model.base {config.base}")
    from transformers import BitsAndBytesConfig

    if config.base == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )


def _reference(
    model: nn.Module,
    config: ModelConfig,
    lora: LoraConfig | None,
    device: torch.device,
    resume: Path | None,
) -> ReferenceScope:
    if config.reference is not None:
        frozen = load_causal_lm(config, config.reference, device)
        check_model(frozen)
        ours, theirs = len(head_of(model).weight), len(head_of(frozen).weight)
        if ours != theirs:
            raise UserError(
                f"model.reference {config.reference} has {theirs} tokens and the model {ours}: "
                "it needs the same tokenizer"
            )
        return _frozen(frozen)
    if lora is None:
        if resume is not None:  # the weights in hand have moved on since
            return _frozen(load_causal_lm(config, config.path, device))
        return _frozen(copy.deepcopy(model))
    if lora.adapter is None:
        return _adapter_off(model)
    return _as_given(model, Path(lora.adapter), resume)


def _frozen(model: nn.Module) -> ReferenceScope:
    model.requires_grad_(False).eval()

    @contextmanager
    def scope() -> Iterator[nn.Module]:
        yield model

    return scope


def _adapter_off(model: nn.Module) -> ReferenceScope:
    @contextmanager
    def scope() -> Iterator[nn.Module]:
        with model.disable_adapter():
            yield model

    return scope


def _as_given(model: nn.Module, adapter: Path, resume: Path | None) -> ReferenceScope:
    """The model with the adapter that training began with: whatever of it trains is exchanged, be
    it outside of the adapter's own layers, as biases are."""
    if resume is not None:
        load_adapter(model, adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p.detach().clone() for p in trained]
    if resume is not None:
        load_adapter(model, resume)

    def exchange() -> None:
        for i, parameter in enumerate(trained):
            parameter.data, others[i] = others[i], parameter.data

    @contextmanager
    def scope() -> Iterator[nn.Module]:
        exchange()
        try:
            yield model
        finally:
            exchange()

    return scope
