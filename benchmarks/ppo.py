"""PPO beside GRPO, RLOO and REINFORCE++ in the demo world, at equal rollouts.

    python -m benchmarks.ppo --out runs/ppo

For each seed and algorithm: HiPRAG's reward, 64 rollouts a step from the same policy, then test questions, greedily.
GRPO and RLOO make 8 attempts at 8 questions, PPO and REINFORCE++ one at 64, as HiPRAG's script does. Repeated, the
command goes on where it was stopped. About 3 CPU minutes a seed and algorithm.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.process import run_plan
from benchmarks.table import Table, options
from papers.measures import Seeds, described, difference, read_seeds
from papers.plan import Plan, Stage
from reasonrag.evaluation.tables import interval_text
from reasonrag.storage.files import require_json

METRICS = ("em", "acc", "retrievals", "osr", "usr", "format_rate")
BEFORE = "before"
# The flags that differ from those of the preset.
ALGORITHMS = {
    "grpo": ("--preset", "demo-hiprag"),
    "ppo": ("--preset", "demo-hiprag-ppo"),
    "rloo": ("--preset", "demo-hiprag", "--algorithm", "rloo"),
    "reinforce++": ("--preset", "demo-hiprag-ppo", "--algorithm", "reinforce++"),
}


def stages(folder: Path, seed: int, given: Any) -> list[Stage]:
    numbers = ("--seed", str(seed))
    test = ("--dataset", "demo", "--split", "test", "--limit", str(given.test_questions), "--temperature", "0")
    asked = (*test, "--judge", "demo-judge", "--judged", "osr,usr", *numbers)
    found = [Stage.writing(folder / BEFORE, "eval", "--policy", "policy=demo:hiprag", *asked)]
    for name in given.algorithms:
        trained = folder / f"{name}-rl"
        steps = ("--max-steps", str(given.steps), "--set", "validation.steps=0")
        found.append(Stage.writing(trained, "rl", "train", *ALGORITHMS[name], *steps, *numbers))
        found.append(Stage.writing(folder / name, "eval", "--policy", f"policy=hf:{trained}", *asked, needs=(trained,)))
    return found


def show(given: Any, out: Path) -> None:
    table = Table(__doc__)
    folders = {seed: out / f"seed-{seed}" for seed in range(given.seeds)}
    plan = Plan(out, [stage for seed, folder in folders.items() for stage in stages(folder, seed, given)])
    run_plan(plan)
    rows: dict[str, Seeds] = {}
    for name in (BEFORE, *given.algorithms):
        rows[name] = read_seeds({seed: path / name for seed, path in folders.items()}, "policy", "t0_*")
        means = described(rows[name], METRICS)
        by_seed = ", ".join(f"{value:.3f}" for value in means["by_seed"]["acc"])
        table.row(f"ACC, {name}", interval_text(means["all"]["acc"]), f"({by_seed})")
        for metric in ("em", "retrievals", "osr", "usr", "format_rate"):
            if (known := means["all"][metric]) is not None:  # a rate of steps, if there are such steps
                table.row(f"  {metric}", known["mean"])
    for name in given.algorithms:
        for other in (BEFORE, "grpo"):
            if name == other or other not in rows:
                continue
            apart = difference(rows[name], rows[other], METRICS)
            assert apart is not None
            text = interval_text(apart["all"]["acc"], digits=1, scale=100, signed=True)
            by_seed = ", ".join(f"{100 * value:+.1f}" for value in apart["by_seed"]["acc"])
            table.row(f"ACC in points, {name} - {other}", text, f"({by_seed})")
    for name in given.algorithms:
        found = [require_json(path / f"{name}-rl" / "training.json", "run again") for path in folders.values()]
        curves = [[entry["rollout/reward"] for entry in one["history"] if "rollout/reward" in entry] for one in found]
        last = given.steps // 4
        table.row(f"reward of rollouts, first quarter of {name}", fmean(fmean(curve[:last]) for curve in curves))
        ends = [fmean(curve[-last:]) for curve in curves]
        table.row(f"reward of rollouts, last quarter of {name}", fmean(ends), ", ".join(f"{end:.3f}" for end in ends))
        if len(ends) > 1:
            table.row("  deviation over seeds", stdev(ends))
        spent = [plan.cpu_s[stage.line] for stage in plan.stages if stage.out.name == f"{name}-rl"]
        table.row("  CPU seconds of a training", fmean(spent))
    table.note(f"{given.steps} steps of 64 rollouts; {given.test_questions} test questions with each seed")
    table.note("intervals: 95 %, over questions and seeds; by seed in brackets. osr, usr: needless, missing searches")
    table.show(given.json)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="keep what the commands write, and resume there")
    for name, default in (("seeds", 3), ("steps", 40), ("test-questions", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    given = parser.parse_args()
    with TemporaryDirectory() as nowhere:
        show(given, given.out or Path(nowhere) / "ppo")


if __name__ == "__main__":
    main()
