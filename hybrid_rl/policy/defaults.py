"""What suits a device if a setting leaves the choice open: dtype, layout, tokens of a row, logits held at a time.

Larger rows and larger chunks of logits keep a GPU busy and cost memory, so both follow from its size. On a CPU they
change little.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from hybrid_rl.attention.kernels import chosen_name
from hybrid_rl.config import Config, LayoutKind, PolicyConfig, Precision

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}
ROWS = (16384, 8192, 4096, 2048)  # tokens of a row; the last one also on a CPU
SHARE_OF_ROW, SHARE_OF_LOGITS = 1 / 4, 1 / 64  # of a GPU's memory: activations of a row, float32 logits held at a time
LEAST_LOGITS = 64 * 2**20  # numbers: 256 MiB of float32; also on a CPU


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    return DTYPES.get(precision, torch.bfloat16 if device.type == "cuda" else torch.float32)


def choose_layout(kind: LayoutKind, device: torch.device) -> str:
    """Return how samples lie in rows; `auto` is packed on a GPU and trees on the CPU."""
    if kind == LayoutKind.auto:
        return "packed" if device.type == "cuda" else "trees"
    return kind.value


def row_tokens(settings: PolicyConfig, model: PreTrainedConfig, device: torch.device, longest: int = 0) -> int:
    """Return policy.row_tokens, or for 0 the largest of ROWS whose activations take a quarter of the GPU's memory at most.

    A row then also holds the longest sample, of `longest` tokens.
    """
    if settings.row_tokens:
        return settings.row_tokens
    room = SHARE_OF_ROW * gpu_bytes(device)
    each = activation_bytes(settings, model, compute_dtype(settings.dtype, device))
    return max(longest, next((tokens for tokens in ROWS if tokens * each <= room), ROWS[-1]))


def activation_bytes(settings: PolicyConfig, model: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a token's activations take until its backward, by a rule of thumb.

    34 values for each layer and hidden unit; with activation checkpointing 1, and 34 of one layer.
    """
    text = model.get_text_config()
    kept, again = (1, 34) if settings.activation_checkpointing else (34, 0)
    return int((kept * text.num_hidden_layers + again) * text.hidden_size * dtype.itemsize)


def logit_elements(device: torch.device) -> int:
    """Return how many logits are held at a time: a 64th of a GPU's memory in float32, 256 MiB at least."""
    return max(LEAST_LOGITS, int(SHARE_OF_LOGITS * gpu_bytes(device)) // 4)


def gpu_bytes(device: torch.device) -> int:
    """Return the memory of the GPU in bytes; 0 for a CPU, or if there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def settled(config: Config, model: PreTrainedConfig, device: torch.device) -> Config:
    """Return the configuration with policy.row_tokens as it is for this model and device."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return replace(config, policy=replace(config.policy, row_tokens=row_tokens(config.policy, model, device, longest)))


def described(settings: PolicyConfig, device: torch.device) -> str:
    """Say what was chosen, for settings with their tokens of a row."""
    dtype = compute_dtype(settings.dtype, device)
    return (
        f"layout {choose_layout(settings.layout, device)} in rows of {settings.row_tokens:,} tokens, "
        f"attention {chosen_name(device, dtype)}, compute {str(dtype).removeprefix('torch.')}"
    )
