"""A model that plays the search engine (ZeroSearch, arXiv:2505.04588): searches without an index.

Its passages are invented. Their ids and the retriever's fingerprint begin with `simulated`, so trees, run.json and the
card of a data set say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random

from reasonrag.core.config import SimulatorConfig
from reasonrag.core.errors import RetrievalError
from reasonrag.core.text import one_line, quotable
from reasonrag.core.types import Message, Passage, Prompt
from reasonrag.llm.base import LLM, Sampling
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.rollout import derive_seed, gather_all
from reasonrag.storage.files import short_hash
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import passage_id

SIMULATED = "simulated"

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
_BASE = 4.0  # of the schedule, as in the paper
_ATTEMPTS = 3


class SimulatedRetriever:
    """Asks a model for the passages of a query: useful ones, or for a share of the queries noise."""

    max_queries = 1

    def __init__(self, llm: LLM, settings: SimulatorConfig, *, seed: int) -> None:
        """Take an open model, which is closed with this retriever."""
        self.llm = self._inner = llm
        self.settings, self.noise, self._seed = settings, settings.noise, seed
        drawn = [settings.temperature, settings.max_tokens, settings.noise, settings.last_noise, settings.noise_steps]
        known = [llm.name, drawn, seed, _SYSTEM, _TASK, _USEFUL, _NOISY]
        self.fingerprint = f"{SIMULATED}-{short_hash(known)}"

    def keep_in(self, journal: Journal) -> None:
        """Keep the model's calls in a run's journal, as calls of the kind `simulator`."""
        self.llm = JournaledLLM(self._inner, journal, kind="simulator")

    def at_step(self, step: int) -> bool:
        """Take the share of noise after a training step; return whether it changed."""
        before, self.noise = self.noise, noise_at(step, self.settings)
        return self.noise != before

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
        noisy = Random(derive_seed(self._seed, SIMULATED, query)).random() < self.noise
        task = _TASK.format(query=quotable(query), count=top_k, kind=_NOISY if noisy else _USEFUL)
        prompt = Prompt((Message("system", _SYSTEM), Message("user", task)))
        for attempt in range(_ATTEMPTS):
            seed = derive_seed(self._seed, SIMULATED, query, top_k, attempt)
            sampling = Sampling(1, self.settings.temperature, 1.0, self.settings.max_tokens, seed)
            (reply,) = await self.llm.complete(prompt, sampling)
            if passages := written_passages(reply.text):
                kind = "noisy" if noisy else "useful"
                return tuple(Passage(f"{SIMULATED}:{kind}:{passage_id(text)}", text) for text in passages[:top_k])
        raise RetrievalError(f"{self.llm.name} wrote no passage in {_ATTEMPTS} attempts", cause="unreadable")


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


def noise_at(step: int, settings: SimulatorConfig) -> float:
    """Return the share of noisy searches after a training step (arXiv:2505.04588, eq. of the curriculum, b = 4).

    >>> rising = SimulatorConfig(noise=0.0, last_noise=0.6, noise_steps=100)
    >>> [round(noise_at(step, rising), 3) for step in (0, 50, 100, 200)]
    [0.0, 0.2, 0.6, 0.6]
    """
    if settings.last_noise is None or not settings.noise_steps:
        return settings.noise
    done = min(step / settings.noise_steps, 1.0)
    return settings.noise + (math.pow(_BASE, done) - 1) / (_BASE - 1) * (settings.last_noise - settings.noise)
