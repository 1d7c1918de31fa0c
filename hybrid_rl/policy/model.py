"""A model in its role (policy, reference, teacher): a causal LM of transformers, sharded over several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybrid_rl.config import Offload, PolicyConfig
from hybrid_rl.model_folder.export import write_folder
from hybrid_rl.model_folder.read import ModelError, empty_model, read_config, stored_names
from hybrid_rl.model_folder.tokenizer import end_ids, read_tokenizer
from hybrid_rl.model_folder.transformers_private import conversions_of, enable_checkpointing, folder_of, layer_classes
from hybrid_rl.policy import lora
from hybrid_rl.policy.defaults import choose_layout, compute_dtype, logit_elements, row_tokens
from hybrid_rl.policy.layout import Layout, pack
from hybrid_rl.policy.load import Described, hidden_states, read_model
from hybrid_rl.policy.logprobs import logits_of, token_cross_entropy, token_logprobs
from hybrid_rl.policy.offload import Offloaded
from hybrid_rl.policy.sharding import Gathering, local, make_mesh, scatter, shard
from hybrid_rl.policy.torch_private import Loan, share_buffers
from hybrid_rl.processes import hangs
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import PackedBatch, Rollout

PerToken = Callable[[Tensor, nn.Module, Tensor], object]


class _BodyAndHead(nn.Module):
    """Body and head in one module, so that FSDP keeps the head's parameters whole while logits are computed."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, row: PackedBatch, per_token: PerToken) -> object:
        """Call `per_token(hidden [M, d], head, targets [M])` on the states that predict the row's sampled tokens."""
        hidden = hidden_states(self.model, row.input_ids[None], row.position_ids[None], row.layout)
        return per_token(hidden[0, row.predict_at], self.model.get_output_embeddings(), row.targets)


