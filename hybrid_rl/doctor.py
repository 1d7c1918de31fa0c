"""Check what this machine can run, and print what is missing for the rest: python -m hybrid_rl.doctor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.config import TrackerKind
from hybrid_rl.engine.sglang import interface
from hybrid_rl.machine import cores, free_memory
from hybrid_rl.sandbox import run as sandbox


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `fix` says what to do if it failed. Runs are possible without what is optional."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    optional: bool = False


def checks(output_dir: Path = Path(".")) -> list[Check]:
    """Return the results of all checks, those of parts that cannot run here included."""
    version = sys.version_info
    result = [Check("Python 3.11 or newer", version >= (3, 11), platform.python_version(), "install a newer Python")]
    for package in ("torch", "transformers", "tokenizers", "accelerate", "hydra", "safetensors", "pyarrow", "rich"):
        there = importlib.util.find_spec(package) is not None
        result.append(Check(package, there, _version(package) if there else "not installed", "pip install hybrid_rl"))
    result += [
        _memory(),
        _disk(output_dir),
        *_gpu(),
        _sandbox(),
        *(_optional(*optional) for optional in OPTIONAL),
        _sglang(),
        *_memory_sharing(),
    ]
    return result


# name, module, purpose, extra
OPTIONAL = (
    ("peft", "peft", "for policy.lora", "lora"),
    *((kind.name, kind.value, f"for tracker={kind.name}", "trackers") for kind in TrackerKind if kind.name != "none"),
    ("hydra-joblib-launcher", "hydra_plugins.hydra_joblib_launcher", "for hydra/launcher=joblib in a sweep", "sweeps"),
    (
        "hydra-submitit-launcher",
        "hydra_plugins.hydra_submitit_launcher",
        "for hydra/launcher=submitit_slurm in a sweep",
        "sweeps",
    ),
    ("hydra-optuna-sweeper", "hydra_plugins.hydra_optuna_sweeper", "for hydra/sweeper=optuna", "sweeps"),
)


def _sandbox() -> Check:
    missing = sandbox.check()
    found = "refused" if missing else "namespaces, seccomp"
    return Check("code sandbox", missing is None, found, f"only for rewards that run code: {missing}", optional=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version({"hydra": "hydra-core", "mlflow": "mlflow-skinny"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _memory() -> Check:
    free = free_memory() / 2**30
    return Check("memory", free >= 2, f"{free:.1f} GiB available", "the embedded model's recipe needs about 2 GiB")


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free / 2**30
    return Check(
        "disk",
        free >= 1 and os.access(folder, os.W_OK),
        f"{free:.0f} GiB free in {folder.resolve()}",
        "choose a writable output_dir with at least 1 GiB of free space",
    )


def _gpu() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return []  # the check of the package reports it
    import torch

    if not torch.cuda.is_available():
        built = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch is built for CUDA {torch.version.cuda}, but finds no GPU"
        )
        fix = "optional: training runs on the CPU; for a GPU install a CUDA build of torch and its driver"
        return [Check("GPU", False, built, fix, optional=True)]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return [
        Check("GPU", True, f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"),
        _kernel(),
    ]


def _kernel() -> Check:
    import torch

    from hybrid_rl.attention import kernels

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    problems = [f"{kernel.name}: {kernels.fails(kernel, device, torch.bfloat16)}" for kernel in kernels.KERNELS]
    name = kernels.chosen_name(device, torch.bfloat16)
    fix = "optional: a fused kernel attends in one call for a row instead of one for each sample: install torch 2.11 or newer"
    found = name if name != kernels.WITHOUT else f"{name}, one call a sample ({'; '.join(problems)})"
    return Check("attention", name != kernels.WITHOUT, found, fix, optional=True)


PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


def _sglang() -> Check:
    problem = interface.unusable()
    return Check(
        "SGLang",
        problem is None,
        interface.installed() or "not installed",
        f"optional, for a GPU: {problem}",
        optional=True,
    )


def _memory_sharing() -> list[Check]:
    """Return checks of what prevents trainer and SGLang from sharing GPU memory, and of variables withheld from SGLang.

    The list is empty without SGLang.
    """
    if interface.installed() is None:
        return []
    scope = PTRACE.read_text().strip() if PTRACE.is_file() else "0"
    allocator = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    expandable = "expandable_segments:true" in allocator.lower().replace(" ", "")
    return [
        Check(
            "ptrace_scope",
            scope in ("0", ""),
            f"kernel.yama.ptrace_scope={scope}",
            "for engine=sglang on a GPU: processes must map each other's memory; "
            "sudo sysctl kernel.yama.ptrace_scope=0",
            optional=True,
        ),
        Check(
            "allocator",
            not expandable,
            "expandable_segments:True" if expandable else "no expandable segments",
            "for engine=sglang on a GPU: expandable segments cannot be shared; "
            "remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF",
            optional=True,
        ),
        Check(
            "SGLang's variables",
            not (names := interface.withheld()),
            ", ".join(names) or "none are set",
            "SGLang's process is started without them, since they could change its samples or the memory it releases; "
            "use engine.arguments",
            optional=True,
        ),
        *_building(),
        _package("torch_memory_saver", "engine=sglang releases memory with it: pip install torch_memory_saver"),
        _package("sgl_kernel", f"SGLang's kernels: {interface.INSTALL}"),
    ]


DRIVER, GLIBC = 580, (2, 34)  # that SGLang's wheels for CUDA 13 need


def _building() -> list[Check]:
    """Return checks of what SGLang compiles its kernels with at their first use, and of what its wheels are built for."""
    missing = [program for program in ("nvcc", "c++", "ninja") if shutil.which(program) is None]
    compilers = "for engine=sglang on a GPU, which compiles kernels at their first use: install the CUDA toolkit (nvcc), a C++ compiler and ninja, and put them on the path"
    version = platform.libc_ver()[1]
    new = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) >= GLIBC
    checks = [
        Check(
            "compilers",
            not missing,
            f"no {', '.join(missing)}" if missing else "nvcc, c++, ninja",
            compilers,
            optional=True,
        ),
        Check("glibc", new, version or "another C library", "SGLang's wheels need glibc 2.34 or newer", optional=True),
    ]
    if (driver := _driver()) is not None:
        fine = int(driver.partition(".")[0]) >= DRIVER
        checks.append(
            Check("driver", fine, driver, f"SGLang's wheels for CUDA 13 need driver {DRIVER} or newer", optional=True)
        )
    return checks


NVIDIA = Path("/proc/driver/nvidia/version")


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none to read."""
    words = NVIDIA.read_text().split() if NVIDIA.is_file() else []
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdecimal()), None)


