"""A run over the machines of a Ray cluster: one Ray task a shard, which Ray places, and starts again if its node dies.

A task is `build-tree --shard I/S` and nothing else, so the files are the same as by hand. The run's folder is on a disk
that all nodes see: what a dead node has paid for is in the shard's journal there, and the next task goes on from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reasonrag.core import event_loop
from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError, Interrupted, ReasonRAGError, RunError, Stalled
from reasonrag.core.types import Question
from reasonrag.core.watch import beat, progressing
from reasonrag.pipeline.build import Build, build_folder
from reasonrag.pipeline.parts import Parts, check, open_parts, open_retriever
from reasonrag.pipeline.progress import Progress
from reasonrag.pipeline.shards import join, unfinished
from reasonrag.rollout import callable_in_notebooks
from reasonrag.storage.files import read_json, write_json
from reasonrag.storage.runs import RunFolder
from reasonrag.storage.shards import WHOLE, Shard, cut

# A shard waits for servers most of the time, and its last questions keep few calls in flight: several on a core keep
# an engine busy where one at a time does not.
_CORES_A_SHARD = 0.25
_REPORT_EVERY_S = 2.0
_PROGRESS = "progress.json"

Show = Callable[[Progress, Callable[[], None]], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Work:
    """What a task gets. Paths in the configuration are relative to `folder`."""

    config: Config
    out: Path
    folder: Path
    shard: Shard
    questions: list[Question]
    content: dict[str, str]


@callable_in_notebooks
def build_on_ray(
    config: Config,
    out: Path,
    address: str,
    *,
    shards: int | None = None,
    show: Show,
) -> dict[str, Any]:
    """Build a run in shards that are tasks of Ray, as `build-tree --ray` does. The same call resumes it.

    Args:
        config: from `load_config`, with models behind addresses that all nodes reach.
        out: the folder of the run, on a disk that all nodes see, as are the files that the configuration names.
        address: as `ray.init` takes it: "auto" is the cluster of this machine, "local" starts Ray here.
        shards: how many; None takes those that the folder has, or the square root of the number of questions.
        show: returns a context manager for the time of the build. It gets the progress of all shards, and a function
            that stops them when their calls in flight have ended.

    Returns:
        The content of the run's `run.json`.

    Raises:
        Interrupted: the build was stopped; everything paid for is kept.
        ConfigError, DataError, RunError: bad input, no Ray, or a node that does not see the same files.
    """
    for role, model in (("policy", config.policy), ("judge", config.judge.llm)):
        if model.address.loads_weights:
            raise ConfigError(
                f"the {role} {model.spec} would be loaded by each shard; with --ray, start a server of it and give its "
                "URL"
            )
    parts = open_parts(config)
    out = out.absolute()
    with RunFolder.open(out, config, parts.content, waiting=lambda: None) as run:
        event_loop.run(_check(parts, run.begun, config.run.wait_s))  # before Ray is asked
        number = shards or run.facts().get("shards") or max(math.isqrt(len(parts.questions)), 2)
        run.bind_shards(number)
        left = unfinished(run)
    questions = cut(parts.questions, number)
    work = {shard: questions[shard.number] for shard in left}
    ray = _connect(address)
    try:
        event_loop.run(_build(ray, config, out, parts, work, show))
    finally:
        ray.shutdown()
    with RunFolder.open(out, config, parts.content, waiting=lambda: None) as run:
        return join(run) or {}


async def _check(parts: Parts, begun: bool, wait_s: float) -> None:
    async with contextlib.aclosing(parts):
        await check(parts, begun=begun, wait_s=wait_s)


def _connect(address: str) -> Any:
    """Connect to a cluster, or start one here; return the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs Ray, which is not installed; pip install 'reasonrag[ray]'") from error
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # where nobody listens, Ray tries for more than ten minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        stop = signal.getsignal(signal.SIGTERM)  # which Ray replaces, by one that exits with 15
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, stop)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}; start one (ray start --head), give its address, or use this "
            "machine alone with --ray local",
            quoting=error,
        ) from error
    return ray


