"""A model that plays the search engine (ZeroSearch, arXiv:2505.04588): searches without an index.

    SIMULATOR=http://127.0.0.1:8001/v1#Qwen/Qwen2.5-14B-Instruct \
        reasonrag rl train ... --retriever python:contrib.simulated_search:open_retriever

`SIMULATOR` is an address as for `--policy`, with the model's name after a `#`. The passages are invented: their ids and
the retriever's fingerprint begin with `simulated`. Calls are in the run's journal as calls of the kind `simulator`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from reasonrag import LLM, Config, Message, Passage, Prompt, Question, RetrievalError, Sampling
from reasonrag.core.config import ModelConfig
from reasonrag.core.text import one_line, quotable
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.pipeline.parts import open_llm
from reasonrag.rollout import derive_seed, gather_all
from reasonrag.storage.files import short_hash
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import passage_id

_SYSTEM = (
    "You stand in for a search engine over an encyclopedia. Write the passages that it returns for a query, and "
    "nothing else: no greeting, no comment, no words about yourself."
)
_TASK = """Query: {query}

Write {count} passages. Each has a first line "Passage 1: TITLE" (then 2, 3, ...) and one paragraph of about 60 words.
{kind}"""
_USEFUL = "They answer the query: they state the facts that it asks for, each in a different way."
_NOISY = (
    "They share names and topic with the query and do not help: none of them states what it asks for, and none says "
    "that something is missing."
)
_TEMPERATURE, _MAX_TOKENS = 0.7, 768
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Noise:
    """The share of searches that find passages without help, as it rises over training steps."""

    first: float = 0.0
    last: float = 0.0
    steps: int = 0

    def at(self, step: int) -> float:
        """Return the share after a training step (arXiv:2505.04588, eq. of the curriculum, base 4).

        >>> [round(Noise(0.0, 0.6, 100).at(step), 3) for step in (0, 50, 100, 200)]
        [0.0, 0.2, 0.6, 0.6]
        """
        if not self.steps:
            return self.first
        done = min(step / self.steps, 1.0)
        return self.first + (math.pow(4.0, done) - 1) / 3.0 * (self.last - self.first)


class SimulatedRetriever:
    """Asks a model for the passages of a query: useful ones, or for a share of the queries noise."""

    max_queries = 1

    def __init__(self, llm: LLM, noise: Noise = Noise(), *, seed: int = 0) -> None:
        """Take an open model, which is closed with this retriever."""
        self.llm = self._inner = llm
        self._noise, self.share, self._seed = noise, noise.first, seed
        texts = [llm.name, str(noise), seed, _SYSTEM, _TASK, _USEFUL, _NOISY]
        self.fingerprint = f"simulated-{short_hash(texts)}"

    def keep_in(self, journal: Journal) -> None:
        """Keep the model's calls in a run's journal."""
        self.llm = JournaledLLM(self._inner, journal, kind="simulator")

    def at_step(self, step: int) -> bool:
        """Take the share of noise after a training step; return whether it changed."""
        before, self.share = self.share, self._noise.at(step)
        return self.share != before

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return rankings as `Retriever` does; raise RetrievalError if the model writes none, whatever the seed."""
        return await gather_all(self._write(query, top_k) for query in queries)

    async def check(self) -> None:
        """Raise if the model will not work."""
        if hasattr(self._inner, "check"):
            await self._inner.check()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _write(self, query: str, top_k: int) -> tuple[Passage, ...]:
        if not query.strip():
            return ()
        # The same draw whatever the share: as it rises, queries turn noisy and never back.
        noisy = Random(derive_seed(self._seed, "simulated", query)).random() < self.share
        task = _TASK.format(query=quotable(query), count=top_k, kind=_NOISY if noisy else _USEFUL)
        prompt = Prompt((Message("system", _SYSTEM), Message("user", task)))
        for attempt in range(_ATTEMPTS):
            seed = derive_seed(self._seed, "simulated", query, top_k, attempt)
            (reply,) = await self.llm.complete(prompt, Sampling(1, _TEMPERATURE, 1.0, _MAX_TOKENS, seed))
            if passages := written_passages(reply.text):
                kind = "noisy" if noisy else "useful"
                return tuple(Passage(f"simulated:{kind}:{passage_id(text)}", text) for text in passages[:top_k])
        raise RetrievalError(f"{self.llm.name} wrote no passage in {_ATTEMPTS} attempts", cause="unreadable")


def open_retriever(config: Config, questions: Sequence[Question]) -> SimulatedRetriever:
    """Open the model at `SIMULATOR`; for other noise, name a function of your own that calls `SimulatedRetriever`."""
    spec, _, model = os.environ["SIMULATOR"].partition("#")
    return SimulatedRetriever(open_llm(ModelConfig(spec=spec, model=model or None), "judge"), seed=config.seed)


def written_passages(reply: str) -> list[str]:
    """Return the contents of the passages in a reply: title, newline, text.

    >>> written_passages("Passage 1: Jaws\\nA film\\nof 1975.\\nPassage 2: Empty")
    ['Jaws\\nA film of 1975.']
    """
    passages = []
    for piece in re.split(r"^(?:[^\w\n]|_)*passage \d+[\W_]*", reply, flags=re.IGNORECASE | re.MULTILINE)[1:]:
        title, _, text = piece.strip().partition("\n")
        if text.strip():
            passages.append(f"{one_line(title).strip('*# ')}\n{one_line(text)}".strip())
    return passages
