"""The policy: a causal LM of transformers whose parameters the `local` engine samples from and the trainer updates."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.attention import ATTENTION_NAME, Packed
from hybrid_rl.policy.logprobs import token_cross_entropy, token_logprobs
from hybrid_rl.types import PackedBatch

LOGIT_CHUNK_ELEMENTS = 64 * 2**20  # logits held at a time: 256 MiB of float32


class ModelError(ValueError):
    """A model folder that cannot be used, with what to do about it."""


class Policy:
    """Float32 parameters; compute in float32 on the CPU and bfloat16 on a GPU.

    `model` is the plain transformers module. Hidden states and head are separate so that logits can be made in chunks.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device):
        model.to(device)  # type: ignore[arg-type]
        self.model = model.train()
        self.tokenizer = tokenizer
        self.device = device
        self.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.head = model.get_output_embeddings()
        self.chunk = max(1, LOGIT_CHUNK_ELEMENTS // self.head.weight.shape[0])
        self._check_forward()

    @classmethod
    def load(cls, folder: str | Path, device: torch.device) -> Policy:
        """Read a Hugging Face folder. Raises ModelError naming the folder and what is wrong with it."""
        model: PreTrainedModel
        loaded: dict[str, set[str]]
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"model.path={folder} cannot be loaded: {reason}") from error
        if absent := sorted(loaded["missing_keys"]):  # transformers would go on with random numbers there
            raise ModelError(f"model.path={folder} has no weights for {', '.join(absent[:3])}{' …' if len(absent) > 3 else ''}")
        if tokenizer.chat_template is None:
            raise ModelError(f"model.path={folder}: the tokenizer has no chat template; add chat_template.jinja to the folder")
        return cls(model, tokenizer, device)

    def logprobs(self, row: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """log π and entropy, [M] float32, of the row's sampled tokens, at the sampling temperature."""
        with self.autocast():
            return token_logprobs(self._predicting(row), self.head, row.targets, temperature, self.chunk)

    def cross_entropy(self, row: PackedBatch, label_smoothing: float) -> Tensor:
        """Supervised loss, [M] float32, of the row's target tokens."""
        with self.autocast():
            return token_cross_entropy(self._predicting(row), self.head, row.targets, label_smoothing, self.chunk)

    def autocast(self) -> torch.autocast | nullcontext[None]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def end_ids(self) -> frozenset[int]:
        """Every token that ends a completion: the generation config's (one or several) and the tokenizer's."""
        configured = self.model.generation_config.eos_token_id
        ids = set(configured if isinstance(configured, list) else [configured])
        ids.add(self.tokenizer.eos_token_id)
        ids.discard(None)
        if not ids:
            raise ModelError(
                f"{self.model.config._name_or_path}: neither generation config nor tokenizer names an end token (eos_token_id)"
            )
        return frozenset(ids)

    def export(self, folder: str | Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config, generation config, tokenizer with chat template."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _predicting(self, row: PackedBatch) -> Tensor:
        """The hidden states, [M, d], that predict the row's sampled tokens."""
        return self._hidden(row.input_ids[None], row.position_ids[None], row.layout)[0, row.predict_at]

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, layout: object) -> Tensor:
        out = self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
        return out.last_hidden_state

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Two samples of a row must not see each other, and the head applied to hidden states must be the model's own logits."""
        layers = getattr(self.model.config, "layer_types", None) or []
        if any(kind != "full_attention" for kind in layers):
            raise ModelError(f"{self.model.config._name_or_path}: layers {sorted(set(layers))}; only full attention is supported")
        ids, positions = torch.tensor([[0, 1, 2, 3, 1, 0], [0, 1, 2, 3, 0, 1]], device=self.device)[:, None]  # samples of 4 and 2 tokens
        try:
            own = self.model(input_ids=ids, position_ids=positions, use_cache=False, layout=Packed([4, 2])).logits
            ours = self.head(self._hidden(ids, positions, Packed([4, 2])))
            alone = self.head(self._hidden(ids[:, 4:], positions[:, 4:], Packed([2])))
        except (TypeError, ValueError) as error:
            raise ModelError(f"{type(self.model).__name__} does not run with hybrid_rl's attention: {error}") from error
        if (ours[:, 4:] - alone).abs().max() > 0.05 * alone.std():  # far above rounding, far below what a leak does
            raise ModelError(f"{type(self.model).__name__} does not use hybrid_rl's attention: samples packed in a row see each other")
        if not torch.allclose(own, ours, rtol=1e-4, atol=1e-4):
            raise ModelError(f"{type(self.model).__name__} changes its logits after the output embeddings, which is not supported")


def pick_device(choice: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises ModelError for a device that is not there."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    return torch.device(choice)
