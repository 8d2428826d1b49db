from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from papers import PAPERS
from papers.comparison import Scale, stages
from papers.plan import Plan, Stage
from reasonrag.core.errors import RunError


def test_a_command_that_fails_gives_the_exit_code_and_is_tried_again(tmp_path):
    broken = Stage(("pairs", str(tmp_path / "nothing")), tmp_path / "never")
    plan = [broken, quick(tmp_path / "w", broken.out), quick(tmp_path / "v")]
    said = []
    first = Plan(tmp_path / "out", plan)
    assert first.run(said.append) == 2
    assert [first.is_done(stage) for stage in plan] == [False, False, True], "what needs it is left out, and no other"
    cost = Plan(tmp_path / "out", plan).cpu_s[broken.line]
    assert Plan(tmp_path / "out", plan).run(said.append) == 2
    assert Plan(tmp_path / "out", plan).cpu_s[broken.line] > cost > 0, "what failed has cost something, each time"
    once = [
        f"[1/3] $ {broken.line}",
        f"[1/3] ended with exit code 2: {broken.line}",
        f"[2/3] left out, because {broken.out} is missing: {plan[1].line}",
    ]
    assert said == [*once, f"[3/3] $ {plan[2].line}", *once, f"[3/3] done before: {plan[2].line}"]


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(RunError, match="other files"):
        Plan(tmp_path, stages(PAPERS["reasonrag"], tmp_path, Scale()))


def quick(out: Path, *needs: Path) -> Stage:
    """A command that is soon done, and writes nothing."""
    return Stage(("--version", out.name), out, needs)


def test_a_plan_that_grows_keeps_what_is_done(tmp_path):
    small, large = [quick(tmp_path / "a")], [quick(tmp_path / "a"), quick(tmp_path / "b")]
    Plan(tmp_path / "out", small).done(small[0])
    grown = Plan(tmp_path / "out", large)
    assert grown.is_done(large[0]) and not grown.is_done(large[1])
    with pytest.raises(RunError, match="another plan"):
        Plan(tmp_path / "out", small)


@pytest.mark.fault("3", "SIGTERM to a comparison of the papers", "its command ends with 143, and so does it")
def test_a_signal_is_handed_on_and_nothing_more_is_started(tmp_path, figure):
    plan = "from pathlib import Path; import sys; from papers.plan import Plan, Stage; "
    plan += "out = Path(sys.argv[1]); "
    plan += "stages = [Stage(('build-tree', '--preset', 'demo', '--out', str(out / n)), out / n) for n in 'abc']; "
    plan += "sys.exit(Plan(out / 'plan', stages).run(lambda line: print(line, flush=True)))"
    child = subprocess.Popen([sys.executable, "-c", plan, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    begun = child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    rest, _ = child.communicate(timeout=60)
    figure(f"{rest.count('ended with exit code 143')} command ended with 143, and the comparison {child.returncode}")
    assert child.returncode == 143 and rest.count("ended with exit code 143") == 1
    assert begun[:6] == "[1/3] " and "[2/3]" not in rest
