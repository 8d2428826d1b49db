"""How often preferences keep their sign: fresh rollouts of both sides of sampled pairs, and the calibration of
`confidence`.

    python -m benchmarks.preferences RUN ... [--pairs 300] [--rollouts 100] [--out FOLDER]

Each RUN is a finished run of build-tree with `--confirm`; its policy is opened again. Three rules are compared on its
trees: every two siblings (the paper's), the new one without and with the rollouts that confirmed it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from reasonrag.core import event_loop
from reasonrag.core.table import Table
from reasonrag.core.text import normalize_answer
from reasonrag.core.types import Answer, Completion, Malformed, Note, Passage, Question, Search, Step, Trajectory
from reasonrag.dpo.demonstrations import read_step
from reasonrag.dpo.pairs import PairRules, derive_pairs, path_from_root
from reasonrag.pipeline.parts import open_engine, open_parts
from reasonrag.retrieval.base import BatchedRetriever
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.spre.decisions import CONFIRMATION
from reasonrag.spre.estimate import trajectory_reward
from reasonrag.storage.files import read_json, write_json, write_text
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row, by_question, read_shards
from reasonrag.storage.tables import tree_schema
from tools.pages import head, made

SIBLINGS = {"rule": "siblings"}
BEST = {"rule": "best", "per_question": 8, "min_confidence": 0.8, "path_share": 0.5}
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.001)
Tree = list[Row]


def rules(tree: Tree) -> dict[str, tuple[Tree, dict[str, Any]]]:
    """Return the nodes and the arguments of `derive_pairs` by rule."""
    searched = [row for row in tree if row["origin"] != CONFIRMATION]  # they come last, so ids stay positions
    return {
        "siblings": (searched, SIBLINGS),
        "all confirmed": (tree, BEST | {"min_confidence": 0.0}),
        "best": (searched, BEST),
        "best, confirmed": (tree, BEST),
    }


def trajectory_of(tree: Tree, node: Row) -> Trajectory:
    """Return the trajectory that ends in a node."""
    path, steps = path_from_root(tree, node), []
    for number, row in enumerate(path, 1):
        kinds = {"query": Search, "evidence": Note, "answer": Answer, "malformed": Malformed}
        passages = tuple(Passage(**passage) for passage in row["passages"])
        written = read_step(path[:number], read_ids=True)
        completion = Completion(row["text"], token_ids=written.token_ids)
        steps.append(Step(written.prompt, completion, kinds[row["action"]](row["content"]), passages))
    root = tree[0]
    return Trajectory(
        Question(root["question_id"], root["question"], tuple(root["golden_answers"]), root["dataset"]), tuple(steps)
    )


async def value(engine: Engine, tree: Tree, pair: Row, side: str, alpha: float, rollouts: int) -> float:
    """Return what a side is worth by fresh rollouts; that of an answer against a search, by answers demanded there."""
    node = tree[pair[f"{side}_node_id"]]
    types = {pair["chosen_type"], pair["rejected_type"]}
    seeds = [derive_seed(10_007, node["question_id"], node["node_id"], number) for number in range(rollouts)]
    if node["action"] == "answer":
        if types == {"answer"} or node["parent_id"] < 0:
            return float(node["f1"] * alpha ** node["depth"])
        start = trajectory_of(tree, tree[node["parent_id"]])
        ended = await gather_all([engine.step(start, seed=seed, final=True) for seed in seeds])
    else:
        ended = await engine.run([trajectory_of(tree, node)] * rollouts, seeds=seeds)
    rewards = [trajectory_reward(trajectory, alpha=alpha) for trajectory in ended]
    return fmean([reward for reward in rewards if reward is not None] or [0.0])


async def measure(run: Path, size: int, rollouts: int) -> dict[str, Any]:
    """Return the measures of each rule on the trees of a run."""
    config, summary = read_run(run)
    parts = open_parts(config)
    alpha = config.value.alpha
    trees = dict(by_question(read_shards(run / "trees", "nodes", tree_schema())))
    pairs: dict[str, list[Row]] = defaultdict(list)
    for tree in trees.values():
        for name, (nodes, arguments) in rules(tree).items():
            pairs[name] += derive_pairs(nodes, PairRules(alpha, **arguments), policy="", config_hash="")
    confirming = sum(row["origin"] == CONFIRMATION for tree in trees.values() for row in tree)
    calls = summary["calls"]["policy"]["calls"]
    known: dict[tuple[Any, ...], float] = {}
    rows = {}
    async with aclosing(parts):
        engine = open_engine(config, parts.policy, BatchedRetriever(parts.retriever), parts.format)
        for name, of_rule in pairs.items():
            sampled = random.Random(name).sample(of_rule, min(size, len(of_rule)))
            for pair in sampled:
                tree = trees[pair["dataset"], pair["question_id"]]
                for side in ("chosen", "rejected"):
                    is_cross = pair["chosen_type"] != pair["rejected_type"] and pair[f"{side}_type"] == "answer"
                    key = (pair["question_id"], pair[f"{side}_node_id"], is_cross)
                    if key not in known:
                        known[key] = await value(engine, tree, pair, side, alpha, rollouts)
                    pair[f"{side}_fresh"] = known[key]
            paid = calls if "confirmed" in name else calls - confirming
            rows[name] = describe(of_rule, sampled, trees, paid)
    return {"run": run.name, "questions": len(trees), "calls": calls, "confirming_calls": confirming, "rules": rows}


def describe(pairs: list[Row], sampled: list[Row], trees: dict[tuple[str, str], Tree], calls: int) -> dict[str, Any]:
    """Return counts of all pairs, and what fresh rollouts say of the sampled ones."""
    by_type, questions = defaultdict(list), Counter(pair["question_id"] for pair in pairs)
    bins: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair in sampled:
        agrees = sign(pair["chosen_fresh"] - pair["rejected_fresh"])
        by_type[f"{pair['chosen_type']} > {pair['rejected_type']}"].append(agrees)
        if not pair["chosen_type"] == pair["rejected_type"] == "answer":
            low = max(edge for edge in (0.0, *BINS) if edge <= pair["confidence"])
            bins[f"{low:g}"].append((pair["confidence"], agrees))
    all_signs = [agrees for signs in by_type.values() for agrees in signs]
    return {
        "pairs": len(pairs),
        "a_question": len(pairs) / len(trees),
        "calls_a_pair": calls / max(len(pairs), 1),
        "of_five_questions": sum(count for _, count in questions.most_common(5)) / max(len(pairs), 1),
        "types": Counter(f"{pair['chosen_type']} > {pair['rejected_type']}" for pair in pairs),
        "same": sum(map(_is_same(trees), pairs)),
        "sampled": len(sampled),
        "sign_kept": fmean(all_signs) if all_signs else None,
        "sign_kept_by_type": {name: (len(signs), fmean(signs)) for name, signs in sorted(by_type.items())},
        "calibration": {
            low: (len(found), fmean([stated for stated, _ in found]), fmean([agrees for _, agrees in found]))
            for low, found in sorted(bins.items())
        },
    }


def sign(gap: float) -> float:
    return 0.5 if abs(gap) < 1e-9 else float(gap > 0)


def _is_same(trees: dict[tuple[str, str], Tree]) -> Any:
    def is_same(pair: Row) -> bool:
        tree = trees[pair["dataset"], pair["question_id"]]
        chosen, rejected = tree[pair["chosen_node_id"]], tree[pair["rejected_node_id"]]
        words = [sorted(normalize_answer(row["content"]).split()) for row in (chosen, rejected)]
        found = [sorted(passage["id"] for passage in row["passages"]) for row in (chosen, rejected)]
        return chosen["action"] == rejected["action"] and (words[0] == words[1] or (found[0] == found[1] != []))

    return is_same


HEAD = """# How often preferences hold

