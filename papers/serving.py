"""A server of one model at a time, for the commands of a plan that ask one."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

PORT = 8193
ADDRESS = f"http://127.0.0.1:{PORT}/v1"


class Server:
    """Serves the model that a command asks, by a command of the shell, until another model or none is asked."""

    def __init__(self, command: str | None) -> None:
        """Bind a command in which {model} is the folder and {port} the port to listen at; None serves nothing."""
        self._command = command
        self._model: Path | None = None
        self._shell: subprocess.Popen[bytes] | None = None

    def serve(self, model: Path | None) -> None:
        """Start a server of a model's folder unless it runs; another is stopped. The command waits for its answer."""
        if model == self._model and self._shell is not None and self._shell.poll() is None:
            return
        self.close()
        if model is not None and self._command is not None:
            line = self._command.format(model=shlex.quote(str(model)), port=PORT)
            # The shell reads until this process ends, however it ends, and then ends the server.
            script = f"{line} & read -r end; kill $!; wait"
            self._shell = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
            self._model = model

    def close(self) -> None:
        """Stop the server and wait for its end."""
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.close()
            self._shell.wait()
        self._shell = self._model = None
