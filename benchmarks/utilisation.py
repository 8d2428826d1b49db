"""How full the search keeps an engine, in virtual time.

    python -m benchmarks.utilisation [--questions 100,1000] [--slots 256] [--lags 0,8] [--stragglers 0.01]
    python -m benchmarks utilisation.laws --laws    # other lengths, engines and retrievers, about 5 minutes

The engine is a stub with k slots, first come first served, 0.10 s and 0.02 s a token for a call; tokens are lognormal
with median 60 (sigma 0.6, 8 to 512), and twenty times as many in a share of stragglers. A search takes 0.01 s. At a
reasoning step the policy answers with p = 0.35, rightly in 57 % of cases. Everything else is the product: tree search
by default settings, admission, `Slots`, which have to find out how many requests the engine takes. Utilisation is the
ideal over the makespan; the ideal is a list schedule of the same calls on k slots, as if none waited for another.

A batching engine writes a token of each of its n requests in a step of 10 ms + .08 n ms, and 4 ms for each new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.table import Table, options
from benchmarks.virtual_time import run
from reasonrag.core.calls import Slots
from reasonrag.core.config import SearchConfig, ValueConfig
from reasonrag.core.types import Completion, Passage, Prompt, Question
from reasonrag.dpo.pairs import PairRules, derive_pairs
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import Sampling, caller
from reasonrag.mcts.search import Tree, TreeSearch
from reasonrag.pipeline.tables import tree_rows
from reasonrag.pipeline.work import Count, Progress, work_through
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import RolloutEvaluator

PASSAGES = tuple(Passage(str(number), f"Title {number}\n" + "some words of a passage " * 5) for number in range(3))


# Tokens of a reply.
LAWS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda draw: min(60 * math.exp(draw.gauss(0, 0.6)), 512),
    "heavy, sigma 1.2": lambda draw: min(60 * math.exp(draw.gauss(0, 1.2)), 4096),
    "thinking, median 600": lambda draw: min(600 * math.exp(draw.gauss(0, 0.6)), 4096),
    "Pareto 1.3": lambda draw: min(40 * draw.paretovariate(1.3), 8192),
}


class StubEngine:
    """The text of a reply depends on prompt and seed alone, its length on its law too."""

    name = "stub"

    def __init__(self, slots: int, stragglers: float = 0.0, law: str = "lognormal", told: bool = False) -> None:
        self.stragglers, self.law = stragglers, LAWS[law]
        self.slots = Slots(slots if told else None)
        self.tokens: list[int] = []
        self.size = slots
        self._engine = asyncio.Semaphore(slots)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        asked = repr((prompt.messages[-1].content, prompt.stop, sampling.seed)).encode()
        draw = random.Random(hashlib.blake2b(asked, digest_size=8).digest())
        length = random.Random(draw.random())
        tokens = max(round(self.law(length)), 8)
        tokens *= 20 if self.stragglers and length.random() < self.stragglers else 1
        if prompt.stop == ("</evidence>",):
            text = f"<evidence>{draw.random():.6f}</evidence>"
        elif prompt.stop == ("</answer>",) or draw.random() < 0.35:
            text = f"<answer>{'somebody' if draw.random() < 0.57 else 'nobody'}</answer>"
        else:
            text = f"<query>{draw.random():.6f}</query>"
        async with self.slots.request(caller.get().priority) as request:
            request.tokens = tokens  # as a client of a server does
            self.tokens.append(tokens)
            await self._serve(tokens)
        return Completion(text, prompt_tokens=300, completion_tokens=tokens)

    async def _serve(self, tokens: int) -> None:
        async with self._engine:
            await asyncio.sleep(0.1 + 0.02 * tokens)

    def ideal_s(self) -> float:
        """Return when the last of the same calls ends if none waits for another."""
        return list_schedule([0.1 + 0.02 * tokens for tokens in self.tokens], self.size)

    async def aclose(self) -> None:
        pass


class BatchingEngine(StubEngine):
    """Writes a token of each of its requests in a step, as vLLM does."""

    def __init__(self, slots: int, **options: Any) -> None:
        super().__init__(slots, **options)
        self._came: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._steps: asyncio.Task[None] | None = None

    async def _serve(self, tokens: int) -> None:
        done = asyncio.get_running_loop().create_future()
        self._came.append((tokens, done))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step())
        await done

    async def _step(self) -> None:
        ends: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: the step of the last token
        for step in itertools.count():
            new = 0
            while self._came and len(ends) < self.size:
                tokens, done = self._came.popleft()
                heapq.heappush(ends, (step + tokens, id(done), done))
                new += 1
            if not ends:
                return
            await asyncio.sleep(step_s(len(ends), new))
            while ends and ends[0][0] == step + 1:
                heapq.heappop(ends)[2].set_result(None)

    def ideal_s(self) -> float:
        ends: list[int] = []
        left, seconds = deque(self.tokens), 0.0
        for step in itertools.count():
            new = min(len(left), self.size - len(ends))
            for _ in range(new):
                heapq.heappush(ends, step + left.popleft())
            if not ends:
                return seconds
            seconds += step_s(len(ends), new)
            while ends and ends[0] == step + 1:
                heapq.heappop(ends)
        raise AssertionError


def step_s(requests: int, new: int) -> float:
    """Seconds of a step of a batching engine."""
    return 0.010 + 0.00008 * requests + 0.004 * new


class StubRetriever:
    """Three passages, after 10 ms unless told otherwise."""

    fingerprint = "stub"

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        await asyncio.sleep(self.seconds)
        return [PASSAGES[:top_k] for _ in queries]

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one build: its utilisation, calls and pairs a question, and a hash of all trees."""

    utilisation: float
    calls: float
    pairs: float
    trees: str
    makespan_s: float
    limit: int


