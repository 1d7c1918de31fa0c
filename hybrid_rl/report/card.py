"""Write the model card of an exported model: README.md as the Hugging Face hub shows it, and the reward's curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_rl.report.charts import EVALUATIONS, learning_charts
from hybrid_rl.report.console import visible
from hybrid_rl.report.numbers import number, shown
from hybrid_rl.report.page import method, passes
from hybrid_rl.report.read import Run, mapping, read_run, text
from hybrid_rl.report.templates import templates
from hybrid_rl.run_folder.files import write_text
from hybrid_rl.run_folder.origin import read_origin

CURVE = "reward.svg"


def write_card(folder: Path, summary: dict[str, Any]) -> None:
    """Write README.md, and the reward's curve if there was RL, into final/ of the run in `folder`.

    They take the place of the README.md that came from the source model. `summary` is what summary.json will hold.
    """
    run, final = read_run(folder, summary), folder / "final"
    charts = [chart for chart in learning_charts(run.sft, run.evals, run.rl, "") if chart.title == "Reward"]
    if charts and run.rl:
        svg = templates().get_template("curve.svg.jinja").render(chart=charts[0])
        write_text(final / CURVE, visible(svg))
    write_text(final / "README.md", visible(_card(run, bool(charts and run.rl))))


def _card(run: Run, curve: bool) -> str:
    from huggingface_hub import ModelCardData

    name, origin = text(run.config.get("name")), read_origin(run.folder)
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["hybrid_rl", "reinforcement-learning"]
    )
    model, git = mapping(run.summary, "model"), mapping(origin, "git")
    lines = [f"---\n{data.to_yaml()}\n---", f"# {name}, trained with hybrid_rl"]
    parameters = number(model.get("parameters"))
    lines.append(
        f"From `{text(model.get('path'))}`, {parameters:,.0f} parameters, seed {text(run.config.get('seed'))}."
    )
    if steps := method(run.config):
        lines.append(f"{mapping(run.config, 'rl')['steps']} RL steps: " + ", ".join(steps) + ".")
    lines.append(_evaluations(run))
    notes = mapping(run.summary, "tasks").get("notes")
    if isinstance(notes, list) and notes:
        lines.append("## Data\n\n" + "\n".join(f"- {text(note)}" for note in notes))
    if curve:
        lines.append(f"![Reward by RL step]({CURVE})")
    if command := text(origin.get("command")):
        lines.append(f"## Command\n\n```\n{command}\n```")
    versions = [f"{name} {value}" for name, value in mapping(run.summary, "versions").items()]
    commit = f"git commit {git['commit']}{', with changes' if git.get('dirty') else ''}" if git.get("commit") else ""
    lines.append("## Versions\n\n" + ", ".join([*versions, *filter(None, [commit])]) + ".")
    return "\n\n".join(lines) + "\n"


def _evaluations(run: Run) -> str:
    """Return the table of the evaluations that the run has."""
    condition = passes(run)
    rows = [f"| evaluation | reward | correct{condition and f' ({condition})'} | tasks |", "|---|---|---|---|"]
    for name, (label, *_) in EVALUATIONS.items():
        if record := run.evaluation(name):
            correct = shown(record.get("correct"), percent=True)
            rows.append(f"| {label} | {shown(record.get('reward'))} | {correct} | {shown(record.get('tasks'))} |")
    return "\n".join(rows)
