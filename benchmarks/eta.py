"""How right the time left is that `build-tree` and `eval` show, in runs of the demo world.

    python -m benchmarks.eta [--questions 60]

Four runs: the demo's search, deep trees of a quarter of the questions, a run that goes on after it was stopped at its
half, and an evaluation of ten times the questions. Seconds and estimate are noted five times a second. A figure is the
estimate at a share of the run's time over what was really left, or its inverse if that is larger: 1 is right. The
estimate by finished questions stands beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.core.errors import Interrupted
from reasonrag.evaluation.run import Evaluation
from reasonrag.pipeline.build import build_trees

SHARES = (0.1, 0.25, 0.5)
EVERY_S = 0.2
Seen = list[tuple[float, float | None, float | None]]  # seconds, the estimate, the old one


def watched(run: Callable[[Any], object], *, stop_at: float = 1.0) -> Seen:
    """Run work, which takes what shows it, until `stop_at` of it is done; return what was seen."""
    seen: Seen = []

    @contextlib.asynccontextmanager
    async def show(work: Any) -> AsyncIterator[None]:
        progress = work.progress

        async def watch() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                progress.line()
                ended = progress.done - progress.done_before
                old = progress.seconds / ended * (progress.total - progress.done) if ended else None
                seen.append((progress.seconds, progress.eta_s, old))
                if progress.share >= stop_at:
                    work.drain()

        watching = asyncio.create_task(watch())
        yield
        watching.cancel()
        seen.append((progress.seconds, 0.0, 0.0))

    with contextlib.suppress(Interrupted):
        run(show)
    return seen


def trees(out: Path, settings: dict[str, Any]) -> Callable[[Any], object]:
    """Return what builds the trees of a configuration."""
    return lambda show: build_trees(load_config(preset="demo", overrides=settings), out, show=show)


def measure(table: Table, questions: int) -> None:
    usual = {"questions.limit": questions}
    deep = {"questions.limit": max(questions // 4, 2), "search.iterations": 64, "seed": 1}
    with tempfile.TemporaryDirectory() as folder:
        resumed = Path(folder) / "resumed"
        watched(trees(resumed, usual | {"seed": 2}), stop_at=0.5)
        evaluated = load_config(preset="demo", overrides={"questions.limit": 10 * questions})
        evaluation = Evaluation({"demo": evaluated}, Path(folder) / "eval", temperatures=(0.0, 1.0))
        runs = {
            "the demo's search": watched(trees(Path(folder) / "usual", usual)),
            "64 iterations": watched(trees(Path(folder) / "deep", deep)),
            "resumed at its half": watched(trees(resumed, usual | {"seed": 2})),
            "eval": watched(evaluation.run),
        }
    for name, seen in runs.items():
        total = seen[-1][0]
        for share in SHARES:
            at, estimate, old = min(seen, key=lambda one: abs(one[0] - share * total))
            left = total - at
            before = "none yet" if old is None else f"{old:.0f} s"
            said = "nothing" if estimate is None else f"{estimate:.0f} s"
            what = f"{name}, at {share:.0%}: said {said}, were {left:.0f} s (by finished questions {before})"
            table.row(what, None if not estimate else max(estimate / left, left / estimate), "", limit="<= 2")
    table.note(f"{questions} questions, or a quarter of them with 64 iterations; the demo's policy in this process")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=60)
    given = parser.parse_args()
    table = Table(__doc__)
    measure(table, given.questions)
    table.show(given.json)


if __name__ == "__main__":
    main()
