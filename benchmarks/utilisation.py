"""How full the search keeps an engine, in virtual time.

    python -m benchmarks.utilisation [--questions 100,1000] [--slots 256] [--lags 0,16] [--stragglers 0.01]

The engine is a stub with k slots, first come first served, 0.10 s and 0.02 s a token for a call; tokens are lognormal
with median 60 (sigma 0.6, 8 to 512), and twenty times as many in a share of stragglers. A search takes 0.01 s. At a
reasoning step the policy answers with p = 0.35, rightly in 57 % of cases. Everything else is the product: tree search
by default settings, admission, `Slots`, which have to find out how many requests the engine takes. Utilisation is the
ideal over the makespan; the ideal is a list schedule of the same calls on k slots, as if none waited for another.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


class StubEngine:
    """Text and length of a reply depend on prompt and seed alone."""

    name = "stub"

    def __init__(self, slots: int, stragglers: float = 0.0) -> None:
        self.stragglers = stragglers
        self.slots = Slots(None)
        self.service_s: list[float] = []
        self._engine = asyncio.Semaphore(slots)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        asked = repr((prompt.messages[-1].content, prompt.stop, sampling.seed)).encode()
        draw = random.Random(hashlib.blake2b(asked, digest_size=8).digest())
        tokens = min(max(round(60 * math.exp(draw.gauss(0, 0.6))), 8), 512)
        tokens *= 20 if self.stragglers and draw.random() < self.stragglers else 1
        if prompt.stop == ("</evidence>",):
            text = f"<evidence>{draw.random():.6f}</evidence>"
        elif prompt.stop == ("</answer>",) or draw.random() < 0.35:
            text = f"<answer>{'somebody' if draw.random() < 0.57 else 'nobody'}</answer>"
        else:
            text = f"<query>{draw.random():.6f}</query>"
        service_s = 0.1 + 0.02 * tokens
        async with self.slots.request(caller.get().priority):
            self.service_s.append(service_s)
            async with self._engine:
                await asyncio.sleep(service_s)
        return Completion(text, prompt_tokens=300, completion_tokens=tokens)

    async def aclose(self) -> None:
        pass


class StubRetriever:
    """Three passages after 10 ms."""

    fingerprint = "stub"

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        await asyncio.sleep(0.01)
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


async def build(questions: int, slots: int, lag: int, *, count_pairs: bool = True, stragglers: float = 0.0) -> Figures:
    """Build the trees of some questions."""
    llm, value, settings = StubEngine(slots, stragglers), ValueConfig(), SearchConfig(lag=lag)
    engine = Engine(llm, StubRetriever(), ReasonRAGFormat())
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
    calls = len(llm.service_s) / questions
    used = list_schedule(llm.service_s, slots) / makespan_s
    return Figures(used, calls, pairs.total() / questions, trees, makespan_s, llm.slots.limit)


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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", default="100,1000", help="sizes of a small and a large run")
    parser.add_argument("--slots", type=int, default=256, help="of the engine")
    parser.add_argument("--lags", default="0,16", help="other lags, for the small run")
    parser.add_argument("--stragglers", type=float, default=0.0, help="share of calls that take 20 times as long")
    given = parser.parse_args()
    long = given.stragglers
    small, large = (int(size) for size in given.questions.split(","))
    table, default = Table(__doc__), SearchConfig().lag
    first = run(build(small, given.slots, default, stragglers=long))
    table.row(f"{small} questions: utilisation", first.utilisation, limit=">= 0.90")
    many = run(build(large, given.slots, default, count_pairs=False, stragglers=long))
    table.row(f"{large} questions: utilisation", many.utilisation, limit=">= 0.95")
    few = run(build(small, 32, default, count_pairs=False, stragglers=long))
    table.row(f"{small} questions, 32 slots: utilisation", few.utilisation)
    table.row(f"trees that depend on the slots (hash {first.trees})", float(few.trees != first.trees), limit="== 0")
    for lag in sorted({default, *map(int, given.lags.split(","))}):
        found = first if lag == default else run(build(small, given.slots, lag, stragglers=long))
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