class Policy(Offloaded):
    """Float32 parameters; `dtype` is what forward and backward compute in.

    On one rank in float32 `model` is a plain module. Otherwise its parameters are FSDP2 shards, and `sampler` is a
    second, empty module for the engine: `gather` lends it the unsharded parameters, `reshard` takes them back.
    `parameters` and `trainable` name the persistent parameters, plain or sharded; tied ones appear once.
    """

    def __init__(
        self,
        whole: PreTrainedModel | None,
        known: Described,
        device: torch.device,
        settings: PolicyConfig,
        ranks: Ranks,
    ):
        self.config, self.generation, self.tokenizer = known.config, known.generation, known.tokenizer
        self._conversions = conversions_of(whole)  # of the files' names to transformers', on rank 0
        self.device, self.settings, self.ranks = device, settings, ranks
        self.dtype = compute_dtype(settings.dtype, device)
        if whole is not None:
            self._adapt(whole)
        if ranks.world == 1 and self.dtype == torch.float32:
            assert whole is not None
            self.model = self.sampler = whole.to(device)  # type: ignore[arg-type]
            self._body_and_head = _BodyAndHead(self.model)
            self._units: list[FSDPModule] = []
        else:
            self._shard(whole)
        self.model.train()
        if settings.activation_checkpointing:
            enable_checkpointing(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        kept = self.sampler.state_dict().keys()  # not the model's: asking for it reshards
        self._buffers = {name: b for name, b in self.model.named_buffers() if name in kept}
        self.vocabulary = self.model.get_output_embeddings().weight.shape[0]
        self.chunk = max(1, logit_elements(device) // self.vocabulary)
        self._loan: Loan | None = None  # of whole parameters, to the sampler

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device, settings: PolicyConfig | None = None, ranks: Ranks | None = None
    ) -> Self:
        """Read a Hugging Face folder on rank 0; the other ranks get their shards from rank 0.

        Raises ModelError naming the folder and what is wrong with it, on every rank.
        """
        settings, ranks, whole, problem = settings or PolicyConfig(), ranks or Ranks(), None, None
        shard = settings.shard
        if shard and ranks.world % shard:
            fitting = ", ".join(str(n) for n in range(1, ranks.world + 1) if ranks.world % n == 0)
            raise ModelError(
                f"policy.shard={shard} does not divide the {ranks.world} ranks into equal groups; "
                f"possible are {fitting}"
            )
        if ranks.main:
            try:
                settings = replace(settings, row_tokens=row_tokens(settings, read_config(folder), device))
                whole = read_model(folder, settings.row_tokens)
            except ModelError as error:
                problem = error
        ranks.agree(problem)
        rows = ranks.from_main(lambda: settings.row_tokens)  # one number, also if GPUs differ
        configs = lambda: (whole.config, whole.generation_config)  # type: ignore[union-attr]  # noqa: E731
        config, generation = ranks.from_main(configs)
        known = Described(config, generation, read_tokenizer(folder))
        return cls(whole, known, device, replace(settings, row_tokens=rows), ranks)

    def _shard(self, whole: PreTrainedModel | None) -> None:
        size = self.settings.shard or self.ranks.local_world
        self.model, self.sampler = self._empty(), self._empty().eval()
        self._body_and_head = _BodyAndHead(self.model)
        self._units = shard(
            self._body_and_head, layer_classes(self.model), make_mesh(self.ranks, size, self.device), self.dtype
        )
        self.model.to_empty(device=self.device)
        self.model.tie_weights()
        scatter(self.model, whole, self.device)
        share_buffers(self.sampler, self.model)

    def _empty(self) -> PreTrainedModel:
        """Return the model without memory for its parameters, with adapters if they are trained."""
        return self._adapt(self._skeleton())

    def _adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        try:
            lora.inject(model, self.settings.lora)
        except ValueError as error:
            raise ModelError(str(error)) from error
        return model

    def _skeleton(self) -> PreTrainedModel:
        model = empty_model(self.config)
        model.generation_config = self.generation
        return model

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How samples lie in rows."""
        return choose_layout(self.settings.layout, self.device)  # type: ignore[return-value]

    def rows(self, rollouts: Sequence[Rollout]) -> Iterator[PackedBatch]:
        """Yield this rank's rows of the rollouts, on the device; every rank yields the same number."""
        for row in pack(rollouts, self.layout, self.settings.row_tokens, self.ranks):
            yield row.to(self.device)
            hangs.progress()

    def logprobs(self, row: PackedBatch, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return log π and entropy in nats, [M] float32, of the row's sampled tokens, at the sampling temperature."""
        return self._body_and_head(
            row,
            lambda hidden, head, targets: token_logprobs(
                hidden, logits_of(head, self.config), targets, temperature, self.chunk, entropy_gradient
            ),
        )

    def cross_entropy(self, row: PackedBatch, label_smoothing: float) -> Tensor:
        """Return the supervised loss, [M] float32 in nats, of the row's target tokens."""
        return self._body_and_head(
            row,
            lambda hidden, head, targets: token_cross_entropy(
                hidden, logits_of(head, self.config), targets, label_smoothing, self.chunk
            ),
        )

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def folder(self) -> Path:
        """The folder that it was loaded from."""
        return Path(folder_of(self.config))

    def end_ids(self) -> frozenset[int]:
        """Return every token that ends a completion."""
        return end_ids(self.tokenizer, self.generation, self.vocabulary, folder_of(self.config))

    # ---- sharing the device with the engine --------------------------------------------------------------------------

    def gather(self) -> None:
        """Lend the sampler the whole parameters, unsharded in place, in the compute dtype. Collective."""
        if self._units and not self._loan:
            for unit in self._units:
                unit.unshard()
            self._loan = Loan(self.sampler, self.model)

    def reshard(self) -> int:
        """Free the whole parameters lent to the sampler, and return their bytes. Raises RuntimeError if any remain."""
        storages: dict[int, torch.UntypedStorage] = {}
        if self._loan:
            storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in self._loan.tensors()}
            self._loan.end()
            self._loan = None
        freed = sum(storage.size() for storage in storages.values())
        for unit in self._units:
            unit.reshard()
        if held := sum(storage.size() for storage in storages.values()):
            raise RuntimeError(f"{held} of {freed} bytes of unsharded parameters are still in memory after resharding")
        return freed

    def waits(self) -> bool:
        """Return whether shards move to host memory: never on one rank, where the engine samples from them."""
        return self.settings.offload == Offload.all and bool(self._units)

    def waiting(self) -> Iterator[Tensor]:
        return (local(p) for p in self.parameters.values())

    def buckets(self, dtype: torch.dtype, size: int, merged: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield all weights whole, in buckets of about `size` bytes of `dtype`, each valid until the next. Collective.

        Sharded weights are cast to `dtype` before they are gathered; plain ones are not cast. Names are transformers';
        `merged` adds each adapter's product to its matrix and leaves adapters out.
        """
        own = (
            lora.merged(self.parameters, self.model)
            if merged
            else ((name, p, local(p)) for name, p in self.parameters.items())
        )
        yield from Gathering(dtype, size, self.device).buckets(own)
        if self._buffers:
            yield {name: b.to(dtype) if b.is_floating_point() else b for name, b in self._buffers.items()}

    def export(self, folder: str | Path, float32: bool = False) -> None:
        """Write the policy's original folder with the trained weights, in the files' dtype or in float32.

        Adapters are merged, and also written alone to `<folder>_adapter`, as peft reads them. Collective; rank 0
        writes.
        """
        whole = self._on_main(self.buckets(torch.float32, 2**28))
        adapters = (
            self._on_main(self.buckets(torch.float32, 2**28, merged=False), lora.is_adapter)
            if self.settings.lora.rank
            else {}
        )
        if self.ranks.main:
            write_folder(
                folder, folder_of(self.config), stored_names(self._skeleton(), whole, self._conversions), float32
            )
        if self.ranks.main and adapters:
            lora.save(f"{folder}_adapter", self.model, adapters, folder_of(self.config))

    def _on_main(
        self, buckets: Iterator[dict[str, Tensor]], wanted: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Tensor]:
        """Return copies of whole weights in rank 0's host memory, and {} on the other ranks."""
        items = (item for bucket in buckets for item in bucket.items())
        return {name: t.detach().to("cpu", copy=True) for name, t in items if self.ranks.main and wanted(name)}


class SideModel(Policy):
    """A separate model beside the policy, which waits in host memory while idle."""

    def waits(self) -> bool:
        """Return True on a GPU; on the CPU if policy.offload says so, except on one rank, which maps its file."""
        return self.device.type != "cpu" or (self.settings.offload == Offload.all and self.ranks.world > 1)


def pick_device(choice: str) -> torch.device:
    """Return the chosen device; `auto` is the GPU if there is one. Raises ModelError if there is no such device."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        asked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise ModelError(f"device=cuda, but torch sees no GPU{asked}; use device=cpu or device=auto")
    return torch.device(choice, torch.cuda.current_device()) if choice == "cuda" else torch.device(choice)
