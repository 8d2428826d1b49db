"""A run over the machines of a Ray cluster: one Ray task a shard (`pip install 'reasonrag[ray]'`).

    python -m examples.build_on_ray --config configs/hotpotqa-vllm.yaml --out runs/hotpotqa --shards 64 [--address auto]

A task does what `build-tree --shard I/S` does, so the files are the same as by hand. All nodes see the folder of the
run and the files that the configuration names under the same paths. Ray starts a task again if its process or node
dies, and the shard's journal there keeps everything that was paid for. On Ctrl-C the calls in flight end first. The
same command resumes the run. The policy is a server: otherwise each shard would load a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import ray

import reasonrag
from reasonrag.pipeline.build import Build

CORES_A_SHARD = 0.25  # a shard waits for servers most of the time


@contextlib.asynccontextmanager
async def drained_on_cancel(build: Build) -> AsyncIterator[None]:
    """Let the calls in flight end when Ray cancels the task, which sends SIGINT."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, build.drain)
    yield
    loop.remove_signal_handler(signal.SIGINT)


def build_shard(folder: Path, file: Path, out: Path, shard: reasonrag.Shard) -> str:
    """Build a shard in a task; return the reason if it has not finished."""
    os.chdir(folder)
    try:
        reasonrag.build_trees(reasonrag.load_config(file=file), out, shard=shard, show=drained_on_cancel)
    except reasonrag.ReasonRAGError as error:
        return str(error)
    return ""


def main() -> None:
    """Run a task for each shard, and wait for all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--address", default="auto", help="a Ray cluster; local starts Ray here")
    given = parser.parse_args()
    ray.init(given.address, include_dashboard=False, log_to_driver=False)
    task = ray.remote(num_cpus=CORES_A_SHARD, max_retries=-1, scheduling_strategy="SPREAD")(build_shard)
    pending = {}
    for number in range(given.shards):
        shard = reasonrag.Shard(number, given.shards)
        pending[task.remote(Path.cwd(), given.config, given.out.absolute(), shard)] = shard
    problems = []
    while pending:
        try:
            ended, _ = ray.wait(list(pending))
        except KeyboardInterrupt:
            for reference in pending:
                ray.cancel(reference)
            continue
        for reference in ended:
            shard = pending.pop(reference)
            try:
                problem = ray.get(reference)
            except ray.exceptions.TaskCancelledError:
                problem = "it was stopped"
            print(f"shard {shard}: {problem or 'built'}", flush=True)
            problems += [problem] if problem else []
    ray.shutdown()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
