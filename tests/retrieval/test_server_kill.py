"""The retrieval server as a process: its first line, its end by signals, and a kill -9 under an explorer's run."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.types import Completion, Prompt, Question
from reasonrag.demo.reader import ExtractiveLLM
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import Parts
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.remote import RemoteRetriever
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import tree_schema
from tests.e2e.product import wait_until
from tests.e2e.world import questions
from tests.faults.matrix import Figure
from tests.ports import refuses
from tests.retrieval.serving import GatedServer, ServerProcess, ask, found, sea_index, wait_for

SEA_QUESTIONS = [
    Question(row["id"], row["question"], tuple(row["golden_answers"]), dataset="sea") for row in questions()[:8]
]
CLIENTS = 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.fault(
    "drain", "SIGTERM while `index serve` has requests in flight", "all are answered, then exit code 143"
)
@pytest.mark.fault(
    "3", "SIGTERM to a retrieval server that has requests", "each that was taken is answered; it exits with 143"
)
def test_after_sigterm_every_request_that_was_taken_is_answered(cache: Path, tmp_path: Path, figure: Figure) -> None:
    server = GatedServer(tmp_path, tmp_path / "gate")
    with ThreadPoolExecutor(CLIENTS) as pool:
        taken = [pool.submit(ask, server.port, f"Orlandis {i}", "held") for i in range(CLIENTS)]
        wait_for(server.port, "reasonrag_retrieval_requests_in_flight", CLIENTS)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(server.port))
        (tmp_path / "gate").touch()
        answers = [request.result() for request in taken]
    expected = [found(sea_index(cache), [f"Orlandis {i}", "held"], 3) for i in range(CLIENTS)]
    figure(f"{sum(status == 200 for status, _, _ in answers)} of {CLIENTS} in flight answered")
    assert [(status, body) for status, body, _ in answers] == [(200, {"result": result}) for result in expected]
    assert server.ended() == (143, "")


@pytest.mark.fault("4", "Ctrl-C twice to a server that has requests", "out at once with 130")
def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, figure: Figure) -> None:
    server = GatedServer(tmp_path, tmp_path / "never")
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(ask, server.port, "held")
        wait_for(server.port, "reasonrag_retrieval_requests_in_flight", 1)
        server.send_signal(signal.SIGINT)
        wait_until(lambda: refuses(server.port))
        server.send_signal(signal.SIGINT)
        code, _ = server.ended()
        figure(f"exit code {code}, and the request in flight {'failed' if request.exception() else 'was answered'}")
        assert code == 130
        with pytest.raises(OSError):
            request.result()


def test_what_is_not_answered_by_the_deadline_of_the_drain_is_told_so(tmp_path: Path) -> None:
    server = GatedServer(tmp_path, tmp_path / "never", drain_s=1)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(ask, server.port, "held")
        wait_for(server.port, "reasonrag_retrieval_requests_in_flight", 1)
        server.send_signal(signal.SIGTERM)
        assert request.result()[0] == 503
    code, stderr = server.ended()
    assert code == 143 and "Traceback" not in stderr


class KillingPolicy(ExtractiveLLM):
    """Kills the server at one of its calls, and has it started again a moment later."""

    def __init__(self, server: ServerProcess, cache: Path, at_call: int) -> None:
        self.server = server
        self.calls = 0
        self._at_call = at_call
        self._cache = cache
        self.restart: threading.Thread | None = None

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        self.calls += 1
        if self.calls == self._at_call:
            self.server.kill()
            self.restart = threading.Thread(target=self._start_again)
            self.restart.start()
        return await super().complete(prompt, sampling)

    def _start_again(self) -> None:
        time.sleep(0.5)
        self.server = ServerProcess(self._cache, self.server.port)


def build(folder: Path, retriever: Retriever, policy: ExtractiveLLM) -> tuple[list[Any], dict[str, Any]]:
    """Rows and summary of a `build-tree` in this process."""
    config = load_config(overrides={"search.iterations": 4, "policy.concurrency": 4, "run.max_failed": 1.0})
    parts = Parts(SEA_QUESTIONS, retriever, ReasonRAGFormat(), policy, None, {"policy": "extractive"})
    summary = build_trees(config, folder, parts=parts)
    return list(read_shards(folder / "trees", "nodes", tree_schema())), summary


def test_an_explorer_loses_nothing_when_its_server_is_killed_and_started_again(cache: Path, tmp_path: Path) -> None:
    expected, whole = build(tmp_path / "in-process", sea_index(cache), ExtractiveLLM())
    server = ServerProcess(cache)
    assert server.line == f"listening on http://127.0.0.1:{server.port} (30 passages, bm25)"
    policy = KillingPolicy(server, cache, at_call=40)
    try:
        rows, summary = build(tmp_path / "remote", RemoteRetriever(server.url), policy)
    finally:
        if policy.restart is not None:
            policy.restart.join()
        policy.server.kill()
    assert policy.server is not server and policy.calls > 40
    assert summary["questions"] == whole["questions"] == {"total": 8, "finished": 8, "failed": {}}
    assert rows == expected


def test_a_file_that_is_cut_short_while_it_is_mapped_ends_the_server_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    server = GatedServer(tmp_path, tmp_path / "gate")
    assert ask(server.port, "Orlandis")[0] == 200
    for file in tmp_path.glob("bm25-*/passages/passages.jsonl"):
        os.truncate(file, 0)
    with pytest.raises(OSError):
        ask(server.port, "Orlandis")
    code, said = server.ended()
    assert code == 2 and "a file of an index was cut short while it was in use" in said
