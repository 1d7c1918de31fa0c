"""SGLang's names against the installed version, in a process of its own: importing SGLang patches transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest
import torch

from hybrid_rl.engine.sglang.interface import TESTED, installed, server_arguments
from hybrid_rl.engine.sglang.process import environment

LOOK = """
import json, sys
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.common import SafeUnpickler
from hybrid_rl.engine.sglang.interface import lacking
found = lacking(json.loads(sys.argv[1]))
del TokenizerManager.abort_request
print(json.dumps([found, lacking(["no_such_argument"])]))
"""


def test_the_installed_version_has_every_name_that_is_used() -> None:
    arguments = {
        name
        for device in ("cpu", "cuda:1")
        for name in server_arguments("m", [1], slots=1, tokens=64, dtype=torch.bfloat16, device=torch.device(device))
    } | {"random_seed"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK, json.dumps(sorted(arguments))], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 0, result.stderr
    found, broken = json.loads(result.stdout.splitlines()[-1])
    assert found == [], f"SGLang {installed()} broke these names; hybrid_rl was last tested with {TESTED}"
    assert broken == [
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.abort_request",
        "argument no_such_argument (engine.arguments)",
    ]
    assert installed() == TESTED


def test_the_trainer_does_not_import_it(make_engine, tiny_folder) -> None:
    """Its import patches the trainer's transformers, and reads and writes environment variables."""
    engine = make_engine(tiny_folder)
    engine.update_weights([dict(engine.weights())], version=1)
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def test_its_processes_see_no_variable_that_changes_results(monkeypatch: pytest.MonkeyPatch, make_engine, tiny_folder) -> None:
    host = psutil.Process(make_engine(tiny_folder)._host.pid)
    for process in (host, *host.children(recursive=True)):
        assert "SGLANG_USE_CPU_ENGINE" in process.environ()
        assert not {"SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & process.environ().keys()
