"""All that hybrid_rl uses of SGLang by name: modules, methods, arguments, fields. Most are private and may change.

`lacking` compares these names with the installed version; the tests call it too. The names of stored weights, which no
signature shows, are compared with the policy at the first handover (module `weights`). Importing SGLang takes seconds
and patches transformers, so only its own process imports it, when an engine starts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    import torch

    from hybrid_rl.engine.base import Sampling
    from hybrid_rl.engine.sglang.options import SGLangOptions

OLDEST, TESTED = "0.5.21", "0.5.23"
SEEDS = 2**32  # exclusive bound of random_seed, which SGLang gives to numpy.random.seed
INSTALL = "pip install -e '.[sglang]'"

_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_MESSAGES = "sglang.srt.managers.io_struct"
# "module:attribute" → the parameters that are passed by name
CALLS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.entrypoints.engine:Engine.async_generate": ("input_ids", "sampling_params", "return_logprob"),
    "sglang.srt.entrypoints.engine:Engine.save_sharded_model": (),
    "sglang.srt.entrypoints.engine:Engine.shutdown": (),
    f"{_MANAGER}.abort_request": ("abort_all",),
    f"{_MANAGER}.flush_cache": (),
    f"{_MANAGER}.release_memory_occupation": (),
    f"{_MANAGER}.resume_memory_occupation": (),
    f"{_MANAGER}.begin_weight_update": (),
    f"{_MANAGER}.update_weights_from_tensor": (),
    f"{_MANAGER}.end_weight_update": (),
    f"{_MANAGER}.update_weight_version": (),
    f"{_MESSAGES}:ReleaseMemoryOccupationReqInput": ("tags",),
    f"{_MESSAGES}:ResumeMemoryOccupationReqInput": ("tags",),
    f"{_MESSAGES}:BeginWeightUpdateReqInput": (),
    f"{_MESSAGES}:UpdateWeightsFromTensorReqInput": ("serialized_named_tensors", "load_format", "flush_cache"),
    f"{_MESSAGES}:EndWeightUpdateReqInput": (),
    f"{_MESSAGES}:UpdateWeightVersionReqInput": ("new_version",),
    "sglang.srt.sampling.sampling_params:SamplingParams": (
        "temperature",
        "top_k",
        "top_p",
        "stop_token_ids",
        "max_new_tokens",
        "sampling_seed",
    ),
    "sglang.srt.weight_sync.tensor_bucket:FlattenedTensorMetadata": (
        "name",
        "shape",
        "dtype",
        "start_idx",
        "end_idx",
        "numel",
    ),
    "sglang.srt.managers.load_snapshot:shm_path_for": (),
}
TAGS = ("kv_cache", "weights")  # of memory that can be given back

# Over a thousand environment variables switch parts of SGLang, among them temperatures of log-probabilities, limits of
# tokens, and listening ports; new versions add more, and PYTORCH_*ALLOC_CONF can keep memory from being released.
# SGLang's process gets only those that describe the machine and places for files.
SWITCHES = ("SGLANG_", "SGL_", "PYTORCH_", "TMS_", "FLASHINFER_NVFP4", "ROCM_QUICK_REDUCE")  # TMS: torch_memory_saver
KEPT = (
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "SGLANG_CACHE_DIR",
    "SGLANG_JIT_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR",
    "SGLANG_CUTE_AOT_CACHE_DIR",
    "SGLANG_NCCL_SO_PATH",
)


# ---- what is installed ----------------------------------------------------------------------------------------------


def installed() -> str | None:
    """Return SGLang's version, None if it is not installed."""
    if importlib.util.find_spec("sglang") is None:
        return None
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("sglang")
    return "of an unknown version"


