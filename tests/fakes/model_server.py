"""The stub engine: an OpenAI-compatible server on loopback that misbehaves as a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from tests.fakes.stubs import Fault, Script, Stub

Reply = Callable[[dict[str, Any]], str]


class FakeOpenAI(Stub):
    """`/v1/chat/completions`, `/v1/completions`, `/v1/models` and a `/health` that is always good.

    with FakeOpenAI(lambda request: "<answer>Jaws</answer>") as server:
        ServerLLM(server.base_url, "fake")
    """

    routes = ("/v1/chat/completions", "/v1/completions")

    def __init__(
        self,
        reply: Reply = lambda request: "ok",
        faults: Script | Iterable[Fault | None] = (),
        *,
        models: tuple[str | dict[str, Any], ...] | None = ("fake",),
        serves_unlisted: bool = False,
        ignores_stop: bool = False,
        strict: tuple[str, ...] = (),
        latency_s: float = 0.0,
        edit: Callable[[dict[str, Any], dict[str, Any]], None] = lambda request, answer: None,
    ) -> None:
        """Plan the server.

        Args:
            reply: request to text.
            faults: one per request from the first on, and good answers follow; or a script of them.
            models: listed under `/v1/models`, by name or as a whole entry, others are refused; None is a server without
                that route, which takes any.
            serves_unlisted: takes any model all the same.
            ignores_stop: writes on after the stop strings.
            strict: parameters refused with status 400.
            latency_s: before every answer and every fault.
            edit: changes a good answer, given the request, before it is sent.
        """
        self._reply, self._models = reply, models
        self._any_model = models is None or serves_unlisted
        self._entries = [entry if isinstance(entry, dict) else {"id": entry} for entry in models or ()]
        self.looks = 0  # at the list of models
        self._ignores_stop, self._strict = ignores_stop, strict
        self._edit = edit
        super().__init__(faults, latency_s=latency_s)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        if self._models is not None:
            router.add_get("/v1/models", self._list)
        super().add_routes(router)

    async def _list(self, request: web.Request) -> web.Response:
        self.looks += 1
        return web.json_response({"object": "list", "data": self._entries})

    async def good(self, request: web.Request, body: Any) -> web.StreamResponse:
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

    def _good(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self._reply(body)
        asked = json.dumps(body.get("messages") or body.get("prompt"))
        usage = {"prompt_tokens": len(asked.split()), "completion_tokens": len(text.split())}
        reason = "length"
        if not self._ignores_stop:
            ends = [text.find(mark) for mark in body.get("stop") or [] if mark in text]
            text, reason = (text[: min(ends)], "stop") if ends else (text, "stop")
        content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        choice = {"index": 0, "finish_reason": reason, **content}
        return {"object": "chat.completion", "model": body.get("model"), "choices": [choice], "usage": usage}
