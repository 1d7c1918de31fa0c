"""Every command, snippet and setting in the documentation, tried or at least composed; a block that nothing checks fails.

A finished run of a tiny model stands in for `outputs/reverse/<run>`, and a tiny model's folder for those below /models.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from omegaconf import OmegaConf

import hybrid_rl
from hybrid_rl import compare, push, replay, run, sweep, view
from hybrid_rl.algo.contract import check_parts
from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight import values
from hybrid_rl.preflight.hydra_private import parse_arguments
from hybrid_rl.preflight.names import CONF, OPEN, groups, keys
from hybrid_rl.preflight.settings import hydra_folders, load
from hybrid_rl.report import __main__ as report
from hybrid_rl.types import Task

pytestmark = [pytest.mark.xdist_group("docs"), pytest.mark.slow]  # one run for all of them
ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "recipes/*/README.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)

# what a page's snippets are saved as, in the order in which they stand there; "" is run as it is
SAVED = {
    ("README.md", "python"): ["my_rewards.py"],
    ("README.md", "yaml"): ["my_conf/recipe/mine.yaml"],
    ("docs/algorithms.md", "python"): ["ranked.py"],
    ("docs/algorithms.md", "yaml"): ["my_conf/algo/advantage/ranked.yaml", "my_conf/algo/ranked.yaml"],
    ("docs/environments.md", "python"): ["number_game.py"],
    ("docs/own_task.md", "python"): ["sums.py", "make_data.py"],
    ("docs/own_task.md", "yaml"): ["my_conf/recipe/mine.yaml"],
    ("docs/rewards.md", "python"): ["own_rewards.py"],
    ("docs/runs.md", "python"): [""],
}
# pages whose YAML is of sections of a recipe: the first is complete, the later ones say more of it
SECTIONED = ("docs/data.md", "docs/environments.md", "docs/rewards.md", "docs/sandbox.md")
# what a page tells to have besides
BESIDES = {
    "docs/environments.md": {
        "my_tools.py": "".join(
            f'def {name}(text: str) -> str:\n    """Look a text up.\n\n    Args:\n        text: what\n    """\n    return text\n\n\n'
            for name in ("search", "lookup")
        )
    },
    "docs/rewards.md": {"my_rewards.py": "def careful(completion, task):\n    return 1.0\n"},
}
DEMONSTRATIONS = "".join(
    f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}", "demonstration": "{n + 1}"}}\n' for n in range(20)
)
TASKS = "".join(f'{{"prompt": "What is {n} + 30?", "answer": "{n + 30}"}}\n' for n in range(8))
# indented blocks that are no commands: page, how they begin, why nothing runs them
TEXTS = {
    (
        "README.md",
        "hybrid_rl · recipe reverse",
    ): "output of the whole recipe, whose numbers tests/test_recipe.py looks at",
    ("README.md", "hybrid_rl: rollout.group_sise=8"): "a message, which a test below compares",
    ("docs/algorithms.md", "rewards ─► advantage"): "a drawing",
    ("docs/concepts.md", "handover.to_engine()"): "an outline of the loop",
    ("docs/concepts.md", "outputs/reverse/<date_time>/"): "a run's folder",
    ("docs/data.md", "note:    dropped"): "output, which tests/data/test_tasks.py compares",
    ("docs/failures.md", "step 12: loss is nan"): "output after a fault",
    ("docs/failures.md", "hybrid_rl: rank 1 hangs"): "output after a fault",
    ("docs/gpus.md", "hand_over   wake"): "an outline of the handover",
    ("docs/own_task.md", "evaluation reward: base"): "output, which tests/test_docs.py reads",
    ("recipes/reverse_opd/README.md", "model:   embedded"): "output of the whole recipe",
    ("recipes/arithmetic/README.md", "system     Add."): "a prompt",
    ("recipes/alphabet_sort/README.md", "user       dw"): "a conversation",
    ("recipes/guess_number/README.md", "user       Guess"): "a conversation",
    ("recipes/countdown/README.md", "system     Use"): "a prompt",
    ("recipes/format/README.md", "system     Order"): "a prompt",
}
# commands that are not tried: why
NOT_TRIED = {
    "source": "a shell's own",
    "export": "a shell's own",
    "head": "shows a file",
    "hf": "the network",
    "-m hybrid_rl.model_folder.smollm2": "needs a package with weights; tests/model_folder/test_smollm2.py",
    "pre-commit": "a tool of the contributor's own environment",
    "-m http.server": "serves until it is ended",
    "-m pip": "the network",
    "-m tests.model_folder.families": "writes a page, for minutes; tests/model_folder/test_families.py",
    "-m benchmarks.partial": "takes minutes; tests/benchmarks/test_partial.py",
    "-m benchmarks.gpu": "needs a GPU; tests/benchmarks/test_gpu.py",
    "-m benchmarks.growth": "takes minutes; tests/benchmarks/test_growth.py",
}
PROGRAMS = ("python", "python3", "torchrun", "accelerate", "make", "pip", "source", "export", "hf", "head")


@dataclass(frozen=True)
class Block:
    page: str
    kind: str  # of a fence; "" for an indented block
    text: str

    def commands(self) -> list[str]:
        """Each command of the block; none of a text or a snippet."""
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        fits = self.kind == "sh" or (not self.kind and all(line.split()[0] in PROGRAMS for line in lines))
        return lines if fits else []


def blocks(page: str) -> list[Block]:
    found: list[Block] = []

    def fenced(match: re.Match[str]) -> str:
        found.append(Block(page, match[1] or "none", match[2]))
        return ""

    text = re.sub(r"^```(\w*).*?\n(.*?)^```", fenced, (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^|\n\n)((?: {4}.*\n|\n(?= {4}))+)", text)
    for text in indented:  # commands may follow a text after an empty line
        parts = [Block(page, "", part) for part in text.strip("\n").split("\n\n")]
        texts = [part.text for part in parts if not part.commands()]
        found += [part for part in parts if part.commands()] + [Block(page, "", "\n\n".join(texts))] * bool(texts)
    return found


EVERY = [block for page in PAGES for block in blocks(page)]


def whole(block: Block) -> bool:
    """Whether a snippet is a whole recipe; a command of its page composes it."""
    return block.kind == "yaml" and block.page in SECTIONED and block.text.startswith("# @package")


CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def inline() -> Iterator[tuple[str, str]]:
    """(page, code) of all code within text."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
        yield from ((page, code) for code in CODE.findall(text))


