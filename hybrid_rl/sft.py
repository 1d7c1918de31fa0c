"""The warm-up before RL: supervised training on demonstrations."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hybrid_rl.data.curriculum import Growing
from hybrid_rl.data.render import demonstration
from hybrid_rl.engine.base import request_seed
from hybrid_rl.policy.optimizer import make_optimizer
from hybrid_rl.policy.update import imitate
from hybrid_rl.processes.deterministic import seed_all
from hybrid_rl.report.console import sft_line
from hybrid_rl.run_folder.bad_batch import BadBatch, BadBatches, as_groups
from hybrid_rl.session import Session
from hybrid_rl.types import Rollout

LOG_EVERY = 10  # steps that one line of metrics.jsonl averages over


def train_sft(s: Session) -> None:
    """Take sft.steps supervised steps; a run that was resumed in this stage goes on from its checkpoint."""
    config, policy = s.config.sft, s.policy
    optimizer = make_optimizer(policy, config.optimizer, config.steps)
    examples = [demonstration(task, policy.tokenizer, s.config.rollout.max_prompt_tokens) for task in s.tasks.sft]
    curriculum = by_length(examples, config.curriculum * config.steps, s.data_seed)
    bad_batches = BadBatches(s.folder, s.config, s.progress, s.console.say)
    start, window = s.resumed_step("sft"), list[dict[str, float]]()
    if s.resumed and start:
        s.resumed.restore_optimizer(optimizer)
        s.resumed.restore("sampler", curriculum.restore)
        s.resumed.restore("window", window.extend)
    say_every = LOG_EVERY * max(1, round(config.steps / LOG_EVERY / 10))  # about ten lines a stage
    since = time.perf_counter()
    with s.progress.clock.timed("sft"), s.console.progress("SFT", config.steps) as advance:
        for step in range(start + 1, config.steps + 1):
            seed_all(request_seed(s.config.seed, "sft", step))
            batch = [examples[i] for i in curriculum.draw(config.batch_size, step)]
            done = imitate(policy, optimizer, batch, config.label_smoothing)
            window.append(done.numbers)
            if done.fault:
                bad = BadBatch("sft", step, as_groups(batch), range(len(batch)), {}, {"scale": optimizer.scale})
                bad_batches.keep(bad, done.fault, policy)
                optimizer.check(done.fault)
            advance(note=f"loss {window[-1]['loss']:.3f}")
            last = step == config.steps
            if step % LOG_EVERY == 0 or last:
                values = {
                    "step": step,
                    **{key: sum(m[key] for m in window) / len(window) for key in ("loss", "grad_norm")},
                    "lr": window[-1]["lr"],
                    "tokens_per_second": sum(m["tokens"] for m in window) / (time.perf_counter() - since),
                    "skipped": sum(m["skipped"] for m in window),
                }
                s.metrics.write("sft", **values)
                if step % say_every == 0 or last:
                    s.console.say(sft_line(values, config.steps))
                window, since = [], time.perf_counter()
                s.saver.publish(wait=False)
            if last:  # the stage is evaluated and saved anyway
                break
            stopping = s.stop_asked()
            if stopping or (config.checkpoint_every and step % config.checkpoint_every == 0):
                s.saver.save("sft", step, optimizer, sampler=curriculum.state(), window=window)
            if stopping:
                s.stop(stopping, f"step {step} of {config.steps} of SFT is done and saved")
    s.saver.publish()


def by_length(examples: Sequence[Rollout], ramp: float, seed: int) -> Growing:
    """Return a seeded order of the examples without replacement, of short ones alone during the first `ramp` steps.

    The allowed length grows linearly from the shortest example's to the longest's. A tiny model that sees short
    examples first learns the rule with every seed; without them some seeds never do.
    """
    lengths = [len(e.token_ids) for e in examples]
    shortest, longest = min(lengths), max(lengths)
    return Growing(
        lengths, lambda step: shortest + (min(1.0, step / ramp) if ramp else 1.0) * (longest - shortest), seed
    )
