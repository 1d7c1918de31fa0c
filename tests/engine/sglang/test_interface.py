"""SGLang's names against the installed version, in a process of its own: importing SGLang patches transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from hybrid_rl.engine.sglang.interface import TESTED, installed, server_arguments
from hybrid_rl.engine.sglang.options import SGLangOptions
from hybrid_rl.engine.sglang.process import environment
from tests.engine.sglang.conftest import INHERITED

LOOK = """
import json, sys
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from hybrid_rl.engine.sglang.interface import RunningEngine, lacking
found = lacking(json.loads(sys.argv[1]))
del TokenizerManager.abort_request
try:
    RunningEngine({"no_such_argument": 1})
except RuntimeError as error:
    print(json.dumps([found, str(error)]))
"""


def test_the_installed_version_has_every_name_that_is_used() -> None:
    arguments = {
        name
        for device in ("cpu", "cuda:1")
        for name in server_arguments("m", [1], 1, 64, SGLangOptions(torch.device(device), torch.bfloat16))
    } | {"random_seed"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK, json.dumps(sorted(arguments))],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert result.returncode == 0, result.stderr
    found, broken = json.loads(result.stdout.splitlines()[-1])
    assert found == [], f"SGLang {installed()} broke these names; hybrid_rl was last tested with {TESTED}"
    assert broken == (
        f"SGLang {TESTED} has no sglang.srt.managers.tokenizer_manager:TokenizerManager.abort_request, argument no_such_argument "
        f"(engine.arguments); hybrid_rl needs 0.5.21 or newer and is tested with {TESTED}"
    )
    assert installed() == TESTED


def test_the_trainer_does_not_import_it(make_engine, tiny_folder: Path) -> None:
    """Its import patches the trainer's transformers, and reads and writes environment variables."""
    engine = make_engine(tiny_folder)
    engine.update_weights([dict(engine.weights())], version=1)
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def test_its_process_sees_no_variable_that_changes_results(make_engine, tiny_folder: Path) -> None:
    assert os.environ.keys() >= INHERITED.keys()
    seen = psutil.Process(make_engine(tiny_folder)._host.pid).environ()
    assert "SGLANG_USE_CPU_ENGINE" in seen
    assert not seen.keys() & INHERITED.keys()