COMMANDS = [
    *((block.page, line) for block in EVERY for line in block.commands()),
    *((page, code) for page, code in inline() if code.split()[0] in PROGRAMS[:-1] and len(code.split()) > 1),
]


def test_something_checks_every_block() -> None:
    left = set(TEXTS)
    counts = {place: len(names) for place, names in SAVED.items()}
    for block in EVERY:
        if block.commands() or (block.kind == "yaml" and block.page in SECTIONED):
            continue
        text = next((key for key in TEXTS if key[0] == block.page and block.text.strip().startswith(key[1])), None)
        if block.kind:
            counts[block.page, block.kind] = counts.get((block.page, block.kind), 0) - 1
        else:
            assert text, f"{block.page}: nothing checks\n{block.text}"
            left.discard(text)
    assert {place: count for place, count in counts.items() if count} == {}, (
        "snippets that SAVED lacks or has too many of"
    )
    assert left == set(), "texts that are gone"


# ---- a folder for each page, with what it tells to save ---------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, by the snippet of docs/runs.md with smaller settings, in a folder in which commands may look for it."""
    folder = tmp_path_factory.mktemp("ran")
    train, small = hybrid_rl.train, [
        "sft.steps=2", "rollout.batch_size=8", "rollout.group_size=4", "rollout.max_tokens=8", "algo.minibatches=1", "data.eval_tasks=4",
        "model.tiny.hidden_size=16", "model.tiny.intermediate_size=16", "rl.max_empty_steps=0", "rl.checkpoint_every=10", "algo.silent_by=none",
        "hydra.run.dir=outputs/reverse/run",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(hybrid_rl, "train", lambda recipe, given: train(recipe, [*given, *small]))
        (folder / "outputs" / "reverse" / "2026-11-29_20-14-30").mkdir(parents=True)
        (snippet,) = (block.text for block in EVERY if (block.page, block.kind) == ("docs/runs.md", "python"))
        there: dict[str, Any] = {}
        exec(snippet, there)  # noqa: S102
        assert len(there["run"].metrics()) == 10
        assert len(there["run"].rollouts(10)) == 8
    for name in ("another", "folder", "sweep_time/0", "sweep_time/1"):
        (folder / "outputs" / "reverse" / name).parent.mkdir(exist_ok=True)
        (folder / "outputs" / "reverse" / name).symlink_to(folder / "outputs" / "reverse" / "run")
    return folder


@pytest.fixture(scope="module")
def folder_of_page(ran: Path, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of_page(page: str) -> Path:
        if page in made:
            return made[page]
        made[page] = folder = tmp_path_factory.mktemp(page.replace("/", "_"))
        (folder / "outputs").symlink_to(ran / "outputs")
        files = {
            "sft.jsonl": DEMONSTRATIONS,
            "train.jsonl": TASKS,
            "test.jsonl": TASKS.replace("What is", "Add:"),
        } | BESIDES.get(page, {})
        for kind in ("python", "yaml"):
            snippets = (block.text for block in EVERY if (block.page, block.kind) == (page, kind))
            files |= dict(zip(SAVED.get((page, kind), []), snippets, strict=False))
        recipes = [block.text for block in EVERY if block.page == page and whole(block)]
        files |= dict(zip(["my_conf/recipe/mine.yaml"], recipes, strict=False))
        for name, text in files.items():
            if name.endswith((".py", ".yaml", ".jsonl", ".md")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text.replace("/models/SmolLM2-135M-Instruct", str(tiny_folder)))
        return folder

    return folder_of_page


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A cache in which the tiny model stands for that of preset=smollm2."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "hybrid_rl").mkdir()
    (cache / "hybrid_rl" / "SmolLM2-135M-Instruct").symlink_to(tiny_folder)
    return cache


@pytest.fixture
def on_page(folder_of_page, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Enter a page's folder, where its modules can be imported; no tracker and no GPU's engine need be installed."""
    before = set(sys.modules)
    monkeypatch.setattr(values.trackers, "missing", lambda kind: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2))

    def on_page(page: str) -> Path:
        monkeypatch.chdir(folder_of_page(page))
        monkeypatch.syspath_prepend(str(folder_of_page(page)))
        return folder_of_page(page)

    yield on_page
    for name in set(sys.modules) - before:
        if "." not in name and Path(getattr(sys.modules[name], "__file__", None) or "/").parent.name.endswith("md0"):
            del sys.modules[name]


# ---- commands --------------------------------------------------------------------------------------------------------


def compose(arguments: list[str]) -> None:
    """Refuse what `python -m hybrid_rl.run` would refuse before torch loads; of a user's own recipe, also what a dry run refuses."""
    given = parse_arguments(arguments)
    own = Path(given.config_dir) if given.config_dir else None
    if given.cfg or (own and "dry_run=true" in arguments):
        assert run.main(arguments) == 0
        return
    jobs = sweep.jobs(given.overrides) if given.multirun else [given.overrides]
    for job in (jobs[0], jobs[-1])[: len(jobs)]:
        load(job, own)
    if any(override.startswith("hydra") for override in jobs[0]):
        hydra_folders(jobs[0], own)


def serve_nothing(patch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    patch.setattr(view.ThreadingHTTPServer, "serve_forever", lambda self: None)
    assert view.main(arguments) == 0


def push_nothing(patch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    patch.setattr(push, "push", lambda folder, repo, private: str((folder / "final" / "config.json").stat()))
    assert push.main(arguments) == 0


def write_report(patch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    patch.setattr(sys, "argv", ["report", *arguments])
    report.main()


COMMANDS_OF: dict[str, Callable[[pytest.MonkeyPatch, list[str]], None]] = {
    "run": lambda _, arguments: compose(arguments),
    "evaluate": lambda _, arguments: compose([*arguments, "sft.steps=0", "rl.steps=0"]),
    "compare": lambda _, arguments: _zero(compare.main(arguments)),
    "view": serve_nothing,
    "push": push_nothing,
    "report": write_report,
    "replay": lambda _, arguments: _zero(replay.main(arguments) - 2),  # this run has no bad batch
    "doctor": lambda _, arguments: _zero(len(arguments)),
}


def _zero(code: int) -> None:
    assert code == 0


def attempt(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Try one command; raise for a program, an option or a file that is not known."""
    program, *rest = words
    if any(" ".join(words).startswith(name) or " ".join(rest).startswith(name) for name in NOT_TRIED):
        return
    match program, rest:
        case (("python" | "python3"), ["-m", module, *arguments]):
            package, _, name = module.partition(".")
            assert package == "hybrid_rl", f"nothing tries {module}"
            if not arguments:
                assert name in COMMANDS_OF
                return
            COMMANDS_OF[name](patch, arguments)
        case (("python" | "python3"), ["-c", code]):
            compile(code, "documentation", "exec")
        case (("python" | "python3"), [script, *_]):
            assert (ROOT / script).is_file() or Path(script).is_file()
        case "torchrun", _:
            from torch.distributed.run import get_args_parser

            given = get_args_parser().parse_args(rest)
            attempt(["python", "-m", given.training_script, *given.training_script_args], patch)
        case "accelerate", ["launch", *arguments]:
            from accelerate.commands.launch import launch_command_parser

            given = launch_command_parser().parse_args(arguments)
            attempt(["python", "-m", given.training_script, *given.training_script_args], patch)
        case "make", [*arguments]:
            done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            for variable in re.findall(r"(?m)^(\w+)=", "\n".join(arguments)):
                assert re.search(rf"\$\({variable}\)", (ROOT / "Makefile").read_text()), variable
        case "pip", ["install", "-e", package]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(package.removeprefix(".[").removesuffix("]").split(",")) <= set(extras), package
        case ("pip", ["install", *_]):
            pass  # the network
        case _:
            raise AssertionError(f"nothing tries {program}")


@pytest.fixture(scope="module")
def tried() -> set[str]:
    """The commands that another page has too are tried once."""
    return set()


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_the_commands_of_a_page(page, tried: set[str], on_page, tiny_folder: Path, monkeypatch, capsys):
    on_page(page)
    tried.difference_update({command for command in tried if "my_conf" in command})  # a folder of this page
    for command in dict.fromkeys(line for other, line in COMMANDS if other == page):
        here = re.sub(
            r"(?<!/)<(run|folder|another)\b[^>]*>",
            r"outputs/reverse/\1",
            re.sub(r"/models/[\w.-]+", str(tiny_folder), command),
        )
        here = (
            re.sub(r"<(\w+)[^>]*>", r"\1", here)
            .replace("model.path=first/final", f"model.path={tiny_folder}")
            .replace("resume=first", "resume=outputs/reverse/run")
        )
        if here in tried:
            continue
        tried.add(here)
        for part in " ".join(shlex.quote(word) for word in shlex.split(here, comments=True)).split(" '&&' "):
            try:
                attempt(shlex.split(part), monkeypatch)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{page}: {command}: {error!r}; {capsys.readouterr()}") from error


# ---- snippets, settings and messages ---------------------------------------------------------------------------------


def variants(text: str) -> Iterator[str]:
    """The text, and with each value that a comment `# or: …` below a line offers."""
    yield text
    for other in re.findall(r"# or: (.*)", text):
        yield re.sub(r"(?m)^( *\w+): .*\n(?: *# or:.*\n?)+", lambda line, other=other: f"{line[1]}: {other}\n", text)


SECTIONS_OF_RECIPES = [
    (block.page, text)
    for block in EVERY
    if block.kind == "yaml" and block.page in SECTIONED and not whole(block)
    for text in variants(block.text)
]


@pytest.mark.parametrize(("page", "text"), SECTIONS_OF_RECIPES, ids=lambda value: value[:20])
def test_the_sections_of_a_recipe_compose(page: str, text: str, on_page, tmp_path: Path) -> None:
    on_page(page)
    first = next(text for other, text in SECTIONS_OF_RECIPES if other == page)
    usual = {
        "name": "mine",
        "data": {"_target_": "hybrid_rl.data.files.load_tasks", "rl": "train.jsonl", "eval": "test.jsonl"},
    }
    usual["reward"] = {"_target_": "hybrid_rl.rewards.exact"}
    given = OmegaConf.merge({**usual, **yaml.safe_load(first)}, yaml.safe_load(text))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{OmegaConf.to_yaml(given)}")
    config = load(["+recipe=mine"], tmp_path)
    assert {name: OmegaConf.to_container(config[name]) for name in yaml.safe_load(text)}


@pytest.mark.parametrize("page", ["README.md", "docs/rewards.md", "docs/own_task.md"])
def test_the_rewards_of_a_page_pay_right_answers_more(page: str, folder_of_page) -> None:
    name = next(name for name in SAVED[page, "python"])
    there: dict[str, Any] = {"__name__": "snippet"}
    exec((folder_of_page(page) / name).read_text(), there)  # noqa: S102
    reward = there.get("reward") or there["exact"]
    task = Task(id="a", messages=({"role": "user", "content": "1 + 1 ="},), answer="2")
    right, wrong = reward(" 2 ", task), reward("3", task)
    assert (right, wrong) in ((1.0, 0.0), ((1.0, {"short": 1.0}), (0.0, {"short": 1.0})))


def test_an_advantage_of_ones_own_holds_the_contract(on_page) -> None:
    on_page("docs/algorithms.md")
    overrides = ["+recipe=reverse", "algo=ranked", "algo.advantage.power=0.5"]
    check_parts(cast(Config, OmegaConf.to_object(load(overrides, Path("my_conf")))))


SECTIONS = (
    "algo",
    "checkpoint",
    "engine",
    "eval",
    "export",
    "handover",
    "model",
    "policy",
    "rl",
    "rollout",
    "sft",
    "tracker",
)
GROUPS = groups([CONF])
KNOWN = set(keys(OmegaConf.structured(Config))) | GROUPS
FILES = (".py", ".md", ".yaml", ".json", "/", "…", "*")


@pytest.mark.parametrize("page", PAGES)
def test_the_settings_that_a_page_names_exist(page: str) -> None:
    """Inline code like `rollout.group_size=4` or `algo/loss=gspo`: the key, and the file of a choice."""
    for other, code in inline():
        for word in code.split() if other == page else ():
            key, _, value = word.strip("'+").partition("=")
            dotted = key.replace("/", ".")
            if dotted.split(".")[0] not in SECTIONS or key.endswith(FILES) or ("/" in key and key not in GROUPS):
                continue  # no setting: a file, a metric
            if value and key in GROUPS and re.fullmatch(r"\w+", value):
                assert (CONF / key / f"{value}.yaml").is_file(), f"{page}: {code}"
            known = key in KNOWN or dotted in KNOWN or dotted.startswith(tuple(f"{name}." for name in OPEN))
            assert known or (key in SECTIONS and not value), f"{page}: {code}"


def test_the_message_of_the_readme() -> None:
    with pytest.raises(ConfigError) as raised:
        load(["+recipe=reverse", "rollout.group_sise=8"])
    assert f"    hybrid_rl: {raised.value}\n" in (ROOT / "README.md").read_text()
