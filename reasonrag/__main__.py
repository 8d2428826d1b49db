"""The `reasonrag` script, and `python -m reasonrag`, which is what `accelerate launch -m reasonrag` starts."""

from reasonrag.core.event_loop import end_on_signals


def main() -> None:
    """Run a command, as `cli.main`; Ctrl-C while that is imported prints no traceback."""
    end_on_signals()
    from reasonrag.cli import main

    main()


if __name__ == "__main__":
    main()