async def _build(
    ray: Any,
    config: Config,
    out: Path,
    parts: Parts,
    shards: Mapping[Shard, list[Question]],
    show: Show,
) -> None:
    """Run a task for each shard until all have ended.

    Raises:
        Interrupted: they were stopped.
        RunError: what a task raised first; the others are stopped before.
        Stalled: a task, or all of them, did not get on.
    """
    places = config.retrieval
    # Without a place to search, the corpus is made of the paragraphs of all questions, or of what a plug-in makes.
    searched = None if places.index or places.url or places.corpus else ray.put(parts.questions)
    task = ray.remote(num_cpus=_CORES_A_SHARD, max_retries=-1, scheduling_strategy="SPREAD")(_build_shard)
    pending = {}
    for shard, questions in shards.items():
        work = _Work(config, out, Path.cwd(), shard, questions, parts.content)
        pending[task.remote(work, [searched])] = shard  # in a list, the reference is not fetched before it is used
    progress = Progress(len(parts.questions), "questions", written=Counter(nodes=0, pairs=0))
    before = Progress(0)
    before.done = before.done_before = progress.total - sum(map(len, shards.values()))
    counts = {WHOLE: before.counts()}  # by shard; WHOLE is those that have finished before
    for shard, questions in shards.items():
        counts[shard] = Progress(0, planned=len(questions) * config.search.iterations).counts()
    failure: ReasonRAGError | None = None

    def drain() -> None:
        for reference in pending:
            ray.cancel(reference)  # a task that runs gets SIGINT; one that waits for a core never begins

    # A shard that stands still says where: it is waited for longer.
    async with show(progress, drain), progressing(2 * config.stall_s):
        while pending:
            known = dict(counts)
            ended, _ = await asyncio.to_thread(ray.wait, list(pending), timeout=_REPORT_EVERY_S)
            counts |= await asyncio.to_thread(_counts, out, list(pending.values()))
            progress.add_up(counts.values())
            if ended or counts != known:
                beat()
            for reference in ended:
                del pending[reference]
                try:
                    error = ray.get(reference)
                except ray.exceptions.TaskCancelledError:
                    error = Interrupted("stopped; all finished work is kept")
                if error and (failure is None or isinstance(failure, Interrupted)):
                    failure = error
                    if not isinstance(error, Interrupted):
                        drain()
    if failure is not None:
        raise failure


def _counts(out: Path, shards: Iterable[Shard]) -> dict[Shard, dict[str, Any]]:
    """Return the progress of the shards that have begun."""
    found = {shard: read_json(shard.folder(out) / _PROGRESS) for shard in shards}
    return {shard: counts for shard, counts in found.items() if counts is not None}


def _build_shard(work: _Work, searched: list[Any]) -> ReasonRAGError | None:
    """Build a shard in a task; return None once it has finished, else why not."""
    try:
        try:
            os.chdir(work.folder)
        except OSError as error:
            raise RunError(f"{work.folder} cannot be entered ({error.strerror})") from error
        if not (work.out / "config.yaml").exists():
            raise RunError(f"{work.out} is not the folder that the run was started in")
        retriever = None
        if searched[0] is not None:
            import ray

            retriever = open_retriever(work.config, ray.get(searched[0]))
        parts = open_parts(work.config, questions=work.questions, retriever=retriever)
        parts = replace(parts, content=parts.content | {"questions": work.content["questions"]})  # of all questions
        # The task before may still be dying, on a node that cannot be reached: the lock is free when it is dead.
        with RunFolder.open(work.out, work.config, parts.content, shard=work.shard, waiting=lambda: None) as run:
            build_folder(run, parts, lambda build: _reporting(build, run.path / _PROGRESS))
    except Interrupted as error:
        return error
    except ReasonRAGError as error:
        return (Stalled if isinstance(error, Stalled) else RunError)(
            f"shard {work.shard} on {socket.gethostname()}: {error} (all nodes have to see the same files under the "
            "same paths, and have the same versions installed)"
        )
    return None


@contextlib.asynccontextmanager
async def _reporting(build: Build, path: Path) -> AsyncIterator[None]:
    """Write the progress of a task to a file while the body runs, and stop when the task is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    async def report() -> None:
        while not ended.is_set():
            await asyncio.to_thread(write_json, path, build.progress.counts())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _REPORT_EVERY_S)
        write_json(path, build.progress.counts())

    loop.add_signal_handler(signal.SIGINT, build.drain)
    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        ended.set()
        await reporting
        loop.remove_signal_handler(signal.SIGINT)
