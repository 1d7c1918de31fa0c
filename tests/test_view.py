"""The rollout viewer: what its server answers, and the page in a headless Chromium."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from hybrid_rl import view
from hybrid_rl.report.viewer import Unknown, Viewer
from hybrid_rl.run_folder.rollouts import TOKENS, write_rollouts
from hybrid_rl.types import Group, Rollout, Task

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title='broken'>"
GROUPS, MEMBERS = 3, 4


def rollout(tokenizer, group: int, index: int, text: str) -> Rollout:
    made = Rollout(f"task{group}", group, index, 10 * group + index, tokenizer.encode(f"question {group}"))
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    made.add_sampled(ids, [-0.5 * i for i in range(len(ids))], [(group, len(ids))])
    made.completion, made.finish_reason = text, "length" if index == 3 else "stop"
    made.outcome = made.reward = None if (group, index) == (2, 0) else (group + index) / 10
    made.measures, made.extracted = {"format": 0.5}, f"found {index}"
    made.reward_parts = {} if made.reward is None else {"exact": made.reward, "form": 1.0}
    made.error, made.fault = ("it broke", "ValueError") if made.reward is None else (None, None)
    return made


TEXT = "answer é of {i}\nto {g} " + EVIL


def write_step(run: Path, tokenizer, step: int, text: str = TEXT, measured: bool = False) -> None:
    groups = []
    for g in range(GROUPS):
        members = [rollout(tokenizer, g, i, text.format(g=g, i=i)) for i in range(MEMBERS)]
        groups.append(
            Group(g, Task(f"task{g}", ({"role": "user", "content": "q"},), f"truth {g}", source="ab"[g % 2]), members)
        )
    advantages = {(g, i): i - 1.5 for g in range(GROUPS) for i in range(MEMBERS) if (g, i) != (2, 0)}
    prompts = [f"question {g}" for g in range(GROUPS)]
    tokens = {}
    if measured:
        count = {(r.group_id, r.index): r.sampled for group in groups for r in group.rollouts}
        tokens = {
            key: {"log_ratios": np.linspace(-0.5, 0.5, n), "entropies": np.linspace(0, 3, n)}
            for key, n in count.items()
        }
    path = run / "rollouts" / f"step_{step:04d}.parquet"
    write_rollouts(path, groups, prompts, advantages, set(advantages), tokens)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def run(tmp_path, tiny_folder, tokenizer) -> Path:
    folder = tmp_path / "run"
    (folder / "base_model").mkdir(parents=True)
    shutil.copy(tiny_folder / "tokenizer.json", folder / "base_model")
    (folder / "config.yaml").write_text("name: mine\n")
    (folder / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "reward": 0.25}\n')
    write_step(folder, tokenizer, 1)
    return folder


@pytest.fixture
def address(run):
    server = view.serve(run)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, **headers: str):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return json.loads(answer.read())


def test_the_run(run, address, tokenizer):
    write_step(run, tokenizer, 12)
    for name in ("eval_rl", "eval_base", "eval_step_0010"):
        shutil.copy(run / "rollouts" / "step_0001.parquet", run / "rollouts" / f"{name}.parquet")
    found = get(f"{address}/api/run")
    assert (found["name"], found["finished"]) == ("mine", False)
    names = ["eval_base", "step_0001", "eval_step_0010", "step_0012", "eval_rl"]
    assert [file["name"] for file in found["files"]] == names
    assert [file["reward"] for file in found["files"]] == [None, 0.25, None, None, None]


def test_rows_and_search(address):
    rows = get(f"{address}/api/rows?file=step_0001")["rows"]
    assert len(rows) == GROUPS * MEMBERS
    assert rows[5]["reward_parts"] == {"exact": 0.2, "form": 1.0}
    assert (rows[8]["reward"], rows[8]["fault"], rows[8]["advantage"]) == (None, "ValueError", None)
    found = get(f"{address}/api/rows?file=step_0001&q={quote('É OF 2')}")["rows"]
    assert [row["index"] for row in found] == [2] * GROUPS
    assert [row["group_id"] for row in get(f"{address}/api/rows?file=step_0001&q=truth+1")["rows"]] == [1] * MEMBERS


def test_tokens_of_a_rollout(address, tokenizer):
    (found,) = get(f"{address}/api/rollouts?file=step_0001&rows=6")
    tokens = found["tokens"]
    text = f"answer é of 2\nto 1 {EVIL}"
    assert "".join(tokens["text"]) == text + tokenizer.eos_token
    assert tokens["id"] == [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokens["logprob"] == [-0.5 * i for i in range(len(tokens["id"]))]
    assert set(tokens["sampled"]) == {1}
    assert found["versions"] == [[1, len(tokens["id"])]]


def test_control_characters_do_not_reach_the_page(run, tokenizer):
    write_step(run, tokenizer, 2, "a\x1b[2J\u202eb")
    (found,) = Viewer(run).rollouts("step_0002", [0])
    assert found["completion"] == r"a\x1b[2J\u202eb"
    assert not {"\x1b", "\u202e"} & set("".join(found["tokens"]["text"]))


@pytest.mark.parametrize("path", ["/api/rows?file=../../x", "/api/rows?file=step_0009", "/api/rollouts?file=step_0001&rows=99", "/api/rollouts?file=step_0001&rows=a", "/etc/passwd"])  # fmt: skip
def test_what_there_is_not(address, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address + path)


def test_another_site_s_name_for_this_address_is_refused(address):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(f"{address}/api/run", Host="evil.example:80")


def test_a_file_that_is_replaced_is_read_again(run, tokenizer):
    viewer = Viewer(run)
    assert len(viewer.rows("step_0001", "answer")["rows"]) == GROUPS * MEMBERS
    time.sleep(0.01)
    write_step(run, tokenizer, 1, "other")
    assert viewer.rows("step_0001", "answer")["rows"] == []
    (run / "rollouts" / "step_0001.parquet").write_bytes(b"half")
    with pytest.raises(Unknown, match="cannot be read"):
        viewer.rows("step_0001")


def test_a_file_of_an_earlier_version(run):
    path = run / "rollouts" / "step_0001.parquet"
    whole = pq.read_table(path)
    pq.write_table(whole.drop_columns(["outcome", "fault", "measures", "extracted", *TOKENS]), path)
    viewer = Viewer(run)
    found = viewer.rows("step_0001")
    assert found["rows"][0]["outcome"] is None
    assert found["tokens"] == ["logprob"]
    assert viewer.rollouts("step_0001", [0])[0]["extracted"] == ""


def test_without_a_tokenizer_there_is_the_text(run):
    shutil.rmtree(run / "base_model")
    (found,) = Viewer(run).rollouts("step_0001", [0])
    assert found["tokens"]["text"] is None
    assert found["completion"].startswith("answer é")


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    assert view.main([str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err


# ---- in a browser


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def expect():
    """Playwright's assertions, which wait."""
    return pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def page(chromium, address):
    opened = chromium.new_page()
    opened.faults = []
    opened.on("pageerror", lambda error: opened.faults.append(str(error)))
    opened.on("console", lambda line: opened.faults.append(line.text) if line.type == "error" else None)
    opened.goto(address)
    opened.wait_for_selector("article")
    yield opened
    assert [fault for fault in opened.faults if "favicon" not in fault] == []
    opened.close()


