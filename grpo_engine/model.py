"""Loading: any transformers causal LM, quantised if asked, with LoRA and a reference policy."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import LoraConfig, ModelConfig
from .errors import UserError, require
from .forward import check_model, head_of

TRAINED, REFERENCE = "default", "reference"  # names of adapters; peft saves "default" unprefixed

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


def load_policy(
    config: ModelConfig, lora: LoraConfig | None, *, needs_reference: bool, resume: Path | None
) -> Policy:
    """Model, tokenizer, LoRA and reference; weights from the folder `resume` where it is given."""
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config)
    all_weights_from = str(resume) if resume is not None and lora is None else config.path
    base = load_causal_lm(config, all_weights_from, device)
    check_model(base)
    model = base if lora is None else _attach_lora(base, config, lora, resume, needs_reference)
    reference = None
    if needs_reference:
        reference = _reference(model, config, lora, device, resumed=resume is not None)
    return Policy(model, tokenizer, device, reference)


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


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the model's folder."""
    transformers = require("transformers", "train", "loading a tokenizer")
    source = _checked_source(config.path)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # of any type, by what is missing or damaged
        raise UserError(
            f"no tokenizer in {config.path}: put the model's tokenizer files beside its config.json"
            f" ({_first_line(error)})"
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
        options["device_map"] = {"": str(device)}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of any type, by what is missing or damaged
        raise UserError(f"can't load a causal LM from {path}: {_first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{path} lacks {len(missing)} weights of its model, {missing[0]} for one")
    if config.base == "4bit" and device.type == "cpu":
        _keep_4bit_layout(model)
    _switch_dropout_off(model)
    return model if config.base != "none" else model.to(device)


def is_adapter(model: nn.Module) -> bool:
    """Whether `model` is a peft model."""
    return hasattr(model, "peft_config")


def load_adapter(model: nn.Module, folder: Path, name: str) -> None:
    """Loads the adapter weights of `folder` into the adapter `name` of a peft model.

    Raises UserError unless every key lands and every parameter of the adapter gets one: keys that
    don't match would leave the base model without its adapter and say nothing.
    """
    peft = require("peft", "train", "loading an adapter")
    load_file = require("safetensors.torch", "train", "loading an adapter").load_file
    from safetensors import SafetensorError

    try:
        state = load_file(_adapter_file(folder))
    except (OSError, SafetensorError) as error:
        raise UserError(f"the adapter in {folder} is damaged: {error}") from error
    wanted = set(peft.get_peft_model_state_dict(model, adapter_name=name))
    if missing := sorted(wanted ^ set(state)):
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {len(missing)} keys have no "
            f"counterpart, {missing[0]} for one; was it made for another model?"
        )
    try:
        peft.set_peft_model_state_dict(model, state, adapter_name=name)
    except RuntimeError as error:  # the sizes differ
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {_first_line(error)}"
        ) from error


def _checked_source(path: str) -> str:
    """The folder, its ~ expanded and its files looked at, or the hub id as it is."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not folder.exists():
        if looks_local:
            raise UserError(f"no such model folder: {path}")
        return path  # a hub id
    if not (folder / "config.json").is_file():
        raise UserError(f"{path} has no config.json: it is no folder of a transformers model")
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


def _attach_lora(
    base: nn.Module,
    config: ModelConfig,
    lora: LoraConfig,
    resume: Path | None,
    needs_reference: bool,
) -> nn.Module:
    peft = require("peft", "train", "LoRA")
    base.requires_grad_(False)
    if lora.adapter is None:
        targets = _named_targets(base, lora.targets)
        adapter = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets,
            lora_dropout=lora.dropout,
            task_type="CAUSAL_LM",
        )
    else:
        _adapter_file(Path(lora.adapter))
        adapter = _adapter_config(lora.adapter)
        adapter.inference_mode = False
        adapter.lora_dropout = lora.dropout
    adapter.base_model_name_or_path = config.path
    try:
        model = peft.get_peft_model(base, adapter, adapter_name=TRAINED)
    except ValueError as error:
        raise UserError(f"lora.targets don't fit the model: {_first_line(error)}") from error
    head_of(model)  # refuses an adapter on the head
    if start := resume or (lora.adapter and Path(lora.adapter)):
        load_adapter(model, start, TRAINED)
    if lora.adapter is not None and needs_reference and config.reference is None:
        frozen = copy.deepcopy(adapter)
        frozen.inference_mode = True
        model.add_adapter(REFERENCE, frozen)
        load_adapter(model, Path(lora.adapter), REFERENCE)
        model.set_adapter(TRAINED)
    return model


def _named_targets(base: nn.Module, targets: str | list[str]) -> str | list[str]:
    """The targets as peft takes them; UserError for a name that no module has."""
    if targets == "all-linear":
        return targets
    targets = [targets] if isinstance(targets, str) else targets
    names = [name for name, _ in base.named_modules()]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise UserError(f"lora.targets: the model has no module {target}")
    return targets


def _adapter_config(folder: str) -> Any:
    peft = require("peft", "train", "LoRA")
    try:
        adapter = peft.PeftConfig.from_pretrained(folder)
    except Exception as error:
        raise UserError(f"{folder} has no readable adapter_config.json: {error!r}") from error
    if adapter.peft_type != peft.PeftType.LORA:
        raise UserError(f"{folder} is a {adapter.peft_type.value} adapter; only LoRA can train on")
    return adapter


def _adapter_file(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    if not file.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} is no adapter: it needs adapter_config.json and adapter_model.safetensors"
        )
    return file


def _reference(
    model: nn.Module,
    config: ModelConfig,
    lora: LoraConfig | None,
    device: torch.device,
    *,
    resumed: bool,
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
        if resumed:  # the weights in hand have moved on since
            return _frozen(load_causal_lm(config, config.path, device))
        return _frozen(copy.deepcopy(model))
    return _second_adapter(model) if lora.adapter is not None else _adapter_off(model)


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


def _second_adapter(model: nn.Module) -> ReferenceScope:
    @contextmanager
    def scope() -> Iterator[nn.Module]:
        model.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield model
        finally:
            model.set_adapter(TRAINED)

    return scope


def _first_line(error: Exception) -> str:
    """Its first line, or where that only announces one, the line with the sizes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sizes = [line for line in lines if "size mismatch" in line or "MISMATCH" in line]
    return (sizes or lines or [type(error).__name__])[0]
