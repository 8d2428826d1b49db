"""What it costs to open, export and look at a run of many questions: CPU, and the peak of memory.

    python -m benchmarks.export [--questions 400] [--json]

The run is generated: six searched trees of about 60 nodes and 5 kB of text and numbers a node, with token ids and
log-probabilities as a server returns them, under many ids and questions. Each figure is of a new process, at half of
the questions and at all of them; the difference is what more questions cost, in CPU and at the peak of memory.
`--questions 20000` measures that size itself (about 10 minutes).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.process import apart, memory_bytes
from benchmarks.stub import REPLY_TOKENS, StubPolicy, parts, questions
from benchmarks.table import Table, options
from reasonrag.core.config import Config, load_config
from reasonrag.core.types import Question
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import Build
from reasonrag.pipeline.parts import Parts
from reasonrag.pipeline.tables import export_pairs, tree_rows
from reasonrag.report import write_report
from reasonrag.storage.folder import RunFolder, read_run
from reasonrag.storage.parquet import Row, pack
from reasonrag.storage.tables import tree_schema

NODES = range(45, 76)  # of a model tree


def opened(count: int) -> tuple[Config, Parts]:
    """Return what `build-tree` of that many questions is given."""
    config = load_config(overrides={"search.iterations": 16})
    return config, parts(questions(count), ReasonRAGFormat(), StubPolicy(ids=True))


def generate(folder: Path, first: int, last: int) -> None:
    """Store the trees of the questions from `first` to before `last` in the journal of the run."""
    config, given = opened(last)
    schema = tree_schema(graded=False)
    with RunFolder(folder, config, given.content).open() as run:
        search = Build(config, given, run).search

        async def store() -> None:
            models: list[tuple[Question, str]] = []
            for model in questions(60):
                tree = await search.run(model)
                if len(tree.nodes) in NODES:
                    models.append((model, json.dumps(tree_rows(tree, given.format, alpha=config.value.alpha))))
                if len(models) == 6:
                    break
            for start in range(first, last, 100):  # a commit for many trees
                await asyncio.gather(*(put(number, models) for number in range(start, min(start + 100, last))))

        async def put(number: int, models: list[tuple[Question, str]]) -> None:
            new = given.questions[number]
            model, text = models[number % len(models)]
            text = text.replace(f'"question_id": "{model.id}"', f'"question_id": "{new.id}"')
            rows: list[Row] = json.loads(text.replace(model.question, new.question))
            draw = np.random.default_rng(number)  # as hard to compress as what a model samples
            for row in rows[1:]:
                row["token_ids"] = draw.integers(0, 150_000, REPLY_TOKENS)
                row["logprobs"] = -draw.exponential(0.5, REPLY_TOKENS)
            await run.journal.put_tree(new.dataset, new.id, pack(rows, schema))

        asyncio.run(store())


def opening(folder: Path, count: int) -> None:
    """Open the finished run, as the same `build-tree` command does, and find nothing left to build."""
    config, given = opened(count)
    with RunFolder(folder, config, given.content).open() as run:
        assert not Build(config, given, run).unfinished()


def export(folder: Path, count: int) -> None:
    config, given = opened(count)
    with RunFolder(folder, config, given.content).open() as run:
        Build(config, given, run).export()


def pairs(folder: Path, count: int) -> None:
    config, summary = read_run(folder)
    export_pairs(folder, config, policy=summary["policy"], config_hash=summary["config_hash"])


def report(folder: Path, count: int) -> None:
    write_report(folder)


def measured(function: Callable[[Path, int], None], folder: Path, count: int) -> tuple[float, float]:
    """Return CPU seconds of the call and the peak of this process in MB."""
    started = time.process_time()
    function(folder, count)
    return time.process_time() - started, memory_bytes("VmHWM") / 1e6


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=400)
    given = parser.parse_args()
    table = Table(__doc__)
    sizes = (given.questions // 2, given.questions)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as place:
        folder, stored = Path(place) / "run", 0
        for size in sizes:
            apart(generate, folder, stored, size)
            stored = size
            for name, function in COMMANDS.items():
                # Opening takes so little that one measurement says nothing of its slope.
                turns = [apart(measured, function, folder, size) for _ in range(9 if name == "opening" else 1)]
                found[name].append(sorted(turns)[len(turns) // 2])
        nodes = read_run(folder)[1]["trees"]["nodes"]
        journal = sum(path.stat().st_size for path in folder.glob("journal.sqlite*"))
        pages = len(list((folder / "report").rglob("*.html")))
    added = (sizes[1] - sizes[0]) / 1000
    for name, ((small_cpu, small_peak), (cpu, peak)) in found.items():
        cpu_slope, peak_slope = (cpu - small_cpu) / added, (peak - small_peak) / added
        peak_limit = "<= 600" if name == "export" else ""
        table.row(f"{name}: CPU a node", cpu_slope * sizes[1] / nodes, "ms")
        if name == "opening":
            table.row("opening: CPU at 20,000 questions", cpu + (20 - sizes[1] / 1000) * cpu_slope, "s", limit="<= 2")
        table.row(f"{name}: peak", peak, "MB", limit=peak_limit)
        table.row(f"{name}: peak, per 1,000 questions more", peak_slope, "MB")
    table.note(f"{sizes[1]:,} questions, {nodes:,} nodes; journal {journal / 1e6:.0f} MB, {pages} pages in the report")
    table.note("CPU a node: of the second half of the questions, without what a process costs once")
    table.show(given.json)


COMMANDS = {"opening": opening, "export": export, "pairs": pairs, "report": report}


if __name__ == "__main__":
    main()