def test_a_group_is_shown_side_by_side_and_texts_stay_texts(page):
    assert page.locator("article").count() == MEMBERS
    assert page.locator(".group").count() == GROUPS
    assert EVIL in page.locator("article").first.inner_text()
    assert page.locator("main img").count() == 0
    assert page.title() == "mine: rollouts"
    heading = page.locator("article h2").nth(2).inner_text()
    for fact in (
        "reward 0.2",
        "exact 0.2",
        "form 1",
        "advantage 0.5",
        "format 0.5",
        "extracted found 2",
        "finish stop",
        "version 0",
    ):
        assert fact in " ".join(heading.split())


def background(page, token: int, article: int = 0) -> str:
    return (
        page.locator("article").nth(article).locator(f'span[data-i="{token}"]').evaluate("e => e.style.backgroundColor")
    )


def test_tokens_are_coloured_by_what_is_chosen(page):
    assert background(page, 0) != background(page, 4) != background(page, 12)
    page.select_option("#by", "advantage")
    assert background(page, 0) == background(page, 4)  # one advantage for the whole rollout
    assert "--high" in background(page, 0, 0)  # −1.5
    assert "--low" in background(page, 0, 3)  # 1.5
    assert page.locator("#by option:disabled").all_inner_texts() == ["ratio (not recorded)", "entropy (not recorded)"]
    page.locator('span[data-i="4"]').first.hover()
    tip = page.locator("#tip").inner_text()
    assert "log-probability -2 " in tip
    assert "advantage -1.5" in tip


