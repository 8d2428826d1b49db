"""How hard an approximate search has to look: the least effort that finds what exact search finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from reasonrag.retrieval.index.progress import BuildProgress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Rows = NDArray[np.int64]

TOP_K = 10
SAMPLE = 256
_TIE = 1e-6


class VectorSearch(Protocol):
    """Finds the vectors closest to given ones. From one thread at a time."""

    rows: int
    dims: int

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """`[n, top_k]` cosines and rows of passages, best first; row -1 where there are fewer."""
        ...


class TunableSearch(VectorSearch, Protocol):
    """One that looks at a part of the vectors."""

    @property
    def efforts(self) -> int:
        """The most clusters or candidates that a search can look at; 0 where it looks at everything."""
        ...

    @property
    def unit(self) -> str:
        """What the effort counts, for people."""
        ...

    effort: int


def recall_at_10(found: tuple[Vectors, Rows], exact: tuple[Vectors, Rows]) -> float:
    """Share of what exact search has among its ten best that an approximate search has too, in [0, 1].

    A vector as close as the exact tenth counts: of passages that are there twice, either may be found.
    """
    import numpy as np

    (scores, rows), (best, exact_rows) = found, exact
    if not len(best):
        return 1.0
    tenth = np.min(np.where(exact_rows >= 0, best, np.inf), axis=1, keepdims=True)
    hits = ((rows >= 0) & (scores >= tenth - _TIE)).sum()
    return float(min(hits / (exact_rows >= 0).sum(), 1.0))


def least_effort(recall: Callable[[int], float], most: int, target: float) -> tuple[int, float]:
    """The smallest effort in [1, most] whose recall reaches `target`, and that recall; `most` where none does.

    Recall is taken to grow with the effort, so the ends of an interval are halved.

    >>> least_effort(lambda effort: effort / 100, 64, 0.3)
    (30, 0.3)
    >>> least_effort(lambda effort: effort / 100, 16, 0.3)
    (16, 0.16)
    """
    low, high, reached = 0, 1, recall(1)
    while reached < target and high < most:
        low, high = high, min(2 * high, most)
        reached = recall(high)
    while high - low > 1 and reached >= target:
        middle = (low + high) // 2
        found = recall(middle)
        if found >= target:
            high, reached = middle, found
        else:
            low = middle
    return high, reached


def tune(
    search: TunableSearch, reference: VectorSearch, queries: Vectors, target: float, progress: BuildProgress
) -> dict[str, int]:
    """Set the least effort that reaches a recall, and tell it.

    Args:
        search: what is tuned.
        reference: what it shall find.
        queries: `[n, dims]`, the first 256 count.
        target: recall@10, in (0, 1].
        progress: told the result.

    Returns:
        `effort`, and the recall that it reaches, in thousandths; nothing where there is nothing to tune.
    """
    if not search.efforts:
        return {}
    queries = queries[:SAMPLE]
    progress.start("tuning the search", total=None, unit="searches")
    wanted = reference.search(queries, TOP_K)

    def recall(effort: int) -> float:
        search.effort = effort
        progress.advance()
        return recall_at_10(search.search(queries, TOP_K), wanted)

    search.effort, reached = least_effort(recall, search.efforts, target)
    short = "" if reached >= target else f"; {target:.3f} was asked for and cannot be reached, take another kind"
    progress.note(
        f"vectors: looking at {search.effort} {search.unit} (of {search.efforts}) finds {reached:.3f} of what exact "
        f"search has among its ten best, over {len(queries)} queries{short}"
    )
    return {"effort": search.effort, "recall_permille": round(1000 * reached)}
