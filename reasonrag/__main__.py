"""The `reasonrag` script, and `python -m reasonrag`, which is what `accelerate launch -m reasonrag` starts."""

import os
import sys

from reasonrag.core.event_loop import end_on_signals


def main() -> None:
    """Run a command, as `cli.main`; Ctrl-C while that is imported prints no traceback."""
    if os.name == "nt":
        sys.exit("error: reasonrag runs on Linux and macOS; on Windows, in WSL2")
    end_on_signals()
    from reasonrag.cli import main

    main()


if __name__ == "__main__":
    main()
