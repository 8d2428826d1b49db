"""Flags to configuration to one function per command.

Exit codes: 0; 2 for bad input; 1 when more than `--max-failed` of the questions failed; 130 after Ctrl-C, 143 after
SIGTERM, both with everything paid for kept.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TextIO, cast

import click

from reasonrag.cli import demo, evaluate, index, inspect, publish, search, train  # noqa: F401  they hang on the root
from reasonrag.cli.root import cli
from reasonrag.core.errors import ReasonRAGError
from reasonrag.core.secrets import redact
from reasonrag.core.text import printable

__all__ = ["cli", "main"]

_OF_THE_USER = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


class Redacted:
    """A stream that secrets do not get through to, whoever writes: we, a log, a library's warning, a traceback."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream` from now on."""
        self._stream = stream

    def write(self, text: str) -> int:
        """The text, redacted. What is written in one call is read as one."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Each of them redacted."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # what click writes to by itself where the encoding is ASCII
            raise AttributeError("no bytes: they would not be redacted")
        return getattr(self._stream, name)


def main() -> None:
    """Run a command: one line for what the user can mend, no traceback."""
    # For good, as an exception that nobody expected is printed after the end of this function.
    sys.stdout, sys.stderr = cast(TextIO, Redacted(sys.stdout)), cast(TextIO, Redacted(sys.stderr))
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except ReasonRAGError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _OF_THE_USER:
            raise
        _fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); mend that and run the command again")


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    sys.exit(2)
