"""Every exception that reasonrag raises on purpose.

    ReasonRAGError
    ├── InputError            the user's input cannot work: one line, exit code 2
    │   ├── ConfigError       a setting, a flag, a YAML file
    │   ├── DataError         questions, a corpus, a Parquet file
    │   └── RunError          a run folder: another configuration, locked, damaged
    ├── Interrupted           the run is shutting down after Ctrl-C: nothing failed
    ├── Stalled               nothing at all got on for `run.stall_s`: exit code 75
    └── BackendError          an external service failed after retries: the question is set aside and counted
        ├── LLMError          a policy or judge that does not answer
        ├── RetrievalError    a retrieval server that does not answer
        ├── HubError          the HF Hub refuses an upload, or does not answer
        └── JudgeError        a judge without a verdict: unreadable replies, timeout, or unreachable

A failure is never a score: code that catches a `BackendError`
counts it under `cause` and leaves the value missing.
"""

from __future__ import annotations

import errno
import resource

from reasonrag.core.text import excerpt, redact

# Of the loader of shared libraries, threads, torch and Arrow, which raise errors of many classes.
_NO_MEMORY = ("failed to map segment", "can't start new thread", "llocate memory", "malloc of size", "bad_alloc")
# Of torch's allocator, CUDA and cuBLAS.
_NO_GPU_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
EX_TEMPFAIL = 75
"""Exit code of a command whose run stood still: in sysexits.h, a failure that may succeed later."""


class ReasonRAGError(Exception):
    """Base of all errors below. Messages hold no secrets, whoever prints or stores them.

    Args:
        message: the value found, why it cannot work and how to mend it.
        quoting: foreign words (a server's reply, a library's exception), added as `excerpt` cuts them.
        add: flags with which the same command may work.
    """

    def __init__(self, message: str = "", *, quoting: object = "", add: str = "") -> None:
        words = excerpt(str(quoting))
        super().__init__(redact(f"{message}: {words}" if words else message))
        self.add = add


class InputError(ReasonRAGError):
    """The user's input cannot work. The message names the value found, why it cannot work and how to mend it."""


class ConfigError(InputError):
    """A setting, a flag or a YAML file cannot work."""


class DataError(InputError):
    """Questions, a corpus or a data set file cannot be used."""


class RunError(InputError):
    """A run folder cannot be used: another configuration, locked by a living process, or damaged."""


class Interrupted(ReasonRAGError):
    """The run is shutting down (Ctrl-C or SIGTERM): calls in flight finish, new calls are refused.

    `number` is the signal, if it is known.
    """

    def __init__(self, message: str = "", *, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class Stalled(ReasonRAGError):
    """A run made no progress for `run.stall_s`; the same command resumes it."""

    ends_process = False  # whether this ends the process if it does not end itself, as in a command


class BackendError(ReasonRAGError):
    """An external service failed after retries. `cause` is the short name under which the failure is counted."""

    def __init__(self, message: str, *, quoting: object = "", cause: str = "backend") -> None:
        super().__init__(message, quoting=quoting)
        self.cause = cause


class LLMError(BackendError):
    """A policy or judge does not answer, or refuses the request."""


class RetrievalError(BackendError):
    """A retrieval server does not answer, or its reply cannot be used."""


class HubError(BackendError):
    """The HF Hub refuses an upload, does not answer, or holds something else than the files sent."""


class JudgeError(BackendError):
    """A judge gave no verdict after every retry.

    `cause` is "unreadable", "timeout", "unreachable" or "refused".
    """


def readable_error(error: Exception) -> Exception:
    """Return an error of a user's code, or a RuntimeError in its place if its `__str__` raises."""
    try:
        str(error)
    except Exception:
        message = f"a {type(error).__name__} whose message cannot be made"
        return RuntimeError(message).with_traceback(error.__traceback__)
    return error


def is_out_of_memory(error: object) -> bool:
    """Return whether an error, or its message, means that a GPU has no memory left.

    >>> is_out_of_memory("CUDA out of memory. Tried to allocate 2 GiB"), is_out_of_memory("index out of range")
    (True, False)
    """
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in _NO_GPU_MEMORY)


def check_limits(error: Exception) -> None:
    """Raise RunError, which ends a run, if memory (also of a GPU), threads or open files have run out."""
    if is_out_of_memory(error) and not isinstance(error, BackendError):  # a shorter prompt may have room
        raise RunError(
            "the GPU has no memory left; what is finished is kept, and the same command goes on: end what else uses "
            "the GPU (nvidia-smi lists it), or choose another (CUDA_VISIBLE_DEVICES). Else take adapters, smaller "
            "batches or a smaller model, in a new folder",
            quoting=str(error).partition("\n")[0],
        ) from error
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        raise RunError("this process may take no more memory or threads: raise `ulimit -v` and `ulimit -u`") from error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise RunError(
            f"too many open files: this process may have {files}, and each request in flight is one; raise `ulimit -Hn`"
            f", or send fewer at a time (--concurrency {max(files // 5, 1)}, --set judge.concurrency=...)"
        ) from error
