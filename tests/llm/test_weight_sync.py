"""A push: pause, transfer, reset of the prefix cache, resume, and what each of them leaves behind where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.llm.weight_sync import VLLMServerSync, send_chunks
from tests import warmed
from tests.serving import HttpServer

WHOLE = ["pause?mode=wait", "start", "finish", "reset_prefix_cache?reset_running_requests=true", "resume"]


class FakeVLLM(HttpServer):
    """The control endpoints of a vLLM server on loopback.

    Attributes:
        calls: control requests and what the transport did, in order.
        faults: by path, the replies before the good ones: a status, or "drop" for a closed connection.
        paused: whether generation is.
    """

    def __init__(self, **faults: list[int | str]) -> None:
        self.calls: list[str] = []
        self.faults = faults
        self.weights: dict[str, Any] = {}
        self.paused = False
        super().__init__()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/{name}", self._control)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.calls.append(str(request.rel_url).removeprefix("/"))
        fault = next(iter(self.faults.get(name, [])), None)
        if fault is not None:
            self.faults[name].pop(0)
        if fault == "drop":
            assert request.transport is not None
            request.transport.close()
        if isinstance(fault, int):
            return web.json_response({"error": "no"}, status=fault)
        if name == "pause":
            self.paused = True
        elif name == "resume":
            self.paused = False
        elif name == "reset_prefix_cache":
            return web.json_response({"success": fault != "kept"})
        return web.json_response({})


class Memory:
    """The client that sends by NCCL on GPUs: hands the values over in memory, between the server's start and finish."""

    def __init__(self, server: FakeVLLM) -> None:
        self.server = server

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        self.server.calls.append("start")
        yield
        self.server.calls.append("finish")

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], tensors: Iterator[Any]) -> None:
        assert self.server.paused
        for name, tensor in tensors:
            self.server.weights[name] = int(tensor)


def opened(server: FakeVLLM) -> VLLMServerSync:
    return VLLMServerSync(f"{server.url}/v1", client=Memory(server), backoff_s=0.01, pause_timeout_s=5.0)


def weights(push: int) -> list[tuple[str, Any]]:
    import torch

    return [("v", torch.tensor(-push)), ("w", torch.tensor(push))]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


def test_a_push_pauses_transfers_resets_the_cache_and_resumes(server: FakeVLLM):
    sync = opened(server)
    sync.push(weights(1))
    assert server.calls == WHOLE
    assert (server.weights, server.paused) == ({"v": -1, "w": 1}, False)


def failing(after: int = 1) -> Iterator[tuple[str, Any]]:
    yield from weights(9)[:after]
    raise MemoryError("no room for the next tensor")


def test_a_transfer_that_fails_leaves_the_server_paused_until_the_next_whole_push(server: FakeVLLM):
    sync = opened(server)
    sync.push(weights(1))
    with pytest.raises(LLMError, match=r"the weights: no room for the next tensor.*stays paused") as caught:
        sync.push(failing())
    assert caught.value.cause == "weight_sync"
    assert (server.paused, server.calls[-1]) == (True, "start")
    sync.push(weights(2))
    assert (server.paused, server.weights["w"]) == (False, 2)


@pytest.mark.parametrize("fault", ["kept", 409], ids=["success: false", "refused"])
def test_a_cache_that_is_not_reset_fails_the_push(server: FakeVLLM, fault: int | str):
    server.faults.update(reset_prefix_cache=[fault])
    sync = opened(server)
    with pytest.raises(LLMError, match="stays paused"):
        sync.push(weights(1))
    assert server.paused


def test_a_server_that_cannot_be_paused_keeps_its_weights(server: FakeVLLM):
    sync = opened(server)
    sync.push(weights(1))
    server.faults["pause"] = [400]
    with pytest.raises(LLMError, match="cannot be paused"):
        sync.push(weights(2))
    assert server.weights["w"] == 1


@pytest.mark.parametrize(("name", "fault"), [("pause", 503), ("reset_prefix_cache", "drop"), ("resume", 503)])
def test_a_hiccup_of_a_control_request_is_overcome(server: FakeVLLM, name: str, fault: int | str):
    server.faults.update(**{name: [fault]})
    sync = opened(server)
    sync.push(weights(1))
    assert (server.paused, server.weights["w"]) == (False, 1)


def test_a_server_without_the_endpoints_is_told_how_to_start(server: FakeVLLM):
    server.faults.update(pause=[404])
    sync = opened(server)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        sync.push(weights(1))


class Client:
    """Records what TRL's client is asked for."""

    def __init__(self) -> None:
        self.updates: list[list[tuple[str, str, list[int]]]] = []
        self.sent: dict[str, Any] = {}
        self.open = False

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        self.open = True
        yield
        self.open = False

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], tensors: Iterator[Any]) -> None:
        assert self.open
        self.updates.append(metadata)
        self.sent |= dict(tensors)


def test_tensors_travel_in_chunks_within_one_update():
    import torch

    tensors = {name: torch.full((2, 3), float(n)) for n, name in enumerate("abcd")}
    tensors["b"] = torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2).T
    client = Client()
    send_chunks(client, tensors.items(), chunk_bytes=50)
    assert [[name for name, _, _ in update] for update in client.updates] == [["a", "b"], ["c", "d"]]
    assert client.updates[0] == [("a", "float32", [2, 3]), ("b", "bfloat16", [2, 3])]
    assert all(torch.equal(client.sent[name], tensor) for name, tensor in tensors.items())
    assert client.sent["b"].is_contiguous()


def test_an_iterator_that_fails_does_so_before_the_workers_wait_for_its_chunk():
    import torch

    def tensors() -> Iterator[tuple[str, Any]]:
        yield "a", torch.zeros(4)
        raise MemoryError

    client = Client()
    with pytest.raises(MemoryError):
        send_chunks(client, tensors(), chunk_bytes=1 << 20)
    assert client.updates == []


def _one_of_two(rank: int, rendezvous: str, url: str, said: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

    class Remote(Client):
        def update_named_params(self, metadata: list[tuple[str, str, list[int]]], tensors: Iterator[Any]) -> None:
            assert rank == 0
            super().update_named_params(metadata, tensors)
            if len(self.updates) == 2:
                raise OSError("the group is gone")

    sync, seen, message = VLLMServerSync(url, client=Remote()), [], ""

    def tensors() -> Iterator[tuple[str, Any]]:
        for tensor in weights(1):
            seen.append(tensor)
            yield tensor

    sync.push(tensors())
    try:
        sync.push(tensors())
    except LLMError as error:
        message = str(error)
    said.put((rank, len(seen), message))
    dist.destroy_process_group()


@pytest.mark.slow
def test_of_two_processes_one_pushes_and_both_know_how_it_went(tmp_path: Path):
    warm = warmed.context()
    said = warm.Queue()
    with FakeVLLM() as server:
        group = [
            warm.Process(target=_one_of_two, args=(rank, str(tmp_path / "meet"), server.url, said)) for rank in range(2)
        ]
        for process in group:
            process.start()
        results = sorted(said.get(timeout=60) for _ in group)
        for process in group:
            process.join(10)
        pauses = [call for call in server.calls if call.startswith("pause")]
    assert len(pauses) == 2
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(2)]
    assert all("the group is gone" in message for *_, message in results)
