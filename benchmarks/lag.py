"""What the lag of the search does to trees, pairs, and DPO on them, in the demo world.

    python benchmarks/lag.py --out FOLDER [--lags 0,8,16] [--seeds 0,1,2] [--questions 100] [--iterations 64]

Builds trees, trains by DPO for as many optimizer steps each, and evaluates on held-out test questions, greedy and at
temperature 1. Differences are to the first lag, with intervals over questions and seeds. Resumes if it is stopped. It
takes hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from papers.measures import described, difference, read_seeds

METRICS = ("em", "retrievals", "format_rate")
STEPS, TEST_QUESTIONS = 150, 600


def command(*arguments: str) -> None:
    print("$ reasonrag", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "reasonrag", *arguments], check=True, stdout=subprocess.DEVNULL)


def measure(out: Path, lags: list[int], seeds: list[int], questions: int, iterations: int) -> dict[str, Any]:
    evaluations: dict[int, Path] = {}
    trees: dict[int, list[dict[str, Any]]] = {lag: [] for lag in lags}
    for seed in seeds:
        policies = []
        for lag in lags:
            run, policy = out / f"seed-{seed}" / f"trees-{lag}", out / f"seed-{seed}" / f"dpo-{lag}"
            if not (run / "run.json").exists():
                sizes = ("--limit", str(questions), "--iterations", str(iterations))
                search = ("--preset", "demo", *sizes, "--lag", str(lag), "--seed", str(seed))
                command("build-tree", *search, "--out", str(run))
            trees[lag].append(json.loads((run / "run.json").read_text()))
            if not (policy / "training.json").exists():
                data = ("--preset", "demo", "--data", str(run), "--seed", str(seed), "--set", f"max_steps={STEPS}")
                command("dpo", "train", *data, "--out", str(policy))
            policies += ["--policy", f"lag-{lag}=hf:{policy}"]
        evaluations[seed] = out / f"seed-{seed}" / "eval"
        test = ("--split", "test", "--limit", str(TEST_QUESTIONS), "--temperature", "0,1")
        command("eval", "--preset", "demo", *test, *policies, "--out", str(evaluations[seed]))
    return {str(lag): _described(lag, lags[0], trees[lag], evaluations) for lag in lags}


def _described(lag: int, first: int, runs: list[dict[str, Any]], evaluations: dict[int, Path]) -> dict[str, Any]:
    questions = sum(run["questions"]["finished"] for run in runs)
    calls, pairs = (sum(count) for count in zip(*map(_counts, runs), strict=True))
    found: dict[str, Any] = {"calls/question": calls / questions, "pairs/question": pairs / questions}
    found["calls/pair"] = calls / pairs
    for setting, pattern in (("greedy", "t0*"), ("T = 1", "t1*")):
        rows, other = (read_seeds(evaluations, f"lag-{number}", pattern) for number in (lag, first))
        found[setting] = described(rows, METRICS)["all"]
        compared = difference(rows, other, METRICS)
        found[f"{setting}, less lag {first}"] = compared and compared["all"]
    return found


def _counts(run: dict[str, Any]) -> tuple[int, int]:
    return run["calls"]["policy"]["calls"], run["pairs"]["total"]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return ", ".join(f"{name} {v['mean']:.3f} [{v['low']:.3f}, {v['high']:.3f}]" for name, v in value.items())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder of runs, policies and evaluations")
    options.add_argument("--lags", default="0,8,16")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--questions", type=int, default=100)
    options.add_argument("--iterations", type=int, default=64)
    options.add_argument("--json", action="store_true", help="print the figures as one object")
    given = options.parse_args()
    lags, seeds = ([int(number) for number in text.split(",")] for text in (given.lags, given.seeds))
    figures = measure(given.out, lags, seeds, given.questions, given.iterations)
    if given.json:
        print(json.dumps(figures))
        return
    for lag, found in figures.items():
        print(f"\nlag {lag}")
        for name, value in found.items():
            print(f"  {name:<22}{_shown(value)}")


if __name__ == "__main__":
    main()
