"""A model that plays the search engine (ZeroSearch, arXiv:2505.04588): searches without an index.

    SIMULATOR=http://127.0.0.1:8001/v1#Qwen/Qwen2.5-14B-Instruct \
        reasonrag build-tree ... --retriever python:contrib.simulated_search:open_retriever

`SIMULATOR` is an address as for `--policy`, with the model's name after a `#`. The passages are invented: their ids and
the retriever's fingerprint begin with `simulated`. The run's journal keeps what each query found, so it is paid once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from reasonrag import LLM, Config, ConfigError, Message, Passage, Prompt, Question, RetrievalError, Sampling
from reasonrag.core.config import ModelConfig
from reasonrag.core.text import one_line, quotable
from reasonrag.pipeline.parts import open_llm
from reasonrag.rollout import derive_seed, gather_all
from reasonrag.storage.questions import passage_id

_TASK = """You stand in for a search engine over an encyclopedia. Write the passages that it returns, and nothing else.
Query: {query}

Write {count} passages. Each has a first line "Passage 1: TITLE" (then 2, 3, ...) and a paragraph of about 60 words."""
_ATTEMPTS = 3


class SimulatedRetriever:
    """Asks a model for the passages of a query, which is closed with this retriever."""

    def __init__(self, llm: LLM, *, seed: int = 0) -> None:
        self.llm, self._seed = llm, seed
        self.fingerprint = f"simulated-{llm.name}-{seed}"

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return rankings as `Retriever` does; raise RetrievalError if the model writes none, whatever the seed."""
        return await gather_all(self._write(query, top_k) for query in queries)

    async def aclose(self) -> None:
        await self.llm.aclose()

    async def _write(self, query: str, top_k: int) -> tuple[Passage, ...]:
        prompt = Prompt((Message("user", _TASK.format(query=quotable(query), count=top_k)),))
        for attempt in range(_ATTEMPTS):
            seed = derive_seed(self._seed, "simulated", query, top_k, attempt)
            reply = await self.llm.complete(prompt, Sampling(0.7, 1.0, 768, seed))
            # Text before the first heading is no passage.
            pieces = re.split(r"^(?:[^\w\n]|_)*passage \d+[\W_]*", reply.text, flags=re.IGNORECASE | re.MULTILINE)[1:]
            passages = [_passage(piece) for piece in pieces if "\n" in piece.strip()]
            if passages:
                return tuple(passages[:top_k])
        raise RetrievalError(f"{self.llm.name} wrote no passage in {_ATTEMPTS} attempts", cause="unreadable")


def _passage(piece: str) -> Passage:
    title, _, text = piece.strip().partition("\n")
    contents = f"{one_line(title).strip('*# ')}\n{one_line(text)}"
    return Passage(f"simulated:{passage_id(contents)}", contents)


def open_retriever(config: Config, questions: Sequence[Question]) -> SimulatedRetriever:
    """Open the model at `SIMULATOR`."""
    spec, _, model = os.environ.get("SIMULATOR", "").partition("#")
    if not spec or not model:
        raise ConfigError(
            "the variable SIMULATOR has to be an address and a model, such as http://127.0.0.1:8001/v1#NAME"
        )
    return SimulatedRetriever(open_llm(ModelConfig(spec=spec, model=model or None), "judge"), seed=config.seed)
