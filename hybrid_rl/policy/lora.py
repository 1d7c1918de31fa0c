"""LoRA adapters (peft): a frozen matrix W and a trained product, W + (α / r) · B A."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.config import LoraConfig
from hybrid_rl.policy.sharding import Gathering, local

NAME = "default"


def inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the matrices that config.targets names and freeze everything else; nothing if rank is 0.

    Raises ValueError for a target that names no matrix.
    """
    if not config.rank:
        return
    import peft  # only here: a run without adapters need not have it

    names = _matrices(model, config.targets)
    wanted = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names, task_type="CAUSAL_LM")
    # model.add_adapter would insist on a newer peft than it needs
    peft.inject_adapter_in_model(wanted, model, NAME)
    adapted = {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if name.endswith(".base_layer")
    }
    if adapted.keys() != set(names) or not all(isinstance(module, nn.Linear) for module in adapted.values()):
        differ = sorted(adapted.keys() ^ set(names))
        raise ValueError(
            f"policy.lora.targets: peft puts adapters elsewhere than on {type(model).__name__}'s linear modules: "
            f"{differ[:3]}"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def _matrices(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Return the full names of the linear modules that the targets name: by a module's name or its end, as in peft.

    The head is left out, since it may be the embedding. Experts that are fused into one parameter are no modules, and
    are left out too, as are modules whose name peft takes for an expert's (a dense or shared MLP beside experts): peft
    could not read such an adapter again.
    """
    head, experts = model.get_output_embeddings(), _expert_names(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    free = [name for name in linear if name.rpartition(".")[2] not in experts]
    kind = type(model).__name__
    if list(targets) == ["all-linear"]:
        if not free:
            raise ValueError(
                f"policy.lora: {kind} has no linear module below its head that can have an adapter; "
                "set policy.lora.rank=0"
            )
        return free
    found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    for target, names in found.items():
        if not names:
            known = {name.rpartition(".")[2] for name in linear}
            near = ", ".join(difflib.get_close_matches(target.rpartition(".")[2], sorted(known), 3, 0.0))
            raise ValueError(
                f"policy.lora.targets: {target} names no linear module of {kind} below its head; the nearest are {near}"
            )
        if taken := [name for name in names if name not in free]:
            raise ValueError(
                f"policy.lora.targets: {target} names {taken[0]}, and peft takes {taken[0].rpartition('.')[2]} "
                f"in {kind} for its fused experts, which get no adapters; leave it out"
            )
    return [name for name in linear if any(name in names for names in found.values())]


def _expert_names(model: PreTrainedModel) -> set[str]:
    """Return the names of modules that peft takes for parts of fused experts in this type of model."""
    try:
        from peft.utils import transformers_weight_conversion as known
    except ImportError:  # an older peft takes every name as it is
        return set()
    family = getattr(known, "_MODEL_TO_CONVERSION_PATTERN", {}).get(model.config.model_type)
    return set(getattr(known, "_MOE_TARGET_MODULE_MAPPING", {}).get(family, {}))


def is_adapter(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def merged(parameters: dict[str, nn.Parameter], model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (plain name, parameter, this rank's rows of W + (α / r) · B A) of every weight that is not an adapter.

    B is sharded over the same rows as W, so only the small A must be gathered. Collective.
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
    """Make the model compute without its adapters."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        # peft's public switch also changes requires_grad, which FSDP does not allow
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save(folder: str | Path, model: PreTrainedModel, adapters: dict[str, Tensor], base: str) -> None:
    """Write a folder that peft.PeftModel.from_pretrained reads."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in adapters.items()}
    save_file(names, Path(folder) / "adapter_model.safetensors")
    config = cast(Any, model).peft_config[NAME]
    config.base_model_name_or_path, config.target_modules = base, sorted(config.target_modules)
    config.save_pretrained(str(folder))
