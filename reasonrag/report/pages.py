"""`reasonrag report`: the folder of a run, a training or an evaluation to pages that open from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reasonrag.core.errors import RunError
from reasonrag.report.evaluation_pages import write_evaluation_pages
from reasonrag.report.run_pages import write_run_pages
from reasonrag.report.training_pages import write_training_pages

# By the file that each kind of folder has once it is finished.
KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "run.json": write_run_pages,
    "training.json": write_training_pages,
    "metrics.json": write_evaluation_pages,
}


def write_report(path: Path, out: Path | None = None) -> Path:
    """Write the pages of what a folder holds; returns the path of the first one.

    Args:
        path: folder of a run, a training or an evaluation that is finished.
        out: where the pages go, PATH/report by default. Pages of an earlier report there are replaced.

    Raises:
        RunError: `path` holds none of them, `out` holds something else, or the pages cannot be written.
        DataError: its tables are damaged.
    """
    write = next((write for name, write in KINDS.items() if (path / name).is_file()), None)
    if write is None:
        raise RunError(
            f"{path} has no {' or '.join(KINDS)}: it is not the folder of a run, a training or an evaluation, or that "
            "has not finished; the command that began it goes on with it"
        )
    out = out or path / "report"
    try:
        return write(path, out)
    except OSError as error:
        raise RunError(
            f"the report cannot be written into {out} ({error.strerror or error}); make room or choose another folder "
            "for --out"
        ) from error
