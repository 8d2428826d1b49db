"""A client for OpenAI-compatible servers: vLLM, SGLang, llama.cpp, hosted APIs."""

from __future__ import annotations

import asyncio
import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import aiohttp
import structlog

from reasonrag.core.calls import (
    AWAY,
    Addresses,
    Request,
    Unavailable,
    about_key,
    bearer_header,
    check_url,
    exchange,
    is_transient,
    parse_retry_after,
)
from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError, RunError
from reasonrag.core.event_loop import Worker
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import Completion, Message, Prompt, Span
from reasonrag.llm.base import Sampling, caller, overflows_context
from reasonrag.llm.model_folder import public_name, served_identity
from reasonrag.llm.openai_wire import (
    BadReply,
    Encode,
    Encoded,
    ServedModel,
    Wire,
    listed_models,
    readable,
    rejected_parameter,
)

log = structlog.get_logger()

# uvicorn (vLLM's server) closes an idle connection after 5 s; the client has to close it first.
_KEEP_ALIVE_S = 4.0
_CHECK_TIMEOUT_S, _HELLO_TIMEOUT_S = 15.0, 60.0
_MOST_OF_LISTS = 16 << 20  # bytes of a list of models
_LARGE = 1 << 20  # bytes of a reply that is parsed outside the event loop, which is busy for 10 ms else
_MOST_ENCODED = 1024  # prompts that are kept; a third are asked for again, by siblings and rollouts of one state
_NO_ROUTE = frozenset({404, 405, 501})
NAME_IT = "add --policy-model (or --judge-model); in eval, --policy NAME=URL#MODEL"


def _packed(encode: Encode, prompt: Prompt) -> str | Sequence[int]:
    """Return an encoded prompt; ids as an array, which takes a ninth of the memory of a tuple of numbers."""
    encoded = encode(prompt)
    return encoded if isinstance(encoded, str) else array("I", encoded)


