"""A function in a process of its own, for tests that kill it: forked, so that nothing has to be imported again."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(function: Callable[..., object], *arguments: object) -> int:
    """Return the exit code of a process that calls the function; of one that was killed, the negative signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # without pytest's own end
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
