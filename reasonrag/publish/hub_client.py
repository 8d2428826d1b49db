"""Calls to the HF Hub: a budget of patience for failures that may pass, and one line of advice for all others."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from reasonrag.core.errors import HubError, ReasonRAGError
from reasonrag.core.http import Retries, Unavailable, backoff, is_transient, parse_retry_after
from reasonrag.core.secrets import MOST_QUOTED, excerpt

T = TypeVar("T")

PATIENCE_S = 900.0
"""Seconds that one upload may lose to failures: in waits, and in the calls that fail."""

TIMEOUT_S = 60.0
"""Seconds that the Hub may be silent in one request."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 60.0
# huggingface_hub itself repeats some requests up to six times if the connection fails. A call that took longer than
# that was not silent: it sent bytes, which are not sent again.
_LONGEST_SILENCE_S = 6 * TIMEOUT_S
_ADVICE = {
    401: "this login is not accepted: run `hf auth login`, or set HF_TOKEN to a token that may write there",
    403: "this login may not do that: use a token that may write there",
    404: "there is no such repository, or this login may not see it",
}


class HubCalls:
    """Makes calls of huggingface_hub, with retries while they fail in a way that may pass.

    Args:
        repo_id: named in every error.
        say: prints a line about every wait.
    """

    def __init__(self, repo_id: str, say: Callable[[str], None]) -> None:
        self._repo_id = repo_id
        self._say = say
        self._left_s = PATIENCE_S  # what failures may still take, summed over all calls

    def __call__(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of `call`, which must be safe to repeat: it reads, or looks before it acts.

        Raises:
            HubError: the Hub refused, or patience ended. The message is one line without URLs, paths and secrets.
        """
        from huggingface_hub import get_session

        began = time.monotonic()

        def attempt() -> T:
            nonlocal began
            began = time.monotonic()
            _watch(get_session())
            try:
                return call()
            except Exception as error:
                if transient := _transient(error):
                    raise transient from error
                raise

        def wait_s(failures: int) -> float:
            assert retries.last is not None
            wait_s = max(retries.last.retry_after_s or 0.0, backoff(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S))
            self._left_s -= wait_s + min(time.monotonic() - began, _LONGEST_SILENCE_S)
            if self._left_s < 0:
                return math.inf  # too long to wait, so this failure is the last
            self._say(f"{what}: {retries.last}; trying again in {wait_s:.1f} s")
            return wait_s

        # Patience, not a deadline, ends the retries: an upload that works may take hours.
        retries = Retries(deadline_s=math.inf, max_retries=sys.maxsize, wait_s=wait_s)
        try:
            return retries.run(attempt)
        except ReasonRAGError:
            raise
        except (Unavailable, OSError, RuntimeError, ValueError, _http_error()) as error:
            raise HubError(f"{self._repo_id}: {what} failed: {_explain(error)}") from None


@contextmanager
def quiet_client() -> Iterator[None]:
    """Use huggingface_hub without telemetry, log lines that show URLs, or progress bars if there is no terminal."""
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


def _watch(session: Any) -> None:
    """Give every request of `session` a timeout, and raise `Unavailable` for every answer that may pass.

    The client retries some calls and not others, sleeps as long as any `Retry-After` says, and has no timeout.
    """
    hooks = session.event_hooks
    if _raise_if_transient not in hooks["response"]:
        session.event_hooks = {
            "request": [*hooks["request"], _set_timeout],
            "response": [*hooks["response"], _raise_if_transient],
        }


def _set_timeout(request: Any) -> None:
    # Not the client's own `timeout`: huggingface_hub passes timeout=None in many calls.
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)


def _raise_if_transient(response: Any) -> None:
    if is_transient(response.status_code):
        raise _unavailable(response)


def _unavailable(response: Any) -> Unavailable:
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # public, but not marked so

    limit = parse_ratelimit_headers(response.headers)
    reset_s = float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else 0.0
    retry_after_s = max(reset_s, parse_retry_after(response.headers.get("Retry-After")) or 0.0)
    return Unavailable(f"the Hub answers {response.status_code}", retry_after_s=retry_after_s)


def _transient(error: BaseException) -> Unavailable | None:
    """Return the failure that may pass in `error` or in its causes, or None."""
    response = _response(error)
    if response is not None:
        return _unavailable(response) if is_transient(response.status_code) else None
    for cause in _causes(error):
        if isinstance(cause, Unavailable):
            return cause
        if isinstance(cause, _http_error()):
            return Unavailable(f"the connection failed ({type(cause).__name__})")
    return None


def _explain(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return f"{error}, still; run the same command again later: nothing is sent or committed twice"
    response = _response(error)
    if response is not None:
        words = next((cause.server_message for cause in _causes(error) if getattr(cause, "server_message", None)), "")
        advice = _ADVICE.get(response.status_code, "the Hub refuses it")
        return f"{advice} (HTTP {response.status_code}{', ' * bool(words)}{_without_urls(words)})"
    if isinstance(error, OSError):
        return f"a file cannot be read ({error.strerror or type(error).__name__})"
    return _without_urls(str(error)) or type(error).__name__


def _without_urls(text: str) -> str:
    """Quote words of the Hub or of its client without URLs, some of which are signed, and without paths."""
    words = text[:MOST_QUOTED].split()
    return excerpt(" ".join("..." if word.count("/") > 1 else word for word in words))


def _response(error: BaseException) -> Any:
    """Return the Hub's answer, or None if there was none."""
    return next((cause.response for cause in _causes(error) if getattr(cause, "response", None) is not None), None)


def _causes(error: BaseException | None) -> Iterator[Any]:
    while error is not None:
        yield error
        error = error.__cause__


def _http_error() -> type[Exception]:
    """Return the base of all errors of the HTTP library: httpx or httpx2, by the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]
