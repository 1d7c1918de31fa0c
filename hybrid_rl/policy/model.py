"""A model in its role (policy, reference, teacher): a causal LM of transformers, sharded where there are several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.attention.attend import ATTENTION_NAME, LayerAttention, Packed, configured_windows
from hybrid_rl.config import Offload, PolicyConfig, Precision
from hybrid_rl.model_folder.export import write_folder
from hybrid_rl.model_folder.read import (
    CHANCE,
    FROM_FOLDER,
    ModelError,
    check_stored,
    empty_model,
    read_config,
    reason,
    stored_names,
    stored_tensors,
)
from hybrid_rl.model_folder.tokenizer import end_ids, read_tokenizer
from hybrid_rl.policy import lora
from hybrid_rl.policy.layout import Layout, choose_layout, pack
from hybrid_rl.policy.logprobs import logits_of, token_cross_entropy, token_logprobs
from hybrid_rl.policy.offload import Offloaded
from hybrid_rl.policy.positions import limits
from hybrid_rl.policy.sharding import Gathering, local, make_mesh, scatter, shard
from hybrid_rl.processes import hangs
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import PackedBatch, Rollout

LOGIT_CHUNK_ELEMENTS = 64 * 2**20  # logits held at a time: 256 MiB of float32
DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}

PerToken = Callable[[Tensor, nn.Module, Tensor], object]


class _Scored(nn.Module):
    """Hidden states and head in one module, so that FSDP keeps the head's parameters whole while chunks of logits are made."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, row: PackedBatch, per_token: PerToken) -> object:
        """`per_token(hidden [M, d], head, targets [M])` on the hidden states that predict the row's sampled tokens."""
        hidden = _hidden(self.model, row.input_ids[None], row.position_ids[None], row.layout)
        return per_token(hidden[0, row.predict_at], self.model.get_output_embeddings(), row.targets)


