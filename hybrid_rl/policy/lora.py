"""LoRA adapters (peft): a frozen matrix W and a trained product, W + (α / r) · B A."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.config import LoraConfig
from hybrid_rl.policy.sharding import Gathering, local

NAME = "default"


def inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the matrices that config.targets names and freeze everything else; nothing where rank is 0.

    Raises ValueError where no module is matched.
    """
    if not config.rank:
        return
    import peft  # only here: a run without adapters need not have it

    targets: str | list[str] = config.targets[0] if config.targets == ["all-linear"] else list(config.targets)
    model.add_adapter(peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def merged(parameters: dict[str, nn.Parameter], model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(plain name, parameter, this rank's rows of W + (α / r) · B A) of every weight that is not an adapter. Collective.

    B is sharded over the same rows as W, so only the small A has to be whole.
    """
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        rows = local(parameter)
        owner, _, attribute = name.rpartition(".")
        if owner.endswith(".base_layer") and attribute == "weight":
            layer = owner.removesuffix(".base_layer")
            first, second = (parameters[f"{layer}.lora_{part}.{NAME}.weight"] for part in "AB")
            (bucket,) = Gathering(torch.float32, 0, rows.device).buckets(iter([("A", first, local(first))]))
            adapter: Any = model.get_submodule(layer)
            with torch.no_grad():
                rows = rows + adapter.scaling[NAME] * (local(second) @ bucket["A"])
        yield name.replace(".base_layer.", "."), parameter, rows


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model as it was before any adapter."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True  # peft's public switch also changes what requires a gradient, and FSDP has wrapped that
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save(folder: str | Path, config: LoraConfig, adapters: dict[str, Tensor], base: str) -> None:
    """A folder that peft.PeftModel.from_pretrained reads."""
    import peft

    Path(folder).mkdir(parents=True, exist_ok=True)
    names = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in adapters.items()}
    save_file(names, Path(folder) / "adapter_model.safetensors")
    targets: str | list[str] = config.targets[0] if config.targets == ["all-linear"] else list(config.targets)
    saved = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, base_model_name_or_path=base, task_type="CAUSAL_LM"
    )
    saved.save_pretrained(str(folder))
