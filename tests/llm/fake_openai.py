"""An OpenAI-compatible server on loopback that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.serving import HttpServer

Reply = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Answer:
    """Answer with this status and body instead. `{authorization}` in the body becomes the request's header."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True)
class Disconnect:
    """Close the connection after `sent` bytes of a longer body; with 0, without any answer (a stale keep-alive)."""

    sent: int = 0


@dataclass(frozen=True)
class Slow:
    """Answer well, but after this long."""

    seconds: float


Fault = Answer | Disconnect | Slow


class FakeOpenAI(HttpServer):
    """`/v1/chat/completions`, `/v1/completions` and `/v1/models`, in a thread of its own.

    with FakeOpenAI(lambda request: "<answer>Jaws</answer>") as server:
        ServerLLM(server.base_url, "fake")

    Attributes:
        requests: the bodies received, in order.
        headers: their headers.
        arrived_at: their times, `time.monotonic()`.
        most_in_flight: requests that were being answered at once.
        peers: client connections seen.
    """

    def __init__(
        self,
        reply: Reply = lambda request: "ok",
        faults: Iterable[Fault] = (),
        *,
        models: tuple[str | dict[str, Any], ...] | None = ("fake",),
        prompt_tokens: int | None = None,
        serves_unlisted: bool = False,
        ignores_n: bool = False,
        ignores_stop: bool = False,
        strict: tuple[str, ...] = (),
        latency_s: float = 0.0,
        edit: Callable[[dict[str, Any], dict[str, Any]], None] = lambda request, answer: None,
    ) -> None:
        """Plan the server.

        Args:
            reply: request to text. Called once per choice, with that choice's `seed`.
            faults: one per request from the first on; good answers follow.
            models: listed under `/v1/models`, by name or as a whole entry, others are refused; None is a server without
                that route, which takes any.
            prompt_tokens: what vLLM's `/tokenize` counts in every prompt; None is a server without that route.
            serves_unlisted: takes any model all the same.
            ignores_n: answers with one choice whatever was asked for.
            ignores_stop: writes on after the stop strings.
            strict: parameters refused with status 400.
            latency_s: of every good answer.
            edit: changes a good answer, given the request, before it is sent.
        """
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived_at: list[float] = []
        self.peers: set[Any] = set()
        self.most_in_flight = 0
        self._in_flight = 0
        self._reply, self._faults, self._models = reply, iter(tuple(faults)), models
        self._any_model = models is None or serves_unlisted
        self._entries = [entry if isinstance(entry, dict) else {"id": entry} for entry in models or ()]
        self._prompt_tokens = prompt_tokens
        self.looks = 0  # at the list of models
        self._ignores_n, self._ignores_stop, self._strict = ignores_n, ignores_stop, strict
        self._latency_s, self._edit = latency_s, edit
        super().__init__()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._completions)
        router.add_post("/v1/completions", self._completions)
        if self._models is not None:
            router.add_get("/v1/models", self._list)
        if self._prompt_tokens is not None:
            router.add_post("/tokenize", self._tokenize)

    async def _list(self, request: web.Request) -> web.Response:
        self.looks += 1
        return web.json_response({"object": "list", "data": self._entries})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self._prompt_tokens, "max_model_len": 4096})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.arrived_at.append(time.monotonic())
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._answer(request, body)
        finally:
            self._in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = next(self._faults, None)
        if isinstance(fault, Answer):
            text = fault.body.replace("{authorization}", request.headers.get("Authorization", ""))
            return web.Response(
                status=fault.status, text=text, headers=dict(fault.headers), content_type=fault.content_type
            )
        if isinstance(fault, Disconnect):
            return await self._hang_up(request, fault.sent)
        await asyncio.sleep(fault.seconds if isinstance(fault, Slow) else self._latency_s)
        for name in self._strict:
            if name in body:
                error = {"message": f"Unsupported parameter: '{name}' is not supported.", "param": name}
                return web.json_response({"error": error}, status=400)
        if not self._any_model and body.get("model") not in {entry["id"] for entry in self._entries}:
            return web.json_response(
                {"error": {"message": f"The model `{body.get('model')}` does not exist."}}, status=404
            )
        answer = self._good(body)
        self._edit(body, answer)
        return web.json_response(answer)

    async def _hang_up(self, request: web.Request, sent: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        if sent:
            await response.prepare(request)
            await response.write(b"{" * sent)
        assert request.transport is not None
        request.transport.close()
        return response

    def _good(self, body: dict[str, Any]) -> dict[str, Any]:
        n = 1 if self._ignores_n else body.get("n", 1)
        choices, written = [], 0
        for index in range(n):
            seed = body.get("seed")
            text = self._reply({**body, "seed": None if seed is None else seed + index})
            written += len(text.split())
            reason = "length"
            if not self._ignores_stop:
                ends = [text.find(mark) for mark in body.get("stop") or [] if mark in text]
                text, reason = (text[: min(ends)], "stop") if ends else (text, "stop")
            chat = "messages" in body
            content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": index, "finish_reason": reason, **content})
        asked = json.dumps(body.get("messages") or body.get("prompt"))
        usage = {"prompt_tokens": len(asked.split()), "completion_tokens": written}
        return {"object": "chat.completion", "model": body.get("model"), "choices": choices, "usage": usage}
