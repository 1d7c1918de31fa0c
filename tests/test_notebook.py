"""Training from a notebook: twice in one kernel, and its metrics as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

CELL = """
from hybrid_rl import train
small = ["sft.steps=0", "rl.steps=2", "rollout.batch_size=8", "rollout.group_size=4", "rollout.max_tokens=8", "algo.minibatches=1",
         "data.eval_tasks=2", "model.tiny.hidden_size=16", "algo.silent_by=none", "rl.max_empty_steps=0"]
first = train("reverse", [*small, "hydra.run.dir=first"])
"""
CELLS = [
    CELL,
    'second = train("reverse", [*small, "hydra.run.dir=second"])',
    "second.metrics()[['step', 'reward', 'seconds/update']]",
]
CELLS.append("print(first.metrics()['grad_norm'].tolist() == second.metrics()['grad_norm'].tolist())")


@pytest.mark.slow
def test_two_runs_in_one_kernel_and_their_metrics(tmp_path: Path, monkeypatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    kernel = tmp_path / "kernels" / "here" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": start, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook, kernel_name="here", timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert "step 2/2" in printed
    (table,) = (output["data"] for output in notebook.cells[2].outputs if "data" in output)
    assert "<th>seconds/update</th>" in table["text/html"]
    assert len(table["text/plain"].splitlines()) == 3
    assert notebook.cells[3].outputs[0]["text"] == "True\n", "the second run repeats the first"
