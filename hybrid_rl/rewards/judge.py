"""A language model as judge, behind an endpoint of OpenAI's form."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from hybrid_rl.types import Task

PROMPT = """Rate the answer to the question from 0 (useless or wrong) to 10 (correct and complete).

Question:
{question}

Reference answer:
{answer}

Answer to rate:
{completion}

End with one line: Score: <number>"""
AGAIN = (408, 429, 500, 502, 503, 504)  # HTTP states of a server that may answer later


class Judge:
    """Pay a judge's score, from 0 to 1.

    url: of an OpenAI-compatible API, up to /v1; model: its name there. prompt: may hold {question} (the task's last
    message), {answer} and {completion}. pattern: its last match's first group is the score, between 0 and `best`;
    without a match, or with a number outside, the reward fails. key: the environment variable that holds the API's key.
    tries: requests to a busy server. rollout.reward_timeout holds for all of it, and rollout.reward_batch completions
    are judged at a time.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str = PROMPT,
        pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)",
        best: float = 10.0,
        max_tokens: int = 512,
        key: str | None = None,
        tries: int = 3,
    ):
        if "{completion}" not in prompt:
            raise ValueError("Judge.prompt must hold {completion}")
        if key is not None and not os.environ.get(key):
            raise ValueError(f"Judge.key={key}: there is no such environment variable")
        self.url, self.model, self.prompt, self.best = f"{url.rstrip('/')}/chat/completions", model, prompt, best
        self.pattern, self.max_tokens, self.key, self.tries = re.compile(pattern), max_tokens, key, tries
        self.threads = ThreadPoolExecutor(64)

    async def __call__(self, completion: str, task: Task) -> float:
        values = {"question": task.messages[-1]["content"], "answer": task.answer, "completion": completion}
        # one pass: a completion that holds {answer} must not be filled in
        text = re.sub(r"\{(question|answer|completion)\}", lambda name: values[name[1]], self.prompt)
        said = await self._ask(text)
        scores = [found[1] for found in self.pattern.finditer(said)]
        score = float(scores[-1]) if scores else None
        if score is None or not 0 <= score <= self.best:
            raise ValueError(f"the judge gave no score between 0 and {self.best:g}; it ends with {said[-60:]!r}")
        return score / self.best

    async def _ask(self, text: str) -> str:
        loop = asyncio.get_running_loop()
        for attempt in range(1, self.tries + 1):
            try:
                return await loop.run_in_executor(self.threads, self._post, text)
            except (OSError, http.client.HTTPException) as error:  # those of urllib are OSErrors
                refused = error if isinstance(error, urllib.error.HTTPError) else None
                if attempt == self.tries or (refused and refused.code not in AGAIN):
                    if refused:
                        why = " ".join(refused.read()[:500].decode("utf-8", "replace").split())
                        raise ValueError(f"the judge answered {refused.code}: {why}") from error
                    raise
                await asyncio.sleep(0.5 * 2 ** (attempt - 1))
        raise AssertionError

    def _post(self, text: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key]}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:  # rollout.reward_timeout ends it earlier
            return str(json.load(answer)["choices"][0]["message"]["content"])
