"""What MkDocs calls to build the site: pages from the whole checkout, the files that they link to, a page of settings.

Each page keeps the path that it has in the checkout, so that its links hold in both.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import cleandoc, getsource
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hybrid_rl import config as settings

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "recipes/*/README.md", "benchmarks/*.md", "benchmarks/results/*.md")
LINK = re.compile(r"]\(([^)#:]+)(?:#[^)]*)?\)")
GROUPS = {
    "recipe": "Recipes: `+recipe=`",
    "preset": "Presets: `preset=`",
    "engine": "Engines: `engine=`",
    "tracker": "Trackers: `tracker=`",
    "algo": "Algorithms: `algo=`",
    "algo/advantage": "Advantages: `algo/advantage=`",
    "algo/loss": "Losses: `algo/loss=`",
    "algo/aggregation": "Aggregations: `algo/aggregation=`",
    "algo/correction": "Corrections: `algo/correction=[…]`",
    "algo/selection": "Selections: `algo/selection=[…]`",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site under the paths of the checkout: pages, what they link to, and the settings."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {Path(os.path.normpath(p.parent / link)) for p in pages for link in LINK.findall(p.read_text())}
    found = [path for path in sorted(linked - {*pages}) if path.is_file() and path.is_relative_to(ROOT)]
    for file in list(files.documentation_pages()):
        files.remove(file)
    for path in (*pages, *found):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    files.append(File.generated(config, "docs/settings.md", content="\n".join(settings_page())))
    return files


# ---- the page of settings --------------------------------------------------------------------------------------------


def settings_page() -> Iterator[str]:
    """Yield the lines of a page with every key of config.py and every file of conf/."""
    yield "# Settings\n"
    yield (
        "Generated from [`hybrid_rl/config.py`](../hybrid_rl/config.py) and `conf/`. `key=value` on the command line sets a key, "
        "`group=name` chooses a file. `python -m hybrid_rl.run +recipe=reverse --cfg job` prints a composed configuration."
    )
    yield from _section(settings.Config(), "")
    yield from _section(settings.DataConfig(), "data.")
    yield "\n## Choices\n"
    yield "What each file of `conf/` changes. Keys beside a `_target_` are arguments of that function.\n"
    for group, title in GROUPS.items():
        yield f"\n### {title}\n"
        for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
            yield f'```yaml title="{file.relative_to(ROOT)}"\n{file.read_text().strip()}\n```\n'


def _section(section: Any, prefix: str) -> Iterator[str]:
    """Yield the table of a dataclass's plain keys, then those of its sections."""
    yield f"\n## `{prefix[:-1]}`\n" if prefix else "\n## The run\n"
    yield _plain(cleandoc(type(section).__doc__ or "")) + "\n"
    types, meanings = get_type_hints(type(section)), comments(type(section))
    inner = []
    yield "| key | type | default | bounds | meaning |\n|---|---|---|---|---|"
    for field in fields(section):
        value, kind = getattr(section, field.name), types[field.name]
        if is_dataclass(value):
            inner.append((value, f"{prefix}{field.name}."))
            continue
        meaning = [meanings.get(field.name, "")]
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices = comments(kind)
            meaning = [meaning[0] or cleandoc(kind.__doc__ or "")]
            meaning += [f"`{name}`: {choices[name]}" for name in kind.__members__ if name in choices]
        cells = (
            f"`{prefix}{field.name}`",
            _type(kind),
            f"`{_yaml(value)}`",
            _bounds(**field.metadata),
            "; ".join(_plain(part.rstrip(".")) for part in meaning if part),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for child, path in inner:
        yield from _section(child, path)


def comments(cls: type) -> dict[str, str]:
    """Return the comment of each member of a class: beside it, or in the lines directly above it."""
    source = getsource(cls)
    lines, found = source.splitlines(), {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        above, number = [], node.lineno - 2
        while lines[number].strip().startswith("#"):
            above.insert(0, lines[number].strip().lstrip("# "))
            number -= 1
        beside = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset :].strip().lstrip("# ")
        if isinstance(target, ast.Name) and (comment := " ".join([*above, *filter(None, [beside])])):
            found[target.id] = comment
    return found


def _plain(text: str) -> str:
    """Return the text with what Markdown would read as emphasis or a tag escaped, outside code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([_*\[])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _type(kind: Any) -> str:
    if get_origin(kind) is Union:
        return " or ".join("null" if part is type(None) else _type(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if issubclass(kind, Enum):
        return " | ".join(kind.__members__)
    return {str: "text", bool: "true or false", int: "integer", float: "number"}[kind]


def _yaml(value: Any) -> str:
    match value:
        case Enum():
            return value.name
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return value or '""'
        case list():
            return f"[{', '.join(map(_yaml, value))}]"
        case dict():
            return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bounds(least: float | None = None, most: float | None = None, above: float | None = None) -> str:
    low = f"> {above}" if above is not None else f"≥ {least}" if least is not None else ""
    high = f"≤ {most}" if most is not None else ""
    return ", ".join(filter(None, (low, high)))
