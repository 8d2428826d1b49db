"""What a run loses while servers are away.

    python -m benchmarks.outage [--questions 500] [--away 10]

A build on a loopback stub (a process of its own, 50 ms a call). Once a third of the questions are done, the server is
killed for `--away` seconds; the issue's figure is 60. Then the same on three servers, of which one is killed for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.stub import parts, questions, server
from benchmarks.table import Table, options
from reasonrag.commands.console import log_plainly
from reasonrag.core import event_loop
from reasonrag.core.config import load_config
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import Build
from reasonrag.pipeline.models import open_llm
from reasonrag.storage.runs import RunFolder

LATENCY_S = 0.05


async def build(count: int, servers: int, away_s: float | None) -> tuple[Build, float, float]:
    """Kill the first server in the middle; return the build, and seconds until its work went on and in all."""
    with contextlib.ExitStack() as others, tempfile.TemporaryDirectory() as folder:
        killed = contextlib.ExitStack()
        urls = [killed.enter_context(server(LATENCY_S))]
        urls += [others.enter_context(server(LATENCY_S)) for _ in range(servers - 1)]
        overrides = {"policy.spec": ",".join(urls), "policy.model": "stub", "search.iterations": 4}
        config = load_config(overrides=overrides)
        run = others.enter_context(RunFolder.open(Path(folder) / "run", config, {}))
        built = Build(config, parts(questions(count), ReasonRAGFormat(), open_llm(config.policy, "policy")), run)

        async def interfere() -> float:
            await _done(built, count // 3)
            killed.close()
            done = built.progress.done
            began = time.monotonic()
            if away_s is not None:
                await asyncio.sleep(away_s)
                others.enter_context(server(LATENCY_S, urlsplit(urls[0]).port or 0))
            back = time.monotonic()
            await _done(built, done + count // 20)
            return time.monotonic() - (back if away_s is not None else began)

        began = time.monotonic()
        until_going_on, _ = await asyncio.gather(interfere(), built.run())
        return built, until_going_on, time.monotonic() - began


async def _done(built: Build, questions: int) -> None:
    while built.progress.done < questions:  # noqa: ASYNC110 -- a build tells nobody
        await asyncio.sleep(0.05)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--away", type=float, default=10.0, help="seconds")
    given = parser.parse_args()
    log_plainly()  # on stderr
    table = Table(__doc__)
    for name, servers, away_s in ((f"away for {given.away:g} s", 1, given.away), ("one of three killed", 3, None)):
        built, going_on_s, seconds = event_loop.run(build(given.questions, servers, away_s))
        progress = built.progress
        table.row(f"{name}: questions set aside", float(progress.failed), f"of {given.questions}", limit="== 0")
        table.row(f"{name}: questions finished", float(progress.done), limit=f"== {given.questions}")
        table.row(f"{name}: until 5 % more questions were done", going_on_s, "s")
        table.row(f"{name}: the whole run", seconds, "s")
    table.note(f"{LATENCY_S:g} s a call, {progress.usage.calls} calls a run; seconds depend on the machine's load")
    table.show(given.json)


if __name__ == "__main__":
    main()
