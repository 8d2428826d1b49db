"""Every long command at the smallest size that still has several commits or checkpoints, and how it is interrupted."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests import warmed
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World
from tests.fakes.hub import serving_hub
from tests.fakes.hub_state import TOKEN, USER
from tests.llm.tiny import save_tiny_model
from tests.publish.toys import write_run
from tests.training.toys import write_pairs

IN_FLIGHT = 4  # calls at once; a request keeps its slot until its reply is on disk
_LATENCY_S = 0.01
_SIZE = ("--limit", "6", "--seed", "7", "--concurrency", str(IN_FLIGHT))
_TRAINING = ("--batch-size", "4", "--save-steps", "1", "--set", "max_steps=3", "--set", "device=cpu")
_TRAINING += ("--min-examples", "1")
_ROLLOUTS = {"questions_per_step": 2, "group_size": 2, "max_tokens": 16}
# How long it took, what is there to resume from, and the charts of both.
_TIMES = re.compile(r"seconds|runtime|per_second|step_time")
_NO_RESULT = re.compile(r"identity\.json|journal\.sqlite|checkpoints/|curves\.|/\.|^\.")


class Command:
    """A command that is interrupted and repeated, each time in a new folder.

    Args:
        folder: where it works.
        arguments: of the command, given the folder that it writes.
        result: what has to be equal, by name, given that folder.
        server: what it pays for; None if nothing.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Callable[[Path], Sequence[str | Path]],
        result: Callable[[Path], dict[str, Any]],
        environment: Mapping[str, str] | None = None,
        server: ExtractiveServer | None = None,
    ) -> None:
        self.folder, self.arguments, self._result = folder, arguments, result
        self._cpu_s = math.inf  # of a life
        self.environment, self.server = environment or {}, server
        self._folders = (folder / f"run-{number}" for number in itertools.count(1))

    @cached_property
    def whole(self) -> Whole:
        """What it comes to if nothing interrupts it."""
        out = next(self._folders)
        self._cpu_s = wait(self.start(out), math.inf)
        calls = len(self.server.requests) if self.server else 0
        return Whole(self.finish(out), calls)  # nothing is left to be done

    def new(self) -> Path:
        """Return the folder of a new run, and forget the calls of those before."""
        assert self.whole.result
        if self.server:
            self.server.forget()
        return next(self._folders)

    def start(self, out: Path) -> warmed.Child:
        """Start it in a process group of its own, as a shell does: Ctrl-C reaches its children too.

        It has begun when this returns: before, nothing of ours is there to answer a signal.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        child = warmed.Child(in_a_group, tuple(map(str, self.arguments(out))), product.environment(**self.environment))
        product.wait_until(lambda: child.poll() is not None or has_begun(child))
        return child

    def begin(self, out: Path, share: float) -> warmed.Child:
        """Start it, and return it at this share of its life."""
        child = self.start(out)
        used = wait(child, share * self._cpu_s)
        if child.poll() is not None:  # the first one of its kind fills caches, and takes longer
            self._cpu_s = min(self._cpu_s, used)
        return child

    def interrupt(self, out: Path, share: float, *signals: int) -> warmed.Child:
        """Start it, send signals to its group at this share of its life, and return it when it has ended."""
        child = self.begin(out, share)
        for number in signals:
            if child.poll() is None and child.pid:
                os.killpg(child.pid, number)
            time.sleep(0.05)
        child.wait(300)
        if self.server:  # it finishes what it began, and charges for it
            server = self.server
            product.wait_until(lambda: server.in_flight == 0)
        return child

    def finish(self, out: Path) -> dict[str, Any]:
        """Run it to its end, and return the result."""
        done = warmed.ended(self.start(out), 300)
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return self._result(out)

    def differing(self, out: Path) -> list[str]:
        """Finish a run, and return the names of what is not as in one that nothing interrupted."""
        result = self.finish(out)
        names = sorted(self.whole.result.keys() | result.keys())
        shutil.rmtree(out, ignore_errors=True)
        return [name for name in names if result.get(name) != self.whole.result.get(name)]


@dataclass(frozen=True)
class Whole:
    """A run that nothing interrupted: its result and its calls."""

    result: dict[str, Any]
    calls: int


def wait(child: Any, cpu_s: float) -> float:
    """Return the CPU seconds of a process from now on, once they are as many as these, or it has ended.

    Seconds on a clock would be those of whatever else runs on this machine.
    """
    before = used = used_s(child) or 0.0
    while used - before < cpu_s and child.poll() is None:
        time.sleep(0.002)
        used = used_s(child) or used
    return used - before


def has_begun(child: Any) -> bool:
    """Return whether a process answers SIGTERM by itself, as every command does from its first line on."""
    try:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def used_s(child: Any) -> float | None:
    """Return the CPU seconds of a process and of its children that have ended; None once it is gone."""
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def in_a_group(*arguments: str) -> None:
    """Do what `reasonrag` does, as the head of a process group."""
    os.setpgrp()
    warmed.reasonrag(*arguments)


class Commands:
    """The long commands by name, and what they work on, which is made when the first one asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = ExitStack()

    def close(self) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Command:
        command: Command = getattr(self, name.replace(" ", "_").replace("-", "_"))
        return command

    @cached_property
    def world(self) -> World:
        return World.write(self.folder)

    @cached_property
    def model(self) -> Path:
        return save_tiny_model(self.folder / "model")

    @cached_property
    def encoder(self) -> Path:
        """The same model with a pooling, as sentence-transformers saves it."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        model = Transformer(str(self.model))
        pooling = Pooling(model.get_embedding_dimension())
        SentenceTransformer(modules=[model, pooling], device="cpu").save(str(self.folder / "encoder"))
        return self.folder / "encoder"

    @cached_property
    def run(self) -> Path:
        """A finished run of the demo's policy, whose trees have token ids."""
        out = self.folder / "run"
        product.build("--preset", "demo", "--limit", "8", "--iterations", "4", "--out", out)
        return out

    @cached_property
    def build_tree(self) -> Command:
        server = self._server()
        flags = (*self.world.flags, *server.flags, *_SIZE, "--iterations", "6")
        return self._command(lambda out: ("build-tree", *flags, "--out", out), digests, server=server)

    @cached_property
    def eval(self) -> Command:
        server = self._server()
        flags = ("--dataset", self.world.questions, "--corpus", self.world.corpus, *_SIZE, "--temperature", "0,1")
        policy = ("--policy", f"served={server.base_url}", "--set", "policy.model=extractor")
        cache = ("--set", f"retrieval.cache={self.world.cache}")
        return self._command(lambda out: ("eval", *flags, *policy, *cache, "--out", out), digests, server=server)

    @cached_property
    def dpo_train(self) -> Command:
        flags = ("--data", write_pairs(self.folder / "pairs"), "--model", self.model, "--set", "method=full")
        return self._command(lambda out: ("dpo", "train", *flags, *_TRAINING, "--out", out), digests)

    @cached_property
    def rl_train(self) -> Command:
        small = {f"rollout.{name}": value for name, value in _ROLLOUTS.items()}
        small |= {"format.max_steps": 3, "validation.steps": 2, "validation.limit": 2, "max_steps": 3, "save_steps": 1}
        small |= {"reward.name": "tests.online_rl.toys:OwnReward", "per_device_train_batch_size": 4}
        sets = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
        return self._command(lambda out: ("rl", "train", "--preset", "demo-outcome", *sets, "--out", out), digests)

    @cached_property
    def index_build(self) -> Command:
        kinds = ("--kind", "bm25", "--kind", "dense", "--encoder", self.encoder)
        return self._command(
            lambda out: ("index", "build", "--corpus", self.world.corpus, *kinds, "--out", out), digests
        )

    @cached_property
    def report(self) -> Command:
        return self._command(lambda out: ("report", self.run, "--out", out), digests)

    @cached_property
    def publish(self) -> Command:
        hub = self._open.enter_context(serving_hub())
        run = write_run(self.folder / "published")
        home = {"HF_HOME": str(self.folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", **home}

        def uploaded(out: Path) -> Any:
            """What the Hub has, and that nothing is left beside the run."""
            repo = hub.repos["datasets", f"{USER}/{out.name}"]
            (commit,) = repo.written
            assert repo.tags == {"v1.0.0": commit.oid}
            assert not list(run.parent.glob(f".{run.name}.*"))
            return {path: blob.content.replace(out.name.encode(), b"NAME") for path, blob in commit.files.items()}

        return self._command(lambda out: ("publish", run, "--repo-id", f"{USER}/{out.name}"), uploaded, online)

    @cached_property
    def index_serve(self) -> Command:
        index = self.folder / "index"
        done = product.run("index", "build", "--corpus", self.world.corpus, "--kind", "bm25", "--out", index)
        assert done.returncode == 0, done.stderr
        return self._command(lambda out: ("index", "serve", index, "--port", "0"), digests)

    @cached_property
    def env_serve(self) -> Command:
        return self._command(lambda out: ("env", "serve", "--preset", "demo-outcome", "--port", "0"), digests)

    def _command(self, arguments: Callable[[Path], Sequence[str | Path]], *more: Any, **server: Any) -> Command:
        name = "-".join(str(word) for word in arguments(Path("out"))[:2])
        return Command(self.folder / re.sub(r"\W+", "-", name), arguments, *more, **server)

    def _server(self) -> ExtractiveServer:
        return self._open.enter_context(ExtractiveServer(latency_s=_LATENCY_S))


def digests(out: Path) -> dict[str, str]:
    """Name to checksum of every file of a result; of JSON without times and pages without pictures."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not _NO_RESULT.search(name):
            content = path.read_bytes()
            if path.suffix == ".json":
                content = json.dumps(_timeless(json.loads(content)), sort_keys=True).encode()
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(each) for name, each in value.items() if not _TIMES.search(name)}
    return [_timeless(each) for each in value] if isinstance(value, list) else value