async def build(
    questions: int, llm: StubEngine, lag: int, *, count_pairs: bool = True, search_s: float = 0.01
) -> Figures:
    """Build the trees of some questions."""
    value, settings = ValueConfig(), SearchConfig(lag=lag)
    engine = Engine(llm, StubRetriever(search_s), ReasonRAGFormat())
    search = TreeSearch(engine, RolloutEvaluator(engine, k=value.rollouts, alpha=value.alpha), settings)
    digests: dict[str, str] = {}
    pairs: Counter[str] = Counter()

    async def work(place: int, question: Question, count: Count) -> None:
        tree = await search.run(question)
        digests[question.id] = digest(tree)
        if count_pairs:
            rows = tree_rows(tree, engine.format, alpha=value.alpha)
            pairs[question.id] += sum(1 for _ in derive_pairs(rows, PairRules(value.alpha), policy="", config_hash=""))

    asked = [
        Question(str(number), f"Who directed film number {number}?", ("somebody",), "bench")
        for number in range(questions)
    ]
    await work_through(asked, work, [llm.slots], Progress(questions))
    makespan_s = asyncio.get_running_loop().time()
    trees = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=4).hexdigest()
    calls = len(llm.tokens) / questions
    return Figures(llm.ideal_s() / makespan_s, calls, pairs.total() / questions, trees, makespan_s, llm.slots.limit)


def digest(tree: Tree) -> str:
    """Return a hash of a tree: its texts, its shape and its statistics."""
    nodes = [(n.parent, n.step and n.step.completion.text, n.visits, n.valued, n.value_sum) for n in tree.nodes]
    return hashlib.blake2b(repr(nodes).encode(), digest_size=8).hexdigest()


def list_schedule(service_s: Sequence[float], slots: int) -> float:
    """Return when the last of some independent calls ends, each begun by the slot that is free first."""
    free_at = [0.0] * slots
    for seconds in service_s:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def laws(table: Table, questions: int, slots: int) -> None:
    """Other lengths, stragglers, retrievers and a batching engine, each with the slots told and found out."""
    lag, hashes = SearchConfig().in_flight, set()
    cases: list[tuple[str, Callable[[bool], StubEngine], float]] = []
    for name in LAWS:
        cases.append((name, lambda told, name=name: StubEngine(slots, law=name, told=told), 0.01))
        cases.append((f"{name}, batching", lambda told, name=name: BatchingEngine(slots, law=name, told=told), 0.1))
    cases += [(f"lognormal, searches of {s} s", lambda told: StubEngine(slots, told=told), s) for s in (0.1, 1.0)]
    cases.append(("1 % stragglers", lambda told: StubEngine(slots, 0.01, told=told), 0.1))
    for name, engine, seconds in cases:
        for told in (True, False):
            found = run(build(questions, engine(told), lag, count_pairs=False, search_s=seconds))
            hashes.add(found.trees)
            table.row(f"{name}, slots {'told' if told else 'found out'}: utilisation", found.utilisation)
    table.row(f"different trees in {2 * len(cases)} runs", len(hashes), limit="== 1")
    table.note(f"{questions} questions, {slots} slots, lag {lag}; searches take .1 s where nothing else is said")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", default="100,1000", help="sizes of a small and a large run")
    parser.add_argument("--slots", type=int, default=256, help="of the engine")
    parser.add_argument("--lags", default="0,8", help="other lags, for the small run")
    parser.add_argument("--stragglers", type=float, default=0.0, help="share of calls that take 20 times as long")
    parser.add_argument("--laws", action="store_true", help="the small run alone, with other lengths and engines")
    given = parser.parse_args()
    small, large = (int(size) for size in given.questions.split(","))
    table, default = Table(__doc__), SearchConfig().in_flight
    if given.laws:
        laws(table, small, given.slots)
        table.show(given.json)
        return

    def built(questions: int, slots: int = given.slots, lag: int = default, count_pairs: bool = True) -> Figures:
        return run(build(questions, StubEngine(slots, given.stragglers), lag, count_pairs=count_pairs))

    first = built(small)
    table.row(f"{small} questions: utilisation", first.utilisation, limit=">= 0.90")
    many = built(large, count_pairs=False)
    table.row(f"{large} questions: utilisation", many.utilisation, limit=">= 0.95")
    few = built(small, 32, count_pairs=False)
    table.row(f"{small} questions, 32 slots: utilisation", few.utilisation)
    table.row(f"trees that depend on the slots (hash {first.trees})", float(few.trees != first.trees), limit="== 0")
    for lag in sorted({default, *map(int, given.lags.split(","))}):
        found = first if lag == default else built(small, lag=lag)
        name = f"{small} questions, lag {lag}: "
        table.row(f"{name}utilisation", found.utilisation)
        table.row(f"{name}makespan", found.makespan_s, "s")
        table.row(f"{name}calls a question", found.calls)
        table.row(f"{name}pairs a question", found.pairs)
        table.row(f"{name}calls a pair", found.calls / found.pairs)
    table.note(f"{given.slots} slots, lag {default}, and default settings unless another is named")
    table.note(f"requests in flight that were found out: {first.limit} and {many.limit}")
    table.show(given.json)


if __name__ == "__main__":
    main()