class ServerLLM:
    """A model on an OpenAI-compatible server, or on several, with retries and bounded concurrency.

    A server that cannot be reached, or answers 502, 503 or 504, is waited for:
    one request at a time finds out whether it is back. With several servers the
    requests of a question go to one of them, and to another one if it is away.

    Use an instance in one event loop; after `aclose` it may be used in another.

    Attributes:
        slots: the requests in flight at the servers.
        dropped: parameters that requests omit, as the server refused
            them. Without `seed`, samples cannot be reproduced.
        served: identity of the weights that it has to serve, "" if it is unknown.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        *,
        api_key: str | None = None,
        key_env: str = "api_key",
        timeout_s: float = 300.0,
        max_retries: int = 8,
        patience_s: float = 600.0,
        concurrency: int | None = None,
        seeded: bool = True,
        backoff_s: float = 0.125,
        **wire: Any,
    ) -> None:
        """Describe the server; nothing is sent before the first call.

        Args:
            base_url: address up to and including the version, such as
                `http://127.0.0.1:8000/v1`; or several of the same model.
            model: the model's name at the server; "" if it is for `check` to find out.
            api_key: sent as a bearer token to `base_url` only; redirects are not followed.
            key_env: the environment variable that has the key, for messages.
            timeout_s: seconds for one request with all its retries,
                from the moment it has a slot at a server that is there.
            max_retries: further attempts after a failure of a server that is there (500, a reply that
                cannot be read, a connection that breaks). 429 does not count, nor does 503 of a server
                that works on other requests.
            patience_s: seconds to wait while no server is there.
                An outage uses them up once (`Addresses`).
            concurrency: requests in flight at a server; None finds out (`Slots`). A request that waits
                for a retry keeps its slot if there were too many (429, 503).
            seeded: whether to send seeds.
            backoff_s: wait before the first retry; it doubles with every further retry, with jitter.
            wire: other fields of `Wire`, such as `vllm` and `encode`.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        urls = [base_url] if isinstance(base_url, str) else base_url
        for url in urls:
            check_url(url, example="http://127.0.0.1:8000/v1")
        self.name, self._is_named = public_name(model) if model else "", bool(model)
        self.dropped: set[str] = set() if seeded else {"seed"}
        if encode := wire.get("encode"):
            wire["encode"] = lru_cache(_MOST_ENCODED)(partial(_packed, encode))
        self._wire = Wire(model, **wire)
        self._key, self._key_env = api_key or None, key_env
        self._headers = bearer_header(api_key, f"the API key in {key_env}")
        self._addresses = Addresses(
            [url.rstrip("/") for url in urls],
            concurrency,
            name=self.name,
            error=LLMError,
            deadline_s=timeout_s,
            max_retries=max_retries,
            patience_s=patience_s,
            first_wait_s=backoff_s,
        )
        self.slots = self._addresses.slots
        self.served = ""
        self._returns = 0  # of servers that were away
        self._looked: asyncio.Future[Any] | None = None  # at what they serve since then
        self.decode: Callable[[Sequence[int]], str] | None = None  # of the tokenizer that encodes prompts here
        # A long prompt takes a millisecond to encode, mostly without the interpreter's lock, and a reply of
        # 30 MB takes .3 s to parse; a tokenizer that is asked from two threads at a time may fail.
        self._worker = Worker(f"the tokenizer of {self.name}")
        self._open: aiohttp.ClientSession | None = None

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion.

        Raises:
            LLMError: with cause `refused`, `context_overflow`,
                `http_429`, `unreachable`, `timeout` or `bad_reply`.
            RunError: a server that was away came back with other weights, or another model.
        """
        send = partial(self._send, prompt, await self._encoded(prompt), sampling)
        completion = await self._addresses.ask(send, priority=caller.get().priority, question=caller.get().question)
        if self._returns != (returns := sum(server.returns for server in self._addresses.all)):
            self._returns, self._looked = returns, asyncio.ensure_future(self.check())
        try:
            if self._looked is not None:  # no reply counts until it is known whose it is
                await asyncio.shield(self._looked)
        except ConfigError as error:
            raise RunError(str(error)) from error
        except LLMError:  # away again, and looked at when it is back
            pass
        return completion

    async def check(self) -> ServedModel | None:
        """Return how the first server lists the model; None if it does not list it. All servers have to answer.

        Some servers do not list the models that they serve (`transformers serve`
        with a local folder). If the model is not listed, one token is requested
        from it. A model without a name gets that of the only one that is listed.

        Raises:
            ConfigError: the server lists other models and does
                not serve this one, or `base_url` is wrong.
            RunError: it serves other weights than before.
            LLMError: the server cannot be reached, or refuses the key.
        """
        served_models = [await self._check(server.url) for server in self._addresses.all]
        known = [model for model in served_models if model is not None]
        identities = {served_identity(root) for root in {model.root for model in known if model.root}}
        if len(identities) > 1:
            roots = ", ".join(readable(model.root.encode(), self._key, limit=80) for model in known)
            raise ConfigError(f"the servers of {self.name} serve different models under that name: {roots}")
        now = "".join(identities)
        if self.served and now and now != self.served:
            raise RunError(
                f"the run was begun with {self.served} behind the name {self.name}, which is now {now}; serve that "
                "again, or choose a new folder for --out"
            )
        self.served = now or self.served
        contexts = [model.context for model in known if model.context is not None]
        first = served_models[0]
        return first and replace(first, context=min(contexts, default=None))

    async def check_open_turn(self) -> None:
        """Raise ConfigError if the server cannot continue an assistant's turn; one token shows it."""
        try:
            prompt = Prompt((Message("user", "Hello"),), (Span("I"),))
            await self.complete(prompt, Sampling(temperature=0, max_tokens=1, seed=0))
        except LLMError as error:
            if error.cause == "refused":
                remedy = "it takes no prompts as text either: take another server"
                if self._wire.encode is None:
                    remedy = (
                        "send prompts as text: --set policy.api=completions and --set policy.tokenizer=FOLDER_OR_ID "
                        "(with its chat template) unless the model is served under its Hub id"
                    )
                problem = f"the server of {self.name} cannot continue a turn, which this format needs; {remedy}"
                raise ConfigError(problem, quoting=error) from error

    async def _check(self, url: str) -> ServedModel | None:
        try:
            return await self._served(url)
        except ConfigError:
            if not self._is_named:
                raise
            # It may serve the model all the same, which one token shows.
            prompt, request = Prompt((Message("user", "Hello"),)), Request(self._addresses.all[0])
            encoded, sampling = await self._encoded(prompt), Sampling(temperature=0, max_tokens=1)
            with suppress(LLMError, Unavailable):
                await self._send(prompt, encoded, sampling, request, url, _HELLO_TIMEOUT_S)
                log.warning("a server answers for a model that it does not list", model=self._wire.model, url=url)
                return None
            raise

    async def _list(self, url: str) -> tuple[int, bytes]:
        """Ask for the list of models; return status and body."""
        limits = _CHECK_TIMEOUT_S, _MOST_OF_LISTS, "unreachable"
        try:
            reply, payload = await exchange(self._session(), "GET", f"{url}/models", *limits)
        except Unavailable as error:
            problem = f"no server answers at {url} ({error}); is it running, and is this its address?"
            raise LLMError(problem, cause="unreachable") from error
        return reply.status, payload

    async def _served(self, url: str) -> ServedModel | None:
        """Return the entry of the model in the server's list; None if it has no list."""
        status, payload = await self._list(url)
        if status in _NO_ROUTE:
            # Most often, the version is missing, or the path of an endpoint was copied too.
            usual = re.sub(r"(/v1)?(/chat)?(/completions)?$", "", url) + "/v1"
            if usual != url and (await self._list(usual))[0] == 200:
                raise ConfigError(f"{url} is not the address of its API, which is at {usual}; give that one")
            if self._wire.model:
                return None
            raise ConfigError(f"{url} does not list what it serves: {NAME_IT}")
        if status != 200:
            message = f"{url}/models: HTTP {status}: {self._shown(payload, status)}"
            if status in (*AWAY, 401, 403):
                raise LLMError(message, cause="unreachable" if status in AWAY else "refused")
            raise ConfigError(message)
        try:
            models = listed_models(payload)
        except BadReply:
            problem = f"{url}/models is not a list of models; an address ends in the version, usually /v1"
            raise ConfigError(problem) from None
        # The name is taken from then on: as_served writes it into the configuration.
        if not self._wire.model and len(models) == 1:
            self._wire = replace(self._wire, model=next(iter(models)))
        if self._wire.model in models:
            return models[self._wire.model]
        names = ", ".join(readable(name.encode(), self._key, limit=80) for name in list(models)[:10]) or "none"
        if not self._wire.model:
            raise ConfigError(f"{url} serves {len(models)} models ({names}): {NAME_IT}")
        raise ConfigError(f"{url} does not serve {self._wire.model!r}; it lists: {names}")

    async def aclose(self) -> None:
        if self._open is not None:
            session, self._open = self._open, None
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            self._open = aiohttp.ClientSession(
                # No second queue after the slots: the time of a request starts when it gets its slot.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers | {"Content-Type": "application/json"},
                cookie_jar=aiohttp.DummyCookieJar(),  # else each request looks for cookies
            )
        return self._open

    async def _encoded(self, prompt: Prompt) -> Encoded:
        """Return the prompt as the completions endpoint takes it; None for the chat endpoint."""
        if self._wire.encode is None:
            return None
        return await self._worker.call(self._wire.encode, prompt)

    async def _send(
        self, prompt: Prompt, encoded: Encoded, sampling: Sampling, request: Request, url: str, left_s: float
    ) -> Completion:
        """Send a request once, and again at once for each parameter that the server turns out not to know."""
        parameters = self._wire.body(prompt, encoded, sampling, self.dropped)
        request_body = json.dumps(parameters).encode()
        endpoint = url + ("/chat/completions" if self._wire.encode is None else "/completions")
        limits = left_s, self._wire.most_bytes(len(request_body), sampling), "unreachable"
        reply, payload = await exchange(self._session(), "POST", endpoint, *limits, data=request_body)
        status = reply.status
        if status == 200:
            parse = partial(self._wire.completion, payload, prompt, sampling, parameters.get("prompt"))
            try:
                completion = await self._worker.call(parse) if len(payload) > _LARGE else parse()
            except BadReply as error:
                raise Unavailable(self._shown(str(error).encode()), cause="bad_reply") from error
            request.tokens = completion.completion_tokens or 1
            return completion
        message = f"HTTP {status}: {self._shown(payload, status)}"
        # 409: hosted servers that are loading the model; the
        # quota is OpenAI's `type` of each limit of money.
        if status == 409 or (is_transient(status) and b'"insufficient_quota"' not in payload):
            retry_after_s = parse_retry_after(reply.headers.get("Retry-After"))
            cause = "unreachable" if status in AWAY else f"http_{status}"
            raise Unavailable(message, cause=cause, status=status, retry_after_s=retry_after_s)
        # Before refused parameters: such a message may name max_tokens.
        if status in (400, 413, 422) and overflows_context(payload.decode("utf-8", "replace")):
            raise LLMError(f"{self.name}: {message}", cause="context_overflow")
        if status in (400, 422) and (parameter := rejected_parameter(payload, parameters)):
            if parameter not in self.dropped:
                self.dropped.add(parameter)
                log.warning(
                    "the server refuses a parameter; later requests omit it", llm=self.name, parameter=parameter
                )
            # This ends: a dropped parameter is not sent again.
            return await self._send(prompt, encoded, sampling, request, url, left_s)
        raise LLMError(f"{self.name}: {message}", cause="refused")

    def _shown(self, payload: bytes, status: int = 200) -> str:
        return readable(payload, self._key) + about_key(status, bool(self._key), self._key_env)


