"""The same run over HTTP: a server that fails now and then, and a real one with the demo policy."""

from __future__ import annotations

import contextlib
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests import warmed
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World
from tests.ports import keep_port

# What differs over the wire: the policy's name, so the run's identity and its pairs' ids, and how tokens are counted.
DIFFERENT = ("prompt_tokens", "completion_tokens", "policy", "config_hash", "pair_id")


class Choosy(ExtractiveServer):
    """Refuses to speak about one ship as long as it is `offended`."""

    offended = True

    def _good(self, body: product.Row) -> product.Row:
        if self.offended and "captain of Orlandis?" in body["messages"][-1]["content"]:
            raise web.HTTPBadRequest(text="this question offends the content filter")
        return super()._good(body)


def test_a_refused_question_is_set_aside_counted_and_tried_again(
    world: World, finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with Choosy() as server:
        args = (*world.flags, *server.flags, "--iterations", "12", "--seed", "7", "--out", out)
        done = product.run("build-tree", *args)
        assert done.returncode == 1  # one of sixteen is more than the five per cent that may fail: no other one begins
        assert "content filter" in done.stderr
        assert product.summary(out)["questions"]["failed"] == {"refused": 1}
        assert product.run("build-tree", *args, "--max-failed", "0.1").returncode == 0
        assert product.summary(out)["questions"] == {"total": 16, "finished": 15, "failed": {"refused": 1}}
        server.offended = False
        product.build(*args)
        assert server.paid_twice == 0
    assert product.summary(out)["questions"] == {"total": 16, "finished": 16, "failed": {}}
    for read in (product.tree_rows, product.pair_rows):
        assert product.without(read(out), *DIFFERENT) == product.without(read(finished_run), *DIFFERENT)


@contextlib.contextmanager
def transformers_serve(model: str, cache: Path) -> Iterator[str]:
    """The base URL of `transformers serve` on loopback; it lists what the Hub's cache holds, here nothing."""
    cache.mkdir()
    kept = keep_port()
    port = kept.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    server = warmed.Child(warmed.script, tuple(command), product.environment(HF_HUB_CACHE=str(cache)))
    try:
        product.wait_until(lambda: server.poll() is not None or _healthy(port), timeout_s=120)
        assert server.poll() is None, "transformers serve ended at once"
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        kept.close()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
def test_the_demo_policy_behind_transformers_serve(world: World, tmp_path: Path) -> None:
    from reasonrag.core.models import demo_folder

    out = tmp_path / "run"
    model = str(demo_folder())
    with transformers_serve(model, tmp_path / "hub") as url:
        done = product.build(
            *("--preset", "demo", "--limit", "3", "--iterations", "8", "--seed", "7"),
            *("--policy", url, "--policy-model", model),
            *("--set", f"retrieval.cache={world.cache}", "--out", out),
            timeout_s=300,
        )
    print(done.stdout)
    summary = product.summary(out)
    assert summary["questions"] == {"total": 3, "finished": 3, "failed": {}}
    assert summary["pairs"]["total"] > 0
