"""A finished run, training run or evaluation as static pages: no server, no network, every foreign text inert."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from reasonrag.core.errors import RunError
from reasonrag.report.attempt_pages import write_evaluation_pages, write_training_pages
from reasonrag.report.run_pages import write_run_pages

# By the file that each kind of folder has once it is finished.
_WRITERS = {"training.json": write_training_pages, "metrics.json": write_evaluation_pages}


def write_report(path: Path, out: Path | None = None, *, questions: Collection[str] = ()) -> Path:
    """Write the pages of a finished folder; return the path of the first page.

    Args:
        path: folder of a finished run, training run or evaluation.
        out: folder for the pages (default: PATH/report). An earlier report there is replaced.
        questions: ids of questions of a run that get a page in any case. A run of more than 500 questions has pages of
            at most 500, evenly spaced; its metrics are of all.

    Raises:
        RunError: `path` holds nothing finished, `out` holds other files, or the pages cannot be written.
        DataError: tables are damaged, or a question is unknown.
    """
    out = out or path / "report"
    try:
        if (path / "run.json").is_file():
            return write_run_pages(path, out, questions=questions)
        for name, write in _WRITERS.items():
            if (path / name).is_file() and not questions:
                return write(path, out)
    except OSError as error:
        raise RunError(
            f"the report cannot be written into {out} ({error.strerror or error}); make room or choose another folder "
            "for --out"
        ) from error
    raise RunError(
        f"{path} has no {' or '.join(('run.json', *_WRITERS))}: it is not the folder of a run, a training run or an "
        "evaluation, or its command has not finished; --question is for a run alone"
    )