def open_server(address: ModelAddress, config: ModelConfig) -> ServerLLM:
    """Create the client of the servers at `config.spec`.

    Raises:
        ConfigError: the address, the key or the tokenizer cannot be used.
    """
    decode = None
    encoding: dict[str, Any] = {}
    if config.api == "completions" and config.model:
        from reasonrag.llm.chat_template import ChatTemplate  # imports transformers when it loads

        tokenizer = config.tokenizer or config.model
        try:
            chat = ChatTemplate.load(tokenizer, revision=config.revision, template=config.chat_template)
        except ConfigError as error:
            if config.tokenizer:
                raise
            raise ConfigError(
                f"{error}; give the model's tokenizer: --set policy.tokenizer=FOLDER_OR_HUB_ID"
            ) from error
        encoding = {"encode": chat.token_ids if config.vllm else chat.text, "vocabulary": len(chat.tokenizer)}
        decode = chat.decode
    shared = {"timeout_s", "patience_s", "concurrency", "seeded", "vllm", "logprobs", "think"}
    server = ServerLLM(
        (config.spec or "").split(","),
        config.model or "",
        api_key=os.environ.get(config.api_key_env),
        key_env=config.api_key_env,
        **encoding,
        **config.model_dump(include=shared),
    )
    server.decode = decode
    return server