def test_ratio_and_entropy_are_shown_if_an_update_measured_them(page, run, tokenizer, expect):
    write_step(run, tokenizer, 2, measured=True)
    expect(page.locator("#file option")).to_have_count(2, timeout=15000)
    page.click("#after")
    expect(page.locator("#by option:disabled")).to_have_count(0)
    page.select_option("#by", "log_ratio")
    last = page.locator("article").first.locator("span[data-i]").count() - 1
    assert "--high" in background(page, 0)
    assert "--low" in background(page, last)
    assert page.locator("#low").inner_text() == "0.607"
    page.select_option("#by", "entropy")
    assert "0.00)" in background(page, 0)
    assert "0.75)" in background(page, last)
    page.locator(f'span[data-i="{last}"]').first.hover()
    assert "ratio 1.65\nentropy 3" in page.locator("#tip").inner_text()


def test_filters_search_and_keys(page, expect):
    page.select_option("#only", "failed")
    assert page.locator("#count").inner_text() == "1 of 12 rollouts, 1 groups"
    expect(page.locator("article")).to_have_count(1)
    assert "it broke" in page.locator("article").inner_text()
    page.select_option("#only", "")
    page.select_option("#source", "b")
    assert page.locator("#count").inner_text() == "4 of 12 rollouts, 1 groups"
    page.select_option("#source", "")
    page.fill("#least", "0.4")
    assert page.locator("#count").inner_text() == "3 of 12 rollouts, 2 groups"
    page.fill("#least", "")
    page.fill("#q", "of 2")
    expect(page.locator("#count")).to_have_text("3 of 3 rollouts, 3 groups")
    page.fill("#q", "")
    expect(page.locator("#count")).to_have_text("12 of 12 rollouts, 3 groups")
    page.select_option("#sort", "high")
    assert page.locator(".group b").all_inner_texts() == ["task2", "task1", "task0"]
    page.locator("#groups .group").first.click()
    page.locator("main").click(position={"x": 2, "y": 2})
    page.keyboard.press("j")
    expect(page.locator("main")).to_contain_text("prompt of task1")


def test_a_run_that_goes_on(page, run, tokenizer, expect):
    page.check("#follow")
    write_step(run, tokenizer, 2, "newer")
    expect(page.locator("#file")).to_have_value("step_0002", timeout=15000)
    expect(page.locator("main")).to_contain_text("newer")
    page.click("#before")
    expect(page.locator("#file")).to_have_value("step_0001")


def test_long_completions_are_drawn_as_one_scrolls(chromium, run, tokenizer, address):
    """16 rollouts of 4,096 tokens: what is on the screen at once is a part of them."""
    members = []
    for i in range(16):
        made = Rollout("long", 0, i, i, tokenizer.encode("q"))
        made.add_sampled(
            tokenizer.encode("lorem ipsum ", add_special_tokens=False)[:8] * 512, [-1.0] * 4096, [(0, 4096)]
        )
        made.completion, made.finish_reason, made.reward, made.outcome = "lorem ip" * 512, "stop", 1.0, 1.0
        members.append(made)
    group = Group(0, Task("long", ({"role": "user", "content": "q"},), "a"), members)
    write_rollouts(run / "rollouts" / "step_0003.parquet", [group], ["q"], {}, ())
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{address}/#file=step_0003")
    page.wait_for_selector("article")
    box = page.locator("article pre").first
    first = box.locator("span").count()
    assert 512 <= first < 4096
    for _ in range(40):
        box.evaluate("e => { e.scrollTop = e.scrollHeight; }")
        page.wait_for_timeout(20)
    assert box.locator("span").count() == 4096
    assert page.locator("article pre").nth(15).locator("span").count() < 4096
    page.close()
