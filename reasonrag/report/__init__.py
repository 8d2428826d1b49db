"""A finished run, training run or evaluation as static pages: no server, no network, every foreign text inert."""

from __future__ import annotations

from pathlib import Path

from reasonrag.core.errors import RunError
from reasonrag.core.settings import refuse_links
from reasonrag.report.attempt_pages import write_evaluation_pages, write_training_pages
from reasonrag.report.run_pages import write_run_pages
from reasonrag.storage.folder import what_holds

# By the file that each kind of folder has once it is finished.
_WRITERS = {"run.json": write_run_pages, "training.json": write_training_pages, "metrics.json": write_evaluation_pages}


def write_report(path: Path, out: Path | None = None) -> Path:
    """Write the pages of a finished folder; return the path of the first page.

    A run of more than 500 questions has pages of at most 500, evenly spaced; its metrics are of all.

    Args:
        path: folder of a finished run, training run or evaluation.
        out: folder for the pages (default: PATH/report). An earlier report there is replaced.

    Raises:
        RunError: `path` holds nothing finished, `out` holds other files, or the pages cannot be written.
        DataError: tables are damaged.
    """
    refuse_links(path)
    out = out or path / "report"
    try:
        for name, write in _WRITERS.items():
            if (path / name).is_file():
                return write(path, out)
    except OSError as error:
        raise RunError(
            f"the report cannot be written into {out} ({error.strerror or error}); make room or choose another folder "
            "for --out"
        ) from error
    raise RunError(
        f"{path} has no {' or '.join(_WRITERS)}, so it is no run, training run or evaluation: {what_holds(path)}"
    )
