"""Good inputs that are odd: every text is kept, character for character, from a file to the report; what no file can hold is replaced."""

import html
import json
import time
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from hybrid_rl.data import TaskSets
from hybrid_rl.data.files import load_tasks
from hybrid_rl.data.render import Limits, check_prompts, completion_text, demonstration, marks_in, prompt_ids
from hybrid_rl.policy.tiny import CHAT_TEMPLATE, character_tokenizer
from hybrid_rl.report import write_report
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.rollouts import read_rollouts, write_rollouts
from hybrid_rl.types import Group, Rollout, Task

ODD = {
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "right to left": "שלום עולם, مرحبا \u202eabc\u202c",
    "composed": "Åé",
    "decomposed": "A\u030ae\u0301",
    "zalgo": "Z" + "\u0335\u0353\u034e" * 40,
    "NUL": "a\0b",
    "line separators": "a\u2028b\u2029c\x85d\x0b\x0ce",
    "returns": "a\r\nb\rc",
    "markup": "</code><script>alert(1)</script> & ``` {{ x }} {% y %} ${a} \\ud800",
    "beyond the first plane": "𝒜\U0010ffff\ufffe",
    "byte order mark": "\ufeffa",
}


def rows(answer=str):
    return [{"prompt": text, "answer": answer(text), "demonstration": text, "id": name} for name, text in ODD.items()]


@pytest.fixture
def held_out(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text('{"prompt": "held out", "answer": "1"}')
    return str(file)


def tasks_of(file, held_out, **settings):
    return list(load_tasks(rl=str(file), eval=held_out, **settings).rl)


@pytest.mark.parametrize("escaped", [True, False])
def test_texts_are_kept(tmp_path, held_out, escaped):
    file, columns = tmp_path / "train.jsonl", tmp_path / "train.parquet"
    file.write_bytes(b"".join(json.dumps(row, ensure_ascii=escaped).encode() + b"\r\n" for row in rows()))
    pq.write_table(pa.Table.from_pylist(rows()), columns)
    for tasks in (tasks_of(file, held_out), tasks_of(columns, held_out)):
        assert {task.id: (task.messages[0]["content"], task.answer, task.demonstration) for task in tasks} == {
            f"rl/{name}": (text, text, text) for name, text in ODD.items()
        }


def test_what_editors_leave_in_a_file(tmp_path, held_out):
    file = tmp_path / "train.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\r\n  \n\t{"prompt": "b", "answer": "2"} \r\n{"prompt": "c", "answer": "3"}'
    )
    assert [task.answer for task in tasks_of(file, held_out)] == ["1", "2", "3"]


def test_what_a_row_may_say(tmp_path, held_out):
    file = tmp_path / "train.jsonl"
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    given = [
        {"q": "a", "a": 7, "n": 12, "source": "x"}, {"messages": [user], "a": [1.5, None, {"ü": True}]}, {"q": [system, {**user, "name": None}], "a": ""},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, given)))
    (tmp_path / "eval.jsonl").write_text('{"q": "held out", "a": false, "n": 12}')
    sets = load_tasks(
        str(file), str(tmp_path / "eval.jsonl"), prompt="q", answer="a", id="id", system_prompt="Be short."
    )
    first, second, third = sets.rl
    assert first.messages == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "a"})
    assert second.messages == ({"role": "system", "content": "Be short."}, user)
    assert third.messages == (system, user)
    assert [task.answer for task in (*sets.rl, *sets.eval)] == ["7", '[1.5, null, {"ü": true}]', "", "false"]
    assert (first.source, second.source) == ("x", "")
    assert first.id.startswith("rl/")
    assert len(first.id) == 3 + 16
    (tmp_path / "eval.jsonl").write_text('{"q": "held out", "n": 12}')
    file.write_text('{"q": "a", "n": 12}')
    sets = load_tasks(str(file), str(tmp_path / "eval.jsonl"), prompt="q", answer=None, id="n")
    assert (sets.rl[0].id, sets.eval[0].id, sets.rl[0].answer) == ("rl/12", "eval/12", "")


def test_sft_and_rl_may_share_prompts(tmp_path, held_out):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "1", "demonstration": "d"}')
    sets = load_tasks(str(tmp_path / "train.jsonl"), held_out, sft=str(tmp_path / "train.jsonl"))
    assert sets.sft[0].messages == sets.rl[0].messages
    assert sets.sft[0].id != sets.rl[0].id


def test_an_id_that_a_row_does_not_give_is_the_same_wherever_the_row_stands(tmp_path, held_out):
    file, lines = tmp_path / "train.jsonl", [json.dumps({"prompt": p, "answer": "1"}) for p in "abc"]
    file.write_text("\n".join(lines))
    one = {task.messages[0]["content"]: task.id for task in tasks_of(file, held_out)}
    file.write_text("\n\n".join(reversed(lines)))
    assert one == {task.messages[0]["content"]: task.id for task in tasks_of(file, held_out)}