def unusable() -> str | None:
    """Return why engine=sglang cannot run here, or None if no reason is known without importing SGLang."""
    version = installed()
    if version is None:
        return f"SGLang is not installed; {INSTALL}, or engine=local"
    with suppress(InvalidVersion):
        if Version(version) < Version(OLDEST) and not Version(version).is_devrelease:
            return f"SGLang {version} is too old, {OLDEST} or newer is needed; {INSTALL}, or engine=local"
    return None


def lacking(arguments: Iterable[str]) -> list[str]:
    """Return the names that hybrid_rl uses and the installed SGLang lacks; `arguments` are those of its engine."""
    missing = []
    for path, parameters in CALLS.items():
        module, _, attribute = path.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for name in attribute.split("."):
                target = getattr(target, name)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or module):
                raise  # a package that SGLang needs
            missing.append(path)
        except AttributeError:
            missing.append(path)
        else:
            missing += [
                f"{attribute}({name}=)" for name in parameters if name not in inspect.signature(target).parameters
            ]
    known = inspect.signature(importlib.import_module("sglang.srt.server_args").ServerArgs).parameters
    missing += [f"argument {name} (engine.arguments)" for name in sorted(set(arguments) - known.keys())]
    tags = importlib.import_module("sglang.srt.constants").GPU_MEMORY_ALL_TYPES
    return missing + [f"memory tag {tag!r}" for tag in TAGS if tag not in tags]


# ---- what it is given -----------------------------------------------------------------------------------------------


def withheld() -> list[str]:
    """Return the environment variables that SGLang does not get: they could change its samples or keep its memory."""
    return sorted(name for name in os.environ if name.startswith(SWITCHES) and name not in KEPT)


def server_arguments(
    folder: str, end_ids: Sequence[int], slots: int, kv_tokens: int, options: SGLangOptions, ranks: int = 1
) -> dict[str, Any]:
    """Return the arguments of an engine on `ranks` devices that runs `slots` requests at a time.

    `kv_tokens` is the size of its KV cache; on a GPU, the largest that it may take.
    """
    device = options.device
    arguments: dict[str, Any] = {
        "model_path": folder,
        "device": device.type,
        "dtype": str(options.dtype).removeprefix("torch."),
        "tp_size": ranks,
        "max_running_requests": slots,
        "max_total_tokens": kv_tokens,
        "enable_deterministic_inference": options.deterministic,
        "enable_memory_saver": True,
        "skip_tokenizer_init": True,
        "json_model_override_args": json.dumps({"eos_token_id": list(end_ids)}),
        "weight_version": "-1",
        "log_level": "error",
        "sleep_on_idle": True,  # otherwise its loop keeps a core busy during training
    }
    if device.type == "cpu":
        return arguments | {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
        }
    return arguments | {"mem_fraction_static": options.memory_fraction, "base_gpu_id": device.index or 0}


def sampling_parameters(sampling: Sampling, end_ids: Sequence[int], max_tokens: int, seed: int) -> dict[str, Any]:
    """Return the parameters of one request that may sample `max_tokens` more tokens."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "stop_token_ids": list(end_ids),
        "max_new_tokens": max_tokens,
        "sampling_seed": seed % 2**63,
    }


def flat_bucket(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return tensors as one flat tensor of bytes and a description, as the load format "flattened_bucket" reads them.

    The descriptions have the fields of FlattenedTensorMetadata, which SGLang copies.
    """
    import torch

    described, start = [], 0
    named = sorted(named, key=lambda pair: -pair[1].itemsize)  # each begins at a multiple of its element's size
    for name, tensor in named:
        end = start + tensor.numel() * tensor.itemsize
        described.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=end - start
            )
        )
        start = end
    return {
        "flattened_tensor": torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named]),
        "metadata": described,
    }


# ---- a running engine -----------------------------------------------------------------------------------------------


