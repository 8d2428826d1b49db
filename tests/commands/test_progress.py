"""What a build shows where nobody looks at a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from reasonrag.commands.console import StageLines
from tests.e2e import product


def shown(work) -> list[str]:
    out = io.StringIO()
    with StageLines(Console(file=out)) as progress:
        work(progress)
    return out.getvalue().splitlines()


def test_a_stage_ends_with_one_line_of_how_far_it_came():
    def work(progress):
        progress.start("passages", total=8, unit="rows", done=2)
        for _ in range(3):
            progress.advance(2)
        progress.start("scores", total=None, unit="words")
        progress.advance(5)

    first, second = shown(work)
    assert first.startswith("passages: 8 of 8 (100%) rows, ")
    assert second.startswith("scores: 5 words, ")


def test_a_note_stands_below_the_stage_that_it_is_about():
    def work(progress):
        progress.start("passages", total=1, unit="rows")
        progress.advance()
        progress.note("1 row gave 1 passage")
        progress.advance()

    stage, note = shown(work)
    assert (stage.split(":")[0], note) == ("passages", "1 row gave 1 passage")


def test_control_characters_of_a_corpus_reach_no_terminal():
    (line,) = shown(lambda progress: progress.note("id \x1b[31mred\x1b[0m\u202e"))
    assert "\x1b" not in line and "\u202e" not in line


def test_a_quiet_command_prints_its_results_alone(tmp_path):
    asked = ("build-tree", "--preset", "demo", "--policy", "extractive", "--limit", "2")
    done = product.run("--quiet", *asked, "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "") and "2 of 2" in done.stdout


def test_a_verbose_command_prints_where_an_error_came_from():
    asked, reached = ("pairs", "nowhere\x1b[31m"), {}
    for words in (asked, ("-v", *asked), (*asked, "--verbose")):
        done = product.run(*words)
        reached[words] = done.stderr.splitlines()
        assert done.returncode == 2 and "\x1b" not in done.stderr
    (line,), *traced = reached.values()
    for lines in traced:
        assert lines[0].startswith("Traceback") and "RunError" in lines[-2] and lines[-1] == line