class Policy(Offloaded):
    """Float32 parameters; `dtype` is what forward and backward compute in.

    On one rank in float32 `model` is a plain module. Otherwise its parameters are FSDP2 shards, and `sampler` is a second,
    empty module for the engine: `gather` lends it the unsharded parameters, `reshard` takes them back.
    `parameters` and `trainable` name the persistent ones, plain or sharded, each memory once.
    """

    def __init__(
        self, whole: PreTrainedModel | None, config: PreTrainedConfig, generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase,
        device: torch.device, settings: PolicyConfig, ranks: Ranks,
    ):  # fmt: skip
        self.config, self.generation, self.tokenizer = config, generation, tokenizer
        self._conversions = getattr(whole, "_weight_conversions", None)  # from the files' names to transformers', on rank 0
        self.device, self.settings, self.ranks = device, settings, ranks
        self.dtype = compute_dtype(settings.dtype, device)
        if whole is not None:
            self._adapt(whole)
        if ranks.world == 1 and self.dtype == torch.float32:
            assert whole is not None
            self.model = self.sampler = whole.to(device)  # type: ignore[arg-type]
            self._scored = _Scored(self.model)
            self._units: list[FSDPModule] = []
        else:
            self._shard(whole)
        self.model.train()
        if settings.activation_checkpointing:
            enable = (
                getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
            )  # before v5.24
            enable({"use_reentrant": False})
        self.parameters = dict(self.model.named_parameters())
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        kept = self.sampler.state_dict().keys()  # not the model's: asking for it reshards
        self._buffers = {name: b for name, b in self.model.named_buffers() if name in kept}
        self.vocabulary = self.model.get_output_embeddings().weight.shape[0]
        self.chunk = max(1, LOGIT_CHUNK_ELEMENTS // self.vocabulary)
        self._lent: list[tuple[nn.Module, str, Tensor]] = []  # of the sampler: module, attribute, the empty parameter that belongs there

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device, settings: PolicyConfig | None = None, ranks: Ranks | None = None
    ) -> Self:  # fmt: skip
        """Read a Hugging Face folder, on rank 0 alone; the others get their shards from it.

        Raises ModelError naming the folder and what is wrong with it, on every rank.
        """
        settings, ranks, whole, problem = settings or PolicyConfig(), ranks or Ranks(), None, None
        shard = settings.shard
        if shard and ranks.world % shard:
            fitting = ", ".join(str(n) for n in range(1, ranks.world + 1) if ranks.world % n == 0)
            raise ModelError(f"policy.shard={shard} does not divide the {ranks.world} ranks into equal groups; possible are {fitting}")
        if ranks.main:
            try:
                whole = _read(folder, settings.row_tokens)
            except ModelError as error:
                problem = error
        ranks.agree(problem)
        config, generation = ranks.from_main(lambda: (whole.config, whole.generation_config))  # type: ignore[union-attr]
        tokenizer = read_tokenizer(folder)
        return cls(whole, config, generation, tokenizer, device, settings, ranks)

    def _shard(self, whole: PreTrainedModel | None) -> None:
        size = self.settings.shard or self.ranks.local_world
        self.model, self.sampler = self._empty(), self._empty().eval()
        self._scored = _Scored(self.model)
        layers = set(self.model._no_split_modules or ())
        self._units = shard(self._scored, layers, make_mesh(self.ranks, size, self.device), self.dtype)
        self.model.to_empty(device=self.device)
        self.model.tie_weights()
        scatter(self.model, whole, self.device)
        for theirs, ours in zip(self.sampler.modules(), self.model.modules(), strict=True):
            theirs._buffers.update(ours._buffers)  # positions' frequencies and the like: one copy

    def _empty(self) -> PreTrainedModel:
        """The model without memory for its parameters, with adapters where they are trained."""
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

    # ---- training --------------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How samples lie in rows."""
        return choose_layout(self.settings.layout, self.device)

    def rows(self, rollouts: Sequence[Rollout]) -> Iterator[PackedBatch]:
        """Yield this rank's rows of the rollouts, on the device; every rank yields as many. The one walk over a batch."""
        for row in pack(rollouts, self.layout, self.settings.row_tokens, self.ranks):
            yield row.to(self.device)
            hangs.progress()

    def logprobs(self, row: PackedBatch, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """log π and entropy, [M] float32, of the row's sampled tokens, at the sampling temperature."""
        return self._scored(
            row,
            lambda hidden, head, targets: token_logprobs(
                hidden, logits_of(head, self.config), targets, temperature, self.chunk, entropy_gradient
            ),
        )

    def cross_entropy(self, row: PackedBatch, label_smoothing: float) -> Tensor:
        """Supervised loss, [M] float32, of the row's target tokens."""
        return self._scored(
            row,
            lambda hidden, head, targets: token_cross_entropy(hidden, logits_of(head, self.config), targets, label_smoothing, self.chunk),
        )

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def folder(self) -> Path:
        """The folder that it was loaded from."""
        return Path(self.config._name_or_path)

    def end_ids(self) -> frozenset[int]:
        """Return every token that ends a completion."""
        return end_ids(self.tokenizer, self.generation, self.vocabulary, self.config._name_or_path)

    # ---- whose turn it is with the device --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Lend the sampler the whole parameters, unsharded in place, in the compute dtype. Collective."""
        if self._units and not self._lent:
            for unit in self._units:
                unit.unshard()
            for theirs, ours in zip(self.sampler.modules(), self.model.modules(), strict=True):
                for name, empty in list(theirs._parameters.items()):
                    if empty is not None:
                        self._lent.append((theirs, name, empty))
                        theirs._parameters[name] = ours._parameters[name]

    def reshard(self) -> int:
        """Take the whole parameters back from the sampler; returns the bytes freed. Raises RuntimeError where they are not."""
        storages = {p.data_ptr(): p.untyped_storage() for module, name, _ in self._lent if (p := module._parameters[name]) is not None}
        freed = sum(storage.size() for storage in storages.values())
        while self._lent:
            module, name, empty = self._lent.pop()
            module._parameters[name] = empty  # type: ignore[assignment]
        for unit in self._units:
            unit.reshard()
        if held := sum(storage.size() for storage in storages.values()):
            raise RuntimeError(f"{held} of {freed} bytes of unsharded parameters are still in memory after resharding")
        return freed

    def waits(self) -> bool:
        """Whether the shards go to host memory: not on one rank, whose engine samples from these very parameters."""
        return self.settings.offload == Offload.all and bool(self._units)

    def waiting(self) -> Iterator[Tensor]:
        return (local(p) for p in self.parameters.values())

    def buckets(self, dtype: torch.dtype, size: int, merged: bool = True) -> Iterator[dict[str, Tensor]]:
        """All weights whole in buckets of about `size` bytes of `dtype`; valid until the next is asked for. Collective.

        Sharded ones are cast to `dtype` before they are gathered; plain ones come as they are, to be cast by who copies them.

        Named as transformers names them; `merged` adds each adapter's product to its matrix and leaves adapters out.
        """
        own = lora.merged(self.parameters, self.model) if merged else ((name, p, local(p)) for name, p in self.parameters.items())
        yield from Gathering(dtype, size, self.device).buckets(own)
        if self._buffers:
            yield {name: b.to(dtype) if b.is_floating_point() else b for name, b in self._buffers.items()}

    def export(self, folder: str | Path, float32: bool = False) -> None:
        """Write the folder that the policy was loaded from with the trained weights, adapters merged, in the files' dtype or in float32.

        Where adapters are trained, `<folder>_adapter` holds them alone, as peft reads them. Collective; rank 0 writes.
        """
        whole = self._on_main(self.buckets(torch.float32, 2**28))
        adapters = self._on_main(self.buckets(torch.float32, 2**28, merged=False), lora.is_adapter) if self.settings.lora.rank else {}
        if self.ranks.main:
            write_folder(folder, self.config._name_or_path, stored_names(self._skeleton(), whole, self._conversions), float32)
        if self.ranks.main and adapters:
            lora.save(f"{folder}_adapter", self.model, adapters, self.config._name_or_path)

    def _on_main(self, buckets: Iterator[dict[str, Tensor]], wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Copies of whole weights in rank 0's host memory; nothing on the other ranks."""
        items = (item for bucket in buckets for item in bucket.items())
        return {name: t.detach().to("cpu", copy=True) for name, t in items if self.ranks.main and wanted(name)}


class SideModel(Policy):
    """A model of its own beside the policy, which waits in host memory while idle."""

    def waits(self) -> bool:
        """Always on a GPU; on the CPU if policy.offload says so, but not on one rank, whose parameters lie in a mapped file."""
        return self.device.type != "cpu" or (self.settings.offload == Offload.all and self.ranks.world > 1)


def _read(folder: str | Path, row_tokens: int) -> PreTrainedModel:
    """Load the model in float32. Raises ModelError unless it is what the files hold, and what `empty_model` makes room for."""
    model: PreTrainedModel
    loaded: dict[str, Any]
    config = read_config(folder)
    read_tokenizer(folder)
    try:
        empty = empty_model(config)
        model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            folder, config=config, dtype=torch.float32, attn_implementation=ATTENTION_NAME, output_loading_info=True,
            use_safetensors=True, ignore_mismatched_sizes=True, **FROM_FOLDER,
        )  # fmt: skip
    except Exception as error:
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    if wrong := sorted(loaded["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise ModelError(f"model.path={folder}: {name} has shape {list(stored)}, by config.json it must have {list(wanted)}")
    if absent := sorted(loaded["missing_keys"]):  # transformers would go on with random numbers there
        raise ModelError(f"model.path={folder} has no weights for {_some(absent)}")
    if extra := sorted(loaded["unexpected_keys"]):  # and here with a part of the model
        raise ModelError(f"model.path={folder} has weights that config.json has no place for: {_some(extra)}")
    check_stored(folder, empty)
    _check_loaded(folder, model, empty)
    _check_chance(model)
    _check_forward(model, row_tokens)
    return model


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"


def _check_loaded(folder: str | Path, model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Compare what was loaded with what other ranks and half precision make room for, and with the names that an export will write."""
    here, there = ({name: p.shape for name, p in m.named_parameters()} for m in (model, empty))
    if here != there:
        differ = sorted(here.items() ^ there.items())
        raise ModelError(f"model.path={folder}: {differ[0][0]} is another one in the files than by config.json")
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and (config._attn_implementation != ATTENTION_NAME or not config.return_dict):
            raise ModelError(f"{type(module).__name__} does not run with hybrid_rl's attention: it chooses its own")
    stored = {name: place.shape for name, place in stored_tensors(folder).items()}
    tied = stored_names(empty, dict(model.named_parameters()), getattr(model, "_weight_conversions", None))
    held = {name: tuple(tensor.shape) for name, tensor in tied.items()}
    one_of = [{one, other} for one, other in model.all_tied_weights_keys.items()]
    lost = [
        n
        for n, shape in held.items()
        if stored.get(n, shape) != shape or (n not in stored and not any(n in t and t & stored.keys() for t in one_of))
    ]
    if lost:
        raise ModelError(f"{type(model).__name__} cannot be written as it was read: {_some(sorted(lost))} is not in the files of {folder}")


@torch.no_grad()
def _check_chance(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that draws random numbers in its forward pass."""
    kind, state = type(model).__name__, torch.get_rng_state()
    ids = torch.arange(4)[None]
    try:
        _hidden(model.train(), ids, ids, Packed([4]))
    except Exception:  # _check_forward says what it is
        return
    if not torch.equal(state, torch.get_rng_state()):
        sources = ", ".join(sorted({name for part in model.modules() for name in _chances(part)})) or "its code"
        raise ModelError(f"{kind} draws random numbers while it is trained ({sources}), so no log-probability can be computed again")


def _chances(part: nn.Module) -> list[str]:
    return [
        f"{type(part).__name__}.{name}" for name, value in vars(part).items() if CHANCE.search(name) and isinstance(value, float) and value
    ]


class _Told(Packed):
    """Packed rows that note the window that each layer hands to attention."""

    def __init__(self, lengths: list[int]):
        super().__init__(lengths)
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.windows[layer] = how.window
        return super().attend(layer, query, key, value, how)


@torch.no_grad()
def _check_forward(model: PreTrainedModel, row_tokens: int) -> None:
    """Compare what rows and chunks of logits give with the model's own eager attention and logits, on a few tokens.

    Raises ModelError for a model that a row of `row_tokens` tokens would compute wrongly.
    """
    kind, config = type(model).__name__, model.config
    ids, positions = torch.tensor([[0, 1, 2, 3, 1, 0], [0, 1, 2, 3, 0, 1]])[:, None]  # samples of 4 and 2 tokens
    far = positions.clone()
    far[0, 3] = min([row_tokens, *(limit.tokens for limit in limits(model) if limit.hard)]) - 1
    logits = logits_of(model.train().get_output_embeddings(), config)
    told = _Told([4, 2])
    try:
        windows = configured_windows(config)
        own = model(input_ids=ids, position_ids=positions, use_cache=False, layout=Packed([4, 2])).logits
        ours = logits(_hidden(model, ids, positions, told))
        alone = logits(_hidden(model, ids[:, 4:], positions[:, 4:], Packed([2])))
        beside_far = logits(_hidden(model, ids, far, Packed([4, 2])))
        eager = _eager(model, ids[:, :4])
    except Exception as error:
        raise ModelError(f"{kind} does not run with hybrid_rl's attention: {reason(error)}") from error
    if not own.isfinite().all():
        raise ModelError(f"{config._name_or_path}: its logits are not finite; a weight is NaN or infinite")
    much = 1e-3 * alone.std()  # far above rounding, below what a leak does
    if (ours[:, 4:] - alone).abs().max() > much:
        raise ModelError(f"{kind} does not use hybrid_rl's attention: samples packed in a row see each other")
    if not torch.allclose(own, ours, rtol=1e-4, atol=1e-4):
        raise ModelError(f"{kind} changes its logits after the output embeddings in a way that is not supported")
    if (own[:, :4] - eager).abs().max() > 2e-3 * own.std():  # rounding is about 2e-6 in two layers
        raise ModelError(f"{kind} computes attention in a way of its own, which hybrid_rl's attention does not")
    if (beside_far[:, 4:] - alone).abs().max() > much:
        raise ModelError(f"{kind} changes all positions of a row with its longest sample; no row can hold several samples")
    for layer, window in enumerate(windows):
        if window is not None and told.windows.get(layer) != window and window < row_tokens:
            raise ModelError(
                f"{kind}: layer {layer} has a window of {window} tokens (config.json) that it does not hand to attention; only "
                f"policy.row_tokens={window} or less can be used"
            )


def _eager(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of one sample with the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _hidden(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, layout: object) -> Tensor:
    return model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout).last_hidden_state


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU."""
    return DTYPES.get(precision, torch.bfloat16 if device.type == "cuda" else torch.float32)


def pick_device(choice: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises ModelError for a device that is not there."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        asked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise ModelError(f"device=cuda, but torch sees no GPU{asked}; use device=cpu or device=auto")
    return torch.device(choice, torch.cuda.current_device()) if choice == "cuda" else torch.device(choice)
