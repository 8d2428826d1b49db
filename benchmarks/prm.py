"""Process reward models in the demo world: order and calibration on held-out questions, and choosing by them.

    python -m benchmarks.prm --out runs/prm

For each seed: trees of training questions, a model on the steps of 3/4 of them, its measures on the others; then test
questions with one answer, with four attempts of which a rule keeps one, and with four candidates for each step. The
same attempts for all rules. Repeated, the command goes on where it was stopped. About 10 CPU minutes.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.process import run_plan
from benchmarks.table import Table, options
from papers.measures import Seeds, described, difference, read_seeds
from papers.plan import Plan, Stage
from reasonrag.evaluation.tables import interval_text
from reasonrag.storage.files import require_json

METRICS = ("em", "f1", "retrievals", "steps")
# What is compared: the folder of an evaluation, and the beginning of its setting.
CHOSEN = {
    "first": ("best", "t1_*_first-of-4"),
    "majority of 4": ("best", "t1_*_majority-of-4"),
    "best of 4 by PRM": ("best", "t1_*_prm-of-4"),
    "4 candidates a step by PRM": ("guided", "t1_*_c4"),
    "greedy": ("greedy", "t0_*"),
}
PAIRS = (
    ("best of 4 by PRM", "first"),
    ("best of 4 by PRM", "majority of 4"),
    ("majority of 4", "first"),
    ("4 candidates a step by PRM", "first"),
    ("4 candidates a step by PRM", "best of 4 by PRM"),
    ("best of 4 by PRM", "greedy"),
)


def stages(folder: Path, seed: int, given: Any) -> list[Stage]:
    trees, prm = folder / "trees", folder / "prm"
    numbers = ("--seed", str(seed))
    test = ("--policy", "demo", "--dataset", "demo", "--split", "test", "--limit", str(given.test_questions), *numbers)
    sampled, model = (*test, "--temperature", "1"), ("--prm", str(prm))
    sizes = ("--limit", str(given.questions), "--iterations", str(given.iterations))
    return [
        Stage.writing(trees, "build-tree", "--preset", "demo", *sizes, *numbers),
        Stage.writing(
            prm, "prm", "train", "--preset", "demo", "--data", str(trees), "--test-share", "0.25", *numbers,
            *(part for setting in given.set for part in ("--set", setting)), needs=(trees,),
        ),
        Stage.writing(
            folder / "best", "eval", *sampled, "--best-of", "4", "--choose", "first,majority,prm", *model, needs=(prm,)
        ),
        Stage.writing(folder / "guided", "eval", *sampled, "--step-candidates", "4", *model, needs=(prm,)),
        Stage.writing(folder / "greedy", "eval", *test, "--temperature", "0"),
    ]  # fmt: skip


def show(given: Any, out: Path) -> None:
    table = Table(__doc__)
    folders = {seed: out / f"seed-{seed}" for seed in range(given.seeds)}
    plan = Plan(out, [stage for seed, folder in folders.items() for stage in stages(folder, seed, given)])
    run_plan(plan)
    found = [require_json(folder / "prm" / "training.json", "run again")["measures"] for folder in folders.values()]
    for name, label in (
        ("auc", "AUC, SPRE of at least 0.5 or not"),
        ("sibling_auc", "AUC among siblings"),
        ("brier", "Brier score"),
        ("usual_brier", "Brier score of the mean of training alone"),
        ("ece", "expected calibration error"),
    ):
        table.row(f"{label}, mean of {len(found)} seeds", fmean(each[name]["mean"] for each in found))
        for seed, each in enumerate(found):
            table.row(f"  seed {seed}", interval_text(each[name]))
    for number in range(10):
        bins = [row for each in found for row in each["reliability"] if int(row["predicted"] * 10) == number]
        if steps := sum(row["steps"] for row in bins):
            said = sum(row["steps"] * row["predicted"] for row in bins) / steps
            seen = sum(row["steps"] * row["observed"]["mean"] for row in bins) / steps
            table.row(f"reliability: {steps} steps said to be worth {said:.3f} have SPRE", seen)
    rows: dict[str, Seeds] = {}
    for name, (folder, setting) in CHOSEN.items():
        rows[name] = read_seeds({seed: path / folder for seed, path in folders.items()}, "demo", setting)
    for name, seeds in rows.items():
        means = described(seeds, METRICS)
        by_seed = ", ".join(f"{value:.3f}" for value in means["by_seed"]["em"])
        table.row(f"EM, {name}", interval_text(means["all"]["em"]), f"({by_seed})")
    for first, second in PAIRS:
        apart = difference(rows[first], rows[second], METRICS)
        assert apart is not None
        by_seed = ", ".join(f"{100 * value:+.1f}" for value in apart["by_seed"]["em"])
        text = interval_text(apart["all"]["em"], digits=1, scale=100, signed=True)
        table.row(f"EM in points, {first} - {second}", text, f"({by_seed})")
    sizes = [f"{each['steps']} steps of {each['questions']} questions, {each['siblings']} siblings" for each in found]
    table.note(f"held out: {'; '.join(sizes)}. {given.test_questions} test questions with each seed")
    table.note("intervals: 95 %, over questions, and over seeds where there is one figure for all; by seed in brackets")
    table.show(given.json)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="keep what the commands write, and resume there")
    for name, default in (("seeds", 3), ("questions", 400), ("iterations", 16), ("test-questions", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--set", action="append", default=[], help="a setting of prm train")
    given = parser.parse_args()
    with TemporaryDirectory() as nowhere:
        show(given, given.out or Path(nowhere) / "prm")


if __name__ == "__main__":
    main()
