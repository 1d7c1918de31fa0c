"""Conversations with environments: what the policy sees token by token, what is paid, and every way they end or break."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hybrid_rl.config import DataConfig
from hybrid_rl.data.conversation import reply_ids
from hybrid_rl.data.template import fix_template
from hybrid_rl.engine.base import Completion, EngineStats, Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over
from hybrid_rl.policy.layout import pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.tiny import END, character_tokenizer
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Group, Task
from tests.data.test_template import NOON
from tests.ranks import on_ranks

TOKENIZER = fix_template(character_tokenizer([]), DataConfig(), NOON)
TASK = Task("t", ({"role": "user", "content": "guess"},), "5")


class Script:
    """An engine that says what `answer(conversation so far)` returns; a text without its end was cut by the limit."""

    def __init__(self, answer: Callable[[str], str], before_turn: Callable[[], None]):
        self.answer, self.before_turn = answer, before_turn
        self.version, self.team, self.stats = 3, Ranks(), EngineStats()
        self.seen: list[str] = []

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        self.version += 1
        self.before_turn()
        for request in requests:
            before = [*request.prompt_ids, *request.sampled_ids]
            self.seen.append(TOKENIZER.decode(before))
            ids = TOKENIZER.encode(self.answer(self.seen[-1]) + END)
            left = sampling.max_tokens - len(request.sampled_ids)
            reason = "stop" if len(ids) <= left else "length"
            ids = ids[:left]
            yield Completion(
                request.id,
                [*request.sampled_ids, *ids],
                [*request.sampled_logprobs, *[-0.5] * len(ids)],
                [*request.versions, (self.version, len(ids))],
                reason,
            )


def play(
    answer: Callable[[str], str],
    environment: str | dict = "Guess",
    reward: dict | None = None,
    tasks: tuple[Task, ...] = (TASK,),
    max_turns: int = 8,
    max_tokens: int = 400,
    workers: int = 1,
    timeout: float = 5.0,
    before_turn: Callable[[Scorer], None] = lambda scorer: None,
) -> tuple[list[Group], Script]:
    section = {"_target_": f"tests.environments.{environment}"} if isinstance(environment, str) else environment
    scorer = Scorer(reward or {}, workers, timeout, batch=4, environment=section)

    engine = Script(answer, lambda: before_turn(scorer))
    generator = Generator(engine, TOKENIZER, scorer, max_turns=max_turns)  # type: ignore[arg-type]
    try:
        groups = [generator.new_group(i, task, 2, 100, i) for i, task in enumerate(tasks)]
        generator.fill(groups, Sampling(max_tokens=max_tokens))
        return groups, engine
    finally:
        scorer.close()


def bisect(seen: str) -> str:
    """Guess a number from 0 to 8 by halving."""
    low, high, guess = 0, 8, 4
    for reply in seen.split("user\n")[2:]:
        low, high = (guess + 1, high) if reply.startswith("higher") else (low, guess - 1)
        guess = (low + high) // 2
    return str(guess)


def test_a_conversation_is_one_rollout_of_what_was_sampled_and_what_was_replied():
    ((group,), engine) = play(bisect, {"_target_": "tests.environments.Guess", "cost": 0.25})
    turn, opening = "<|im_start|>user\n{}<|im_end|>", "<|im_start|>assistant\n"
    first = turn.format("guess") + opening
    second = first + "4<|im_end|>" + turn.format("higher") + opening
    third = second + "6<|im_end|>" + turn.format("lower") + opening
    assert engine.seen == [first] * 2 + [second] * 2 + [third] * 2
    for rollout in group.rollouts:
        assert TOKENIZER.decode(rollout.token_ids) == third + "5<|im_end|>"
        assert TOKENIZER.decode(rollout.token_ids[rollout.loss_mask]) == "4<|im_end|>6<|im_end|>5<|im_end|>"
        assert (rollout.logprobs == torch.where(torch.from_numpy(rollout.loss_mask), -0.5, 0.0).numpy()).all()
        assert (rollout.turns, rollout.sampled, rollout.finish_reason) == (3, 6, "stop")
        assert rollout.versions == [(4, 2), (5, 2), (6, 2)]
        assert rollout.reward == 0.5
        assert rollout.reward_parts == {"cost": -0.5, "reward": 1.0}
        assert rollout.completion == TOKENIZER.decode(rollout.token_ids[rollout.prompt_length :])


def test_a_task_that_is_done_at_once_is_a_single_turn():
    ((group,), engine) = play(lambda seen: "5")
    assert [(r.turns, r.reward, r.finish_reason, r.completion) for r in group.rollouts] == [
        (1, 1.0, "stop", f"5{END}")
    ] * 2
    assert len(engine.seen) == 2


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("environment", ["Guess", "Slow"])
def test_many_conversations_keep_apart(environment, workers):
    tasks = tuple(Task(str(n), TASK.messages, str(n)) for n in range(9))
    groups, _ = play(bisect, environment, tasks=tasks, workers=workers)
    needed = {0: 3, 1: 2, 2: 3, 3: 4, 4: 1, 5: 3, 6: 2, 7: 3, 8: 4}
    assert {g.task.id: [r.turns for r in g.rollouts] for g in groups} == {str(n): [t] * 2 for n, t in needed.items()}
    assert all(r.reward == 1 for g in groups for r in g.rollouts)


def test_each_limit_has_its_own_reason_and_what_was_paid_counts():
    ((by_turns,), _) = play(lambda seen: "abc", "Echo", max_turns=3)
    ((in_time,), _) = play(bisect, max_turns=3)
    assert [(r.finish_reason, r.turns, r.reward) for r in in_time.rollouts] == [("stop", 3, 1.0)] * 2
    ((by_length,), _) = play(lambda seen: "abc" if "answer" not in seen else "x" * 90, "Echo", max_tokens=60)
    reply = TOKENIZER.encode("<|im_start|>user\nanswer 1 of abc<|im_end|><|im_start|>assistant\n")
    ((by_context,), _) = play(lambda seen: "abc", "Echo", max_tokens=4 + len(reply))
    ((not_yet,), _) = play(lambda seen: "abc", "Echo", max_tokens=4 + len(reply) + 1)
    assert [(r.finish_reason, r.turns, r.reward, r.truncated) for r in by_turns.rollouts] == [
        ("turns", 3, 3.0, False)
    ] * 2
    assert [(r.finish_reason, r.turns, r.reward, r.truncated) for r in by_length.rollouts] == [
        ("length", 2, 2.0, True)
    ] * 2
    assert [(r.finish_reason, r.turns, r.reward, r.truncated) for r in by_context.rollouts] == [
        ("context", 1, 1.0, True)
    ] * 2
    assert [(r.finish_reason, r.turns, r.sampled) for r in not_yet.rollouts] == [("length", 2, 5)] * 2
    assert len(by_length.rollouts[0].token_ids) == by_length.rollouts[0].prompt_length + 60
    assert by_context.rollouts[0].completion == f"abc{END}"


def test_the_reward_scores_the_last_answer_beside_the_environment():
    reward = {"last": {"_target_": "tests.environments.last_word", "weight": 2.0}}
    ((group,), _) = play(bisect, "Guess", reward)
    assert [r.reward_parts for r in group.rollouts] == [{"cost": 0.0, "reward": 1.0, "last": 2.0}] * 2


@pytest.mark.parametrize(
    ("says", "kind", "text"),
    [
        ("raise", "KeyError", "no such answer"),
        ("hang", "timeout", "timed out after 0.5 s"),
        ("die", "died", "exit code 7"),
        ("number", "bad reply", "step() returned float: return a text, messages, Reply or Done"),
        ("assistant", "bad reply", "has the role assistant, in which only the policy speaks"),
        ("nan", "not finite", "reward nan"),
    ],
)
def test_an_environment_that_breaks_costs_its_own_rollout(says, kind, text):
    """The other conversations of its process are made again from what was said."""

    def answer(seen: str) -> str:
        return "abc" if "go on" in seen or "answer 1" not in seen else says

    calm = Task("calm", ({"role": "user", "content": "go on"},), "5")
    groups, _ = play(answer, "Odd", tasks=(calm, TASK), max_turns=3, timeout=0.5)
    assert [(r.reward, r.turns, r.error) for r in groups[0].rollouts] == [(3.0, 3, None)] * 2
    for rollout in groups[1].rollouts:
        assert (rollout.reward, rollout.fault, rollout.turns) == (None, kind, 2)
        assert text in rollout.error


def test_a_reply_without_end_ends_the_conversation_as_out_of_context():
    ((group,), _) = play(lambda seen: "flood", "Odd")
    assert [(r.finish_reason, r.turns) for r in group.rollouts] == [("context", 1)] * 2


def kill_workers(scorer: Scorer) -> None:
    scorer._loaded.result()
    for worker in list(scorer._workers):
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join()


def test_a_lost_process_loses_no_conversation():
    ((whole,), _) = play(bisect)
    ((group,), _) = play(bisect, before_turn=kill_workers)
    assert group.rollouts == whole.rollouts


def test_an_environment_that_replies_otherwise_when_asked_again_is_a_fault():
    ((group,), _) = play(lambda seen: "random", "Odd", before_turn=kill_workers)
    assert [r.fault for r in group.rollouts] == ["not repeatable"] * 2
    assert "replied otherwise to the same completions (turn 1)" in group.rollouts[0].error


def test_what_is_no_environment_is_refused_before_anything_runs():
    for name, problem in (
        ("NoStep", "the environment cannot be loaded: TypeError: tests.environments.NoStep has no method step()"),
        ("Missing", "the environment cannot be loaded: "),
    ):
        scorer = Scorer({}, 1, 5.0, environment={"_target_": f"tests.environments.{name}"})
        try:
            with pytest.raises(RewardError, match=problem.replace("(", r"\(").replace(")", r"\)")):
                scorer.check([TASK])
        finally:
            scorer.close()
    scorer = Scorer({}, 1, 5.0, environment={"_target_": "tests.environments.Guess"})
    try:
        assert scorer.check([TASK]) == []
    finally:
        scorer.close()


# ---- with a real model ------------------------------------------------------------------------------------------------


def test_numbers_over_turns_are_those_of_a_fresh_forward_pass_and_repeat(policy, monkeypatch):
    """Half of the vocabulary ends an answer, so that a random model takes turns; each token is scored again from nothing."""
    ends = frozenset(range(0, len(policy.tokenizer), 2)) | policy.end_ids()
    template = fix_template(deepcopy(policy.tokenizer), DataConfig(), NOON).apply_chat_template
    monkeypatch.setattr(policy.tokenizer, "apply_chat_template", template)

    def run() -> list[Group]:
        engine = LocalEngine(policy.model, ends, 3, 300)
        engine.set_version(7)
        scorer = Scorer({}, 1, 10.0, environment={"_target_": "tests.environments.Echo"})
        generator = Generator(engine, policy.tokenizer, scorer, max_turns=3)
        try:
            groups = [generator.new_group(i, TASK, 3, 100, "seed", i) for i in range(2)]
            generator.fill(groups, Sampling(max_tokens=200))
            return groups
        finally:
            scorer.close()

    plain = AutoModelForCausalLM.from_pretrained(policy.folder)
    groups = run()
    rollouts = [r for group in groups for r in group.rollouts]
    assert max(r.turns for r in rollouts) == 3
    for rollout in rollouts:
        with torch.no_grad():
            logits = plain(torch.from_numpy(rollout.token_ids).long()[None]).logits[0]
        expected = logits.double().log_softmax(-1)
        for place in rollout.loss_mask.nonzero()[0]:
            assert rollout.logprobs[place] == pytest.approx(
                float(expected[place - 1, rollout.token_ids[place]]), abs=1e-5
            )
    assert [r.rollouts for r in run()] == [r.rollouts for r in groups]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=3))
def test_a_reply_is_what_the_template_puts_there(texts):
    """Token by token: rendering the whole conversation at once gives the same ids, whatever the texts hold."""
    plain = [text.replace("<|", "< ") for text in texts]
    replies = [{"role": "user", "content": text} for text in plain]
    end = TOKENIZER.eos_token_id
    after = reply_ids(TASK, replies, end, TOKENIZER)
    whole = TOKENIZER.apply_chat_template(
        [*TASK.messages, {"role": "assistant", "content": "4"}, *replies],
        add_generation_prompt=True,
        return_dict=False,
    )
    prompt = TOKENIZER.apply_chat_template(list(TASK.messages), add_generation_prompt=True, return_dict=False)
    assert [*prompt, *TOKENIZER.encode("4"), end, *after] == whole
    cut = reply_ids(TASK, replies, 5, TOKENIZER)
    assert cut == [end, *after]


def test_layouts_see_the_turns_alike(policy):
    """Packed rows and trees predict exactly the sampled tokens of conversations."""
    groups, _ = play(bisect, tasks=tuple(Task(str(n), TASK.messages, str(n)) for n in range(4)))
    rollouts = [r for group in groups for r in group.rollouts]
    for layout in ("padded", "packed", "trees"):
        found = torch.full((len(sampled_tokens(rollouts)),), -1)
        for row in pack(rollouts, layout, 512):
            found[row.token_index] = row.targets
        assert found.tolist() == [t for r in rollouts for t in r.token_ids[r.loss_mask].tolist()]


def converse_on(ranks: Ranks, folder) -> list[tuple]:
    """Two groups of conversations of a random model, on this rank's share; what every rank then knows of all."""
    policy = Policy.load(folder, torch.device("cpu"), ranks=ranks)
    fix_template(policy.tokenizer, DataConfig(), NOON)
    ends = frozenset(range(0, len(policy.tokenizer), 2)) | policy.end_ids()
    engine = LocalEngine(policy.sampler, ends, 8, 300)
    hand_over(policy, engine, 7)
    scorer = Scorer({}, 1, 10.0, environment={"_target_": "tests.environments.Moody"})
    generator = Generator(engine, policy.tokenizer, scorer, ranks, max_turns=3)
    try:
        groups = [generator.new_group(i, TASK, 3, 100, "seed", i) for i in range(2)]
        generator.fill(groups, Sampling(max_tokens=200))
    finally:
        scorer.close()
    return [(r.token_ids.tolist(), r.loss_mask.tolist(), r.reward, r.turns) for g in groups for r in g.rollouts]


@pytest.mark.slow
def test_ranks_hold_the_same_conversations(tiny_folder):
    expected = converse_on(Ranks(), tiny_folder)
    assert len({turns for *_, turns in expected}) > 1  # some rounds are of one rank alone
    assert on_ranks(2, converse_on, tiny_folder) == [expected] * 2