Made by {made}.
Written by `python -m benchmarks.preferences`. Of each rule and run up to 300 pairs were sampled, and both sides
valued again by fresh rollouts of the run's policy; answers that are compared with a search, by as many answers
demanded there. `kept` is the share whose sign stays, half for a tie. `siblings` is the paper's rule, every two
siblings. `best` compares the best with the worst, and answering with searching, as the search left them; `best,
confirmed` after the rollouts that `--confirm` made; `all confirmed` has those of low confidence too. `same`
counts pairs whose sides have the same words, or found the same passages. Calls are those of the search, and of
what confirmed it.
"""
CALIBRATION = """
## Is `confidence` right?

Over all runs above: the mean confidence of pairs by its size, and the share of them whose sign stays. Pairs of two
answers, which are certain, are left out.
"""


def page(results: list[dict[str, Any]], commit: str) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD.format(made=made(commit, "preferences.md"))
    for result in results:
        paid = f"{result['calls']} calls, {result['confirming_calls']} of them to confirm"
        yield from [f"## {result['run']}", "", f"{result['questions']} questions, {paid}.", ""]
        kinds = sorted({kind for row in result["rules"].values() for kind in row["sign_kept_by_type"]})
        rows = []
        for name, row in result["rules"].items():
            by_kind = [row["sign_kept_by_type"].get(kind) for kind in kinds]
            shares = [f"{kept[1]:.2f} ({kept[0]})" if kept else "-" for kept in by_kind]
            five, kept = f"{row['of_five_questions']:.0%}", f"{row['sign_kept']:.3f}"
            counts = [f"{row['a_question']:.1f}", f"{row['calls_a_pair']:.0f}", five, row["same"]]
            rows.append([name, row["pairs"], *counts, kept, *shares])
        columns = ["rule", "pairs", "a question", "calls a pair", "of 5 questions", "same", "kept", *kinds]
        yield from [*Table("", columns, rows).markdown(str), ""]
    yield CALIBRATION
    rows = []
    for name in results[0]["rules"]:
        for low, high in pairwise((0.0, *BINS)):
            bins = [result["rules"][name]["calibration"].get(f"{low:g}") for result in results]
            if count := sum(found[0] for found in bins if found):
                stated, kept = (sum(found[0] * found[place] for found in bins if found) / count for place in (1, 2))
                rows.append([name, f"{low:g} to {min(high, 1):g}", count, f"{stated:.2f}", f"{kept:.2f}"])
    yield from Table("", ["rule", "confidence", "pairs", "stated", "kept"], rows).markdown(str)


@click.command(help=__doc__)
@click.argument("runs", nargs=-1, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--pairs", "size", default=300, show_default=True)
@click.option("--rollouts", default=100, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="A JSON file; the page is written next to it."
)
def main(runs: Sequence[Path], size: int, rollouts: int, out: Path) -> None:
    """Measure, unless the JSON file is there, and write the page next to it."""
    if not out.exists():
        measured = [event_loop.run(measure(run, size, rollouts)) for run in runs]
        write_json(out, {"commit": head("reasonrag", "benchmarks"), "runs": measured}, indent=1)
    results = read_json(out) or {}
    write_text(out.with_suffix(".md"), "\n".join(page(results["runs"], results["commit"])) + "\n")


if __name__ == "__main__":
    main()
