"""Every exception that reasonrag raises on purpose.

    ReasonRAGError
    ├── InputError            what the user gave cannot work: one line, exit code 2
    │   ├── ConfigError       a setting, a flag, a YAML file
    │   ├── DataError         questions, a corpus, a Parquet file
    │   └── RunError          a run folder: another config, locked, damaged
    ├── Interrupted           the run is draining after Ctrl-C: not a failure of anything
    └── BackendError          something outside failed, after retries: the question is set aside and counted
        ├── LLMError          a policy or judge that does not answer
        ├── RetrievalError    a retrieval server that does not answer
        ├── HubError          the HF Hub refuses an upload, or does not answer
        └── JudgeError        a judge without a verdict: its replies cannot be read, it is late, or not there

A failure is never a score: code that catches a `BackendError` counts it under `cause` and leaves the value missing.
"""

from __future__ import annotations


class ReasonRAGError(Exception):
    """Base of all errors below."""


class InputError(ReasonRAGError):
    """What the user gave cannot work. The message says what was found, why it cannot work and what to do."""


class ConfigError(InputError):
    """A setting, a flag or a YAML file."""


class DataError(InputError):
    """Questions, a corpus or a data set file."""


class RunError(InputError):
    """A run folder that cannot be used: another config, locked by a living process, damaged."""


class Interrupted(ReasonRAGError):
    """Work is ending after Ctrl-C or SIGTERM: what is in flight is waited for, nothing may begin.

    `number` is the signal, where it is known.
    """

    def __init__(self, message: str = "", *, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class BackendError(ReasonRAGError):
    """Something outside failed after retries. `cause` is the short name under which it is counted."""

    def __init__(self, message: str, *, cause: str = "backend") -> None:
        super().__init__(message)
        self.cause = cause


class LLMError(BackendError):
    """A policy or judge endpoint that does not answer, or refuses the request."""


class RetrievalError(BackendError):
    """A retrieval server that does not answer, or answers nonsense."""


class HubError(BackendError):
    """The HF Hub refuses what `publish` asks of it, does not answer, or holds something else than what was sent."""


class JudgeError(BackendError):
    """A judge that gave no verdict, after every retry.

    `cause` is "unreadable", "timeout" or "unreachable".
    """

    def __init__(self, message: str, *, cause: str = "unreadable") -> None:
        super().__init__(message, cause=cause)
