"""The `reasonrag` command; also `python -m reasonrag`, which is what `accelerate launch -m reasonrag` starts."""

import os
import signal


def main() -> None:
    """Run a command. Ctrl-C before there is anything to keep ends the process without a traceback."""
    # Set before the slower imports. Until a run drains on Ctrl-C by itself nothing is paid for; a library's bare
    # `except` while it is being imported would swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from reasonrag.cli import main as run

    run()


if __name__ == "__main__":
    main()