def _package(name: str, fix: str) -> Check:
    there = importlib.util.find_spec(name) is not None
    return Check(name, there, _version(name) if there else "not installed", fix, optional=True)


def _optional(name: str, module: str, purpose: str, extra: str) -> Check:
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that is not there, like hydra_plugins
        there = False
    found = _version(name) if there else "not installed"
    return Check(name, there, found, f"optional, {purpose}: pip install -e '.[{extra}]'", optional=True)


def main() -> int:
    """Print the checks; return exit code 1 if something that every run needs is missing."""
    results = checks()
    for check in results:
        mark = "ok  " if check.ok else "no  "
        print(f"{mark}{check.name:<24}{check.found}" + ("" if check.ok else f"   → {check.fix}"))
    needed = all(check.ok or check.optional for check in results)
    print("\nThis machine can run:" if needed else "\nNothing can run yet: see the lines marked 'no' above.")
    if needed:
        gpu = any(check.name == "GPU" and check.ok for check in results)
        print("  engine local   " + ("on the GPU, bfloat16 compute" if gpu else "on the CPU, float32"))
        if any(check.name == "SGLang" and check.ok for check in results):
            tests = "" if gpu else " (on the CPU only for tests: make test-sglang)"
            print(f"  engine sglang  in its own process{tests}")
        print("  ranks          " + ("one for each GPU" if gpu else f"1, or several on its {cores()} cores (ranks=N)"))
        print(
            "  models         the embedded tiny Qwen3; any full-attention causal LM folder of transformers "
            "(preset=qwen3 model.path=…; preset=smollm2: python -m hybrid_rl.model_folder.smollm2)"
        )
    return 0 if needed else 1


if __name__ == "__main__":
    sys.exit(main())