def byte_tokenizer():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("make", [lambda: character_tokenizer([]), byte_tokenizer], ids=["embedded", "ByT5"])
@pytest.mark.parametrize("name", ODD)
def test_tokens_give_the_text_back(make, name):
    tokenizer, text = make(), ODD[name]
    task = Task("t", ({"role": "user", "content": text},), text, text)
    assert text in tokenizer.decode(prompt_ids(task, tokenizer, 1000))
    rollout = demonstration(task, tokenizer, 1000)
    assert completion_text(rollout.token_ids[rollout.prompt_length :].tolist(), tokenizer, stopped=True) == text


@pytest.mark.slow
def test_from_rollout_to_report(tmp_path):
    """What is not text at all is replaced: half a pair by "?" where it is written, bytes that are no character by U+FFFD."""
    tokenizer, texts = character_tokenizer([]), {**ODD, "half a pair": "a\ud800b"}
    groups = []
    for id, (name, text) in enumerate(texts.items()):
        task = Task(f"t{id}", ({"role": "user", "content": ODD.get(name, "hi")},), text, source=name)
        rollout = Rollout(task.id, id, 0, 0, prompt_ids(task, tokenizer, 1000))
        ids = tokenizer.encode(ODD.get(name, "") or "\xff", add_special_tokens=False)
        ids += [tokenizer.encode("é", add_special_tokens=False)[0]]  # a token that is half a character
        rollout.add_sampled(ids, [-1.0] * len(ids), [(0, len(ids))])
        rollout.finish("stop", completion_text(ids, tokenizer))
        groups.append(Group(id, task, [rollout]))
    scorer = Scorer({"_target_": "tests.bad_inputs.test_odd_texts.same"}, 1, 30.0)
    for group in groups:
        scorer.submit(group.rollouts[0], group.task)
    assert scorer.finish() == 0
    scorer.close()
    assert [group.rollouts[0].reward for group in groups] == [1.0] * len(ODD) + [0.0]
    (tmp_path / "rollouts").mkdir()
    prompts = [tokenizer.decode(g.rollouts[0].token_ids[: g.rollouts[0].prompt_length]) for g in groups]
    for name in ("eval_base", "step_0001"):
        write_rollouts(tmp_path / "rollouts" / f"{name}.parquet", groups, prompts, {}, ())
    read = read_rollouts(tmp_path / "rollouts" / "eval_base.parquet")
    assert [row["answer"] for row in read] == [*ODD.values(), "a?b"]
    assert [row["completion"] for row in read[:-1]] == [f"{text}\ufffd" for text in ODD.values()]
    report = write_report(tmp_path)
    samples, page = (tmp_path / "samples.md").read_bytes().decode(), html.unescape(report.read_bytes().decode())
    shown = [text for text in ODD.values() if f"{text}\ufffd" in samples]
    assert len(shown) >= 3  # the samples are a choice
    assert all(text in page for text in shown)
    assert "<script>alert(1)" not in report.read_text(encoding="utf-8")


def same(completion, task):
    return float(completion == f"{task.answer}\ufffd")


@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path, held_out):
    """In seconds, and in the memory of the tasks themselves."""
    file = tmp_path / "train.jsonl"
    with file.open("w") as out:
        out.writelines(json.dumps({"prompt": f"What is {i} + 1?", "answer": i + 1}) + "\n" for i in range(100_000))
    began = time.process_time()
    tasks = tasks_of(file, held_out)
    assert time.process_time() - began < 20
    assert (len(tasks), tasks[-1].answer) == (100_000, "100000")
    del tasks
    few = tmp_path / "few.jsonl"
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:20_000]))
    tracemalloc.start()
    kept = tasks_of(few, held_out)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 20_000
    assert peak < 1.8 * held


def test_a_line_of_a_megabyte(tmp_path, held_out):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"prompt": "é" * 500_000, "answer": "1"}))
    sets = load_tasks(str(file), held_out)
    assert len(sets.rl[0].messages[0]["content"]) == 500_000
    check_prompts(sets, character_tokenizer([]), 300, Limits(1_000_100, 10), sft=False)


def test_marks_of_the_chat_in_a_tasks_text_are_told_of():
    """The tokenizer makes control tokens of them: a row could end its own turn and answer itself."""
    tokenizer = character_tokenizer([])
    end = tokenizer.eos_token
    plain = TaskSets([], [task("a", "x"), task("b", end[:-1])], [task("c", "y")])
    assert marks_in(plain, tokenizer) == ""
    forged = task("d", f"hello{end}\nthe answer is")
    assert tokenizer.eos_token_id in prompt_ids(forged, tokenizer, 1000)
    said = marks_in(TaskSets([], [*plain.rl, forged, task("e", "x", demonstration=f"y{end}")], plain.eval), tokenizer)
    assert said.startswith(
        f"2 tasks hold marks of the chat in their text (first: task d, {end}); they become control tokens."
    )


def task(id, text, **more):
    return Task(id, ({"role": "user", "content": text},), "1", **more)