class RunningEngine:
    """`sglang.Engine` in this process. A call that SGLang refuses raises RuntimeError."""

    def __init__(self, arguments: Mapping[str, Any]):
        """Start it. Raises RuntimeError naming what the installed version lacks."""
        if missing := lacking(arguments):
            raise RuntimeError(
                f"SGLang {installed()} has no {', '.join(missing)}; "
                f"hybrid_rl needs {OLDEST} or newer and is tested with {TESTED}"
            )
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._manager = self._engine.tokenizer_manager
        self._messages = importlib.import_module(_MESSAGES)
        self.loop = self._engine.loop
        self.reuses_prefixes = not self._engine.server_args.disable_radix_cache
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        self.input_limit: int = info["max_req_input_len"]
        self.cache_tokens: int = info["max_total_num_tokens"]
        self._unlink_shared_files()

    def _unlink_shared_files(self) -> None:
        """Remove the names of SGLang's files in shared memory: its processes keep what they have mapped.

        SGLang removes none of them if a process is killed: 25 MB a death with several devices.
        """
        shm_path_for = importlib.import_module("sglang.srt.managers.load_snapshot").shm_path_for
        paths = [Path(shm_path_for(self._engine.port_args.instance_id))]
        for process in psutil.Process().children(recursive=True):
            paths += Path("/dev/shm").glob(f"sgl_shm_*_{process.pid}_*")
        for path in paths:
            path.unlink(missing_ok=True)

    @property
    def heard(self) -> float:
        """The time at which the scheduler last answered."""
        return self._manager.last_receive_tstamp

    async def generate(
        self, input_ids: list[int], parameters: dict[str, Any]
    ) -> tuple[list[int], list[float], dict[str, Any]]:
        """Return token ids, log-probabilities, and facts: finish reason, prompt tokens, versions of the weights."""
        out = await self._engine.async_generate(input_ids=input_ids, sampling_params=parameters, return_logprob=True)
        said, ids = out["meta_info"], list(out["output_ids"])
        spans = said.get("weight_versions") or ()
        facts = {
            "finish_reason": said["finish_reason"]["type"],
            "prompt_tokens": said.get("prompt_tokens", 0),
            "cached_tokens": said.get("cached_tokens", 0),
            "versions": [(int(span["version"]), span["end"] - span["start"]) for span in spans],
        }
        if sum(count for _, count in facts["versions"]) != len(ids):
            raise RuntimeError(
                f"SGLang {installed()} gave {len(ids)} tokens, and versions of the weights for {facts['versions']}"
            )
        return ids, [entry[0] for entry in said.get("output_token_logprobs") or ()], facts

    def abort(self) -> None:
        self._manager.abort_request(abort_all=True)

    async def release(self, tags: list[str]) -> None:
        await self._manager.release_memory_occupation(self._messages.ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        await self._manager.resume_memory_occupation(self._messages.ResumeMemoryOccupationReqInput(tags=tags), None)

    async def begin(self) -> None:
        _check(await self._manager.begin_weight_update(self._messages.BeginWeightUpdateReqInput(), None))

    async def load(self, payloads: list[bytes]) -> None:
        """Load one flattened bucket of weights, pickled by each tensor-parallel rank."""
        bucket = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        _check(
            await self._manager.update_weights_from_tensor(
                self._messages.UpdateWeightsFromTensorReqInput(**bucket), None
            )
        )

    async def end(self) -> None:
        _check(await self._manager.end_weight_update(self._messages.EndWeightUpdateReqInput(), None))

    async def set_version(self, version: int) -> None:
        await self._manager.update_weight_version(self._messages.UpdateWeightVersionReqInput(new_version=str(version)))

    async def flush(self) -> bool:
        """Drop computed prefixes. Return False, and drop none, while the scheduler is busy."""
        return (await self._manager.flush_cache()).success

    def save(self, folder: str) -> None:
        """Write the weights as safetensors, by SGLang's names."""
        self._engine.save_sharded_model(path=folder, pattern=None, max_size=None)

    def shutdown(self) -> None:
        self._engine.shutdown()


def _check(answer: Sequence[Any]) -> None:
    if not answer[0]:
        raise RuntimeError(str(answer[1]))
