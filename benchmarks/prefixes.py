"""Which share of all prompt tokens a perfect, unbounded prefix cache could serve, by format.

    python -m benchmarks.prefixes [--questions 8] [--prompts default]

A stub policy builds real trees: at a reasoning step it answers with p = .35 and else searches; its texts have a
lognormal length (median 60 tokens) and a search finds three new passages of 100 words. A word or a mark counts as one
token. A cache holds every prompt and what was written after it; with blocks of 16, as in vLLM, it serves whole blocks.
The lines below the table say where the tokens stand that no cache can serve.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.core.types import Completion, Passage, Prompt, Question
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.formats.stream import StreamFormat
from reasonrag.llm.base import LLM, Sampling
from reasonrag.mcts import Evaluator, TreeSearch
from reasonrag.rewards.judge import ProcessJudge
from reasonrag.rollout import Engine, derive_seed
from reasonrag.spre import JudgeEvaluator, RolloutEvaluator

GOAL = ">= 0.85"
WORDS = (
    *("the", "of", "a", "film", "was", "directed", "by", "in"),
    *("city", "river", "first", "born", "year", "sea", "light"),
)
PARTS = ("system", "question", "thoughts", "documents", "instruction")
ROWS = [("reasonrag", None, 64), ("reasonrag", None, 16), ("reasonrag", "official", 64)]
ROWS += [(name, None, 16) for name, one in FORMATS.items() if isinstance(one, type) and issubclass(one, StreamFormat)]

Labelled = list[tuple[str, str]]  # a token and the part of the prompt that it stands in


class Cache:
    """Serves the longest prefix of a prompt that an earlier prompt, or what was written after it, began with."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.known: set[int] = set()

    def served(self, prompt: list[str], written: list[str]) -> int:
        """Return how many of the prompt's tokens are known, and remember them all."""
        tokens, served, chain = prompt + written, 0, 0
        for end in range(self.block, len(tokens) + 1, self.block):
            chain = hash((chain, *tokens[end - self.block : end]))
            if chain in self.known and end <= len(prompt):
                served = end
            self.known.add(chain)
        return served


class Stub:
    """A policy or a judge that counts what a cache could serve.

    What it writes depends on question and seed, not on the layout of the prompt: two layouts give the same trees.
    """

    name = "stub"

    def __init__(self) -> None:
        self.calls = self.tokens = 0
        self.served: Counter[int] = Counter()
        self.missed: Counter[str] = Counter()
        self.caches = (Cache(1), Cache(16))

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        draw = random.Random(f"{sampling.seed} {prompt.messages[-1].content.partition(chr(10))[0]}")
        text = write(prompt, draw)
        labelled = [(token, part) for part, piece in parts(prompt) for token in pieces(piece)]
        tokens = [token for token, _ in labelled]
        self.calls += 1
        self.tokens += len(tokens)
        for cache in self.caches:
            served = cache.served(tokens, pieces(text))
            self.served[cache.block] += served
            if cache.block == 1:
                self.missed.update(part for _, part in labelled[served:])
        return (Completion(text),)

    async def aclose(self) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens_a_call": self.tokens / self.calls,
            "served": self.served[1] / self.tokens,
            "served_in_blocks_of_16": self.served[16] / self.tokens,
            "missed_a_call": {part: self.missed[part] / self.calls for part in PARTS},
        }


class Finds:
    """Three passages that depend on the query alone."""

    fingerprint = "finds"

    async def search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [
            tuple(Passage(f"{n}", f"A title\n{words(random.Random(q + str(n)), 100)}") for n in range(3))
            for q in queries
        ]

    async def aclose(self) -> None:
        pass


def pieces(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def parts(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield the texts of a prompt in their order, each with the name of the part that it belongs to."""
    system, user = prompt.messages
    yield "system", system.content
    head, _, instruction = user.content.partition("\n\n")
    head, label, documents = head.partition("\nDocuments:\n")
    question, _, thoughts = head.partition("\n")
    yield from (("question", question), ("thoughts", thoughts), ("documents", label + documents))
    yield "instruction", instruction + " <assistant>"
    for span in prompt.turn:
        yield "thoughts" if span.by_policy else "documents", span.text


def write(prompt: Prompt, draw: random.Random) -> str:
    """Return a step that fits the prompt's stop strings."""
    thought = words(draw, int(min(max(draw.lognormvariate(4.1, 0.6), 8), 512)))
    if not prompt.stop:
        return f"{thought}. So the score is {draw.random():.2f}"
    if prompt.stop == ("</evidence>",):
        return f"{thought} <evidence>{words(draw, 12)}</evidence>"
    if prompt.prefix.endswith("<conclusion>"):
        return f"{thought}</conclusion>"
    if prompt.turn:
        thought = f"<think>{thought}</think>"
    if prompt.stop == ("</answer>",) or draw.random() < 0.35:
        return f"{thought} <answer>{'right' if draw.random() < 0.57 else 'wrong'}</answer>"
    tag = prompt.stop[0][2:-1]
    return f"{thought} <{tag}>{words(draw, 6)} {draw.random():.6f}</{tag}>"


def measure(format_name: str, preset: str | None, iterations: int, questions: int, prompts: str) -> dict[str, Any]:
    """Build trees of one format, and return what a cache could serve of the policy's prompts and of the judge's."""
    config = load_config(preset=preset, overrides={"search.iterations": iterations})
    policy, judge = Stub(), Stub()
    llm: LLM = policy
    texts = PromptSet.find(prompts)
    engine = Engine(llm, Finds(), FORMATS[format_name](texts), max_steps=config.format.max_steps, top_k=3)
    evaluator: Evaluator = RolloutEvaluator(engine, k=config.value.rollouts, alpha=config.value.alpha)
    if config.value.kind == "judge":
        evaluator = JudgeEvaluator(ProcessJudge(judge, texts))
    search = TreeSearch(engine, evaluator, config.search, seed=0)

    async def build() -> None:
        for n in range(questions):
            draw = random.Random(derive_seed("question", n))
            await search.run(Question(f"{n}", f"Who {words(draw, 14)}?", ("right",)))

    asyncio.run(build())
    made = {"policy": policy, "judge": judge}
    return {kind: stub.figures() for kind, stub in made.items() if stub.calls}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--prompts", default="default", help="prompt set")
    given = parser.parse_args()
    table = Table(__doc__)
    for name, preset, iterations in ROWS:
        for kind, found in measure(name, preset, iterations, given.questions, given.prompts).items():
            row = f"{name}{f' ({preset})' if preset else ''}, {iterations} iterations, {kind}"
            table.row(row, found["served"], "of the prompt tokens", limit=GOAL)
            table.row("  in blocks of 16", found["served_in_blocks_of_16"])
            missed = ", ".join(f"{part} {count:.0f}" for part, count in found["missed_a_call"].items() if count >= 0.5)
            table.note(f"{row}: {found['tokens_a_call']:.0f} tokens a call, of which cannot be served: {missed}")
    table.show(given.json)


if __name__ == "__main__":
    main()
