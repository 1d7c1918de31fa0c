"""What all sections share: the clock, the floors, the shapes of models, and the rows of the result."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from hybrid_rl.config import PolicyConfig, Precision
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Rollout

logging.set_verbosity_error()
logging.disable_progress_bar()
GIB = 2**30
# taken where the section `rates` has not measured: what one H200 gave, and the cores of a small CPU
LEADS = {"cuda": {"copy": 4.3e12, "product": 790e12, "host": 55e9}, "cpu": {"copy": 1e10, "product": 1e11, "host": 5e9}}
# layers, hidden, intermediate, heads, kv heads, head size, vocabulary
SHAPES = {
    "0.6B": (28, 1024, 3072, 16, 8, 128, 151_936),
    "4B, 4 layers": (4, 2560, 9728, 32, 8, 128, 151_936),
    "tiny": (2, 64, 128, 4, 2, 16, 512),
}


@dataclass
class Bench:
    """A section's device and size, where its rows go, and the rates that were measured before it."""

    device: torch.device
    small: bool
    file: IO[str]
    rates_file: Path
    _rates: dict[str, float] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def row(self, what: str, value: float, unit: str, predicted: float | None = None, note: str = "") -> None:
        """Write one number of the result."""
        row = {"what": what, "value": value, "unit": unit, "predicted": predicted, "note": note}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def rate(self, name: str) -> float:
        """Return bytes/s of a copy on the device (read and written) or between host and device, or operations/s of a product."""
        if not self._rates:
            self._rates = dict(LEADS[self.device.type])
            if self.rates_file.is_file():
                found = json.loads(self.rates_file.read_text())
                for section in found["sections"].values() if found.get("device") == self.device.type else ():
                    units = {row["what"]: row["value"] for row in section["rows"]}
                    for key, what, scale in (
                        ("copy", "device copy", 1e9),
                        ("product", "product", 1e12),
                        ("host", "pinned to device", 1e9),
                    ):
                        self._rates[key] = units.get(what, self._rates[key] / scale) * scale
        return self._rates[name]

    def seconds(self, function: Callable[[], object], repeats: int = 5, warm: int = 2) -> float:
        """Return the median seconds of a call, the device's work included."""
        times = []
        for i in range(warm + repeats if not self.small else 2):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            if i >= warm or self.small:
                times.append(time.perf_counter() - start)
        return median(times)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def peak(self, function: Callable[[], object]) -> tuple[float, float]:
        """Return the GiB that torch had allocated and reserved at most during a call; zeros on the CPU."""
        if not self.on_gpu:
            function()
            return 0.0, 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) / GIB, torch.cuda.max_memory_reserved(self.device) / GIB

    def model(self, shape: str) -> Path:
        """Write a random model of the shape in bfloat16, with a tokenizer, and return its folder, which ends with the section."""
        self._folder = self._folder or tempfile.TemporaryDirectory()
        folder = Path(self._folder.name) / shape.replace(" ", "_").replace(",", "")
        if not folder.exists():
            layers, hidden, inner, heads, kv_heads, head_dim, vocabulary = SHAPES["tiny" if self.small else shape]
            config = Qwen3Config(
                num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary, tie_word_embeddings=True,
                max_position_embeddings=40_960, bos_token_id=None, eos_token_id=0,
            )  # fmt: skip
            with self.device:
                model = Qwen3ForCausalLM(config)
            model.to("cpu", torch.bfloat16).save_pretrained(folder)
            tiny.character_tokenizer([]).save_pretrained(folder)
        return folder

    def policy(self, shape: str, **settings: Any) -> Policy:
        """Return a random policy of the shape in bfloat16."""
        chosen = PolicyConfig(**{"dtype": Precision.bfloat16, **settings})
        return Policy.load(self.model(shape), self.device, chosen)


def group(prompt: int, sampled: int, count: int, vocabulary: int, number: int = 0) -> list[Rollout]:
    """Return `count` rollouts with one random prompt and random completions of `sampled` tokens."""
    generator = torch.Generator().manual_seed(number)
    draw = lambda n: torch.randint(3, vocabulary, (n,), generator=generator).tolist()  # noqa: E731
    ids, made = draw(prompt), []
    for index in range(count):
        made.append(Rollout(f"t{number}", number, index, index, list(ids)))
        made[-1].add_sampled(draw(sampled), [-5.0] * sampled, [(0, sampled)])
    return made


def matrices(policy: Policy) -> tuple[int, int]:
    """Return the parameters of the layers' matrices, and those of the head."""
    text = policy.config.get_text_config()
    return policy.parameter_count() - text.vocab_size * text.hidden_size, text.vocab_size * text.hidden_size


def attention_work(policy: Policy, lengths: list[int]) -> float:
    """Return the operations of causal attention in a forward pass: two products over half a square, in each head and layer."""
    text = policy.config.get_text_config()
    return 2.0 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * sum(n * n for n in lengths)
