"""Calls to the HF Hub: which failures are tried again and for how long, and what is said of the others."""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from reasonrag.core.errors import HubError, ReasonRAGError
from reasonrag.core.secrets import redact
from reasonrag.core.text import one_line, printable

T = TypeVar("T")

PATIENCE_S = 900.0
"""Seconds that one upload may lose by failures: in waits, and in the calls that fail."""

TIMEOUT_S = 60.0
"""Seconds that the Hub may be silent in one request."""

_LONGEST_WAIT_S = 60.0
# huggingface_hub makes some requests up to six times by itself where the connection fails. What a call lasted longer
# than that was no silence but work: bytes that went up, and that are not sent again.
_LONGEST_SILENCE_S = 6 * TIMEOUT_S
_LONGEST_QUOTE = 300
_ADVICE = {
    401: "this login is not accepted: run `hf auth login`, or set HF_TOKEN to a token that may write there",
    403: "this login may not do that: use a token that may write there",
    404: "there is no such repository, or this login may not see it",
}


class Unavailable(Exception):
    """A failure that may pass: worth another try, not before `retry_after_s` where the Hub said so."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Calls:
    """Makes calls of huggingface_hub, again and again while they fail in a way that may pass.

    Args:
        repo_id: named in every error.
        say: told of every wait.
        patience_s: seconds that may be lost by failures, all together.
    """

    def __init__(self, repo_id: str, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> None:
        self._repo_id = repo_id
        self._say = say
        self._left_s = patience_s

    def __call__(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, which must be safe to make again: it reads, or looks before it acts.

        Raises:
            HubError: it was refused, or patience ended. One line, without URLs, paths and secrets.
        """
        import stamina
        from huggingface_hub import get_session

        doubling = itertools.count()

        def wait_s(error: Exception) -> float | bool:
            passing = _passing(error)
            if passing is None:
                return False
            backoff_s: float = min(_LONGEST_WAIT_S, 2.0 ** next(doubling))
            seconds = max(passing.retry_after_s, backoff_s) + random.uniform(0, 1)
            self._left_s -= seconds + min(time.monotonic() - began, _LONGEST_SILENCE_S)
            if self._left_s < 0:
                return False
            self._say(f"{what}: {passing}; trying again in {seconds:.1f} s")
            return seconds

        try:
            for attempt in stamina.retry_context(on=wait_s, attempts=None, timeout=None):
                began = time.monotonic()
                with attempt:
                    _watch(get_session())
                    return call()
        except ReasonRAGError:
            raise
        except (Unavailable, OSError, RuntimeError, ValueError, _http_error()) as error:
            raise HubError(f"{self._repo_id}: {what} failed: {_why(error)}") from None
        raise AssertionError("unreachable")


@contextmanager
def quiet_client() -> Iterator[None]:
    """huggingface_hub without telemetry, without progress bars off a terminal, without log lines that show URLs."""
    from huggingface_hub import close_session, constants
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from stamina import instrumentation

    with ExitStack() as stack:
        stack.callback(close_session)  # the next user gets a client that is not watched
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(40)  # errors only
        stack.callback(instrumentation.set_on_retry_hooks, instrumentation.get_on_retry_hooks())
        instrumentation.set_on_retry_hooks([])
        stack.callback(setattr, constants, "HF_HUB_DISABLE_TELEMETRY", constants.HF_HUB_DISABLE_TELEMETRY)
        constants.HF_HUB_DISABLE_TELEMETRY = True
        if not sys.stderr.isatty() and not are_progress_bars_disabled():
            stack.callback(enable_progress_bars)
            disable_progress_bars()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def quoted(text: str) -> str:
    """Words of others for a line of ours: without secrets and control characters, and short."""
    text = redact(printable(one_line(text)))
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def _watch(session: Any) -> None:
    """Let `session` give up on a silent server, and raise what may pass instead of waiting for it by itself.

    The client retries some calls and not others, sleeps as long as any `Retry-After` says, and has no timeout.
    """
    hooks = session.event_hooks
    if _raise_if_passing not in hooks["response"]:
        session.event_hooks = {
            "request": [*hooks["request"], _limit],
            "response": [*hooks["response"], _raise_if_passing],
        }


def _limit(request: Any) -> None:
    # Not the client's own `timeout`: huggingface_hub passes timeout=None in many calls.
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)


def _raise_if_passing(response: Any) -> None:
    if _may_pass(response.status_code):
        raise _unavailable(response)


def _may_pass(status: int) -> bool:
    return status in (408, 429) or status >= 500


def _unavailable(response: Any) -> Unavailable:
    return Unavailable(f"the Hub answers {response.status_code}", retry_after_s=_retry_after_s(response.headers))


def _retry_after_s(headers: Any) -> float:
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # public, but not marked so

    limit = parse_ratelimit_headers(headers)
    reset_s = float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else 0.0
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return max(reset_s, float(value))
    try:
        return max(reset_s, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # no date, or one without a zone
        return reset_s


def _passing(error: BaseException | None) -> Unavailable | None:
    """The failure that may pass in `error` or in what it was raised from, or None."""
    response = _response(error)
    if response is not None:
        return _unavailable(response) if _may_pass(response.status_code) else None
    for cause in _chain(error):
        if isinstance(cause, Unavailable):
            return cause
        if isinstance(cause, _http_error()):
            return Unavailable(f"the connection failed ({type(cause).__name__})")
    return None


def _why(error: Exception) -> str:
    passing = _passing(error)
    if passing is not None:
        return f"{passing}, still; run the same command again later: nothing is sent or committed twice"
    response = _response(error)
    if response is not None:
        words = next((c.server_message for c in _chain(error) if getattr(c, "server_message", None)), "")
        advice = _ADVICE.get(response.status_code, "the Hub refuses it")
        return f"{advice} (HTTP {response.status_code}{', ' * bool(words)}{_anonymous(words)})"
    if isinstance(error, OSError):
        return f"a file cannot be read ({error.strerror or type(error).__name__})"
    return _anonymous(str(error)) or type(error).__name__


def _anonymous(text: str) -> str:
    """Words of the Hub or of its client, without the URLs (some are signed) and paths in them."""
    return quoted(re.sub(r"\S*/\S*/\S*", "...", text))


def _response(error: BaseException | None) -> Any:
    """The Hub's answer, if there was one."""
    return next((cause.response for cause in _chain(error) if getattr(cause, "response", None) is not None), None)


def _chain(error: BaseException | None) -> Iterator[Any]:
    while error is not None:
        yield error
        error = error.__cause__


def _http_error() -> type[Exception]:
    """The base of all errors of the HTTP library: httpx or httpx2, by the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]
