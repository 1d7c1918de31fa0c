"""The model card of an exported model."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from huggingface_hub import ModelCard

from hybrid_rl.report import write_card
from hybrid_rl.run_folder.files import write_json
from hybrid_rl.run_folder.origin import FILE
from tests.report.test_comparison import make_run

SUMMARY = {
    "eval/rl": 0.75,
    "versions": {"torch": "9.9"},
    "model": {"path": "embedded", "parameters": 1234},
    "tasks": {"rl": 9, "notes": ["dropped 1 of 10 rl tasks: too long"]},
}


def test_the_card(tmp_path):
    run = tmp_path / "run"
    make_run(run, 5, 1e-4, 0.5)
    write_json(
        run / FILE, {"command": "python -m hybrid_rl.run +recipe=reverse", "git": {"commit": "0123abc", "dirty": True}}
    )
    (run / "final").mkdir()
    (run / "final" / "README.md").write_text("of the source model")
    write_card(run, SUMMARY)
    card = ModelCard.load(run / "final" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["hybrid_rl", "reinforcement-learning"]
    for text in (
        "# reverse, trained with hybrid_rl",
        "1,234 parameters, seed 5",
        "| base | 0.1 | – | – |",
        "| after RL | 0.75 | – | – |",
        "python -m hybrid_rl.run +recipe=reverse",
        "torch 9.9, git commit 0123abc, with changes.",
        "](reward.svg)",
        "## Data\n\n- dropped 1 of 10 rl tasks: too long",
    ):
        assert text in card.content
    assert "of the source" not in card.content
    svg = ET.parse(run / "final" / "reward.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(svg.findall("{*}path")) > 5


def test_a_run_without_rl_has_no_curve(tmp_path):
    run = tmp_path / "run"
    make_run(run, 5, 1e-4, 0.5)
    (run / "metrics.jsonl").write_text("")
    (run / "final").mkdir()
    write_card(run, {})
    assert [file.name for file in (run / "final").iterdir()] == ["README.md"]
