"""Whole trajectories to preference pairs: all that an outcome reward can tell, the rival of step-wise pairs.

The policy is asked anew at every step, so a trajectory is several prompts with a step each, and its log-probability is
the sum over its steps. Two trajectories are compared by the F1 of their answers; what they share is left out, as it
cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from reasonrag.dpo.pairs import digest, step_end
from reasonrag.storage.parquet import Row


def derive_trajectory_pairs(
    nodes: Iterable[Row], *, policy: str, config_hash: str, min_margin: float = 0.01
) -> Iterator[Row]:
    """Rows of `tables.trajectory_pair_schema`: the best trajectory against the worst, the next against the next, ...

    Each distinct trajectory stands in one pair at most, so that a question with many does not outweigh the others. One
    with a step that could not be read is never chosen.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and by id.
        policy: name of the model that wrote the steps.
        config_hash: of the run that made the trees.
        min_margin: smallest difference of F1, in [0, 1].
    """
    for _, tree in groupby(nodes, key=lambda row: (row["dataset"], row["question_id"])):
        ranked = _ranked(list(tree))
        readable = [path for path in ranked if all(step["action"] != "malformed" for step in path)]
        for best, worst in zip(readable, reversed(ranked), strict=False):
            if best[-1]["f1"] - worst[-1]["f1"] < max(min_margin - 1e-12, 1e-12):
                break  # neither list goes on to anything better, so none of them comes up a second time
            pair = _pair(best, worst)
            if pair["rejected_steps"]:
                nodes_of_both = [step["node_id"] for step in (*best, *worst)]
                yield pair | {
                    "pair_id": digest(config_hash, nodes_of_both, best[0]["question_id"])[:16],
                    "policy": policy,
                    "config_hash": config_hash,
                }


def _ranked(tree: Sequence[Row]) -> list[list[Row]]:
    """The distinct complete trajectories of a tree, best F1 first; equals in an order that says nothing."""
    distinct: dict[tuple[str, ...], list[Row]] = {}
    for node in tree:
        if node["f1"] is not None:
            path = _path(tree, node)
            distinct.setdefault(tuple(step["text"] for step in path), path)
    return sorted(
        distinct.values(), key=lambda path: (-path[-1]["f1"], digest(path[-1]["question_id"], path[-1]["node_id"]))
    )


def _path(tree: Sequence[Row], node: Row) -> list[Row]:
    """The steps from the root to a node."""
    path: list[Row] = []
    while node["parent_id"] >= 0:
        path.append(node)
        node = tree[node["parent_id"]]
    return path[::-1]


def _pair(best: Sequence[Row], worst: Sequence[Row]) -> Row:
    shared = 0
    while best[shared]["text"] == worst[shared]["text"] and best[shared]["prompt"] == worst[shared]["prompt"]:
        shared += 1  # they differ somewhere: their answers have another F1
    chosen, rejected = best[-1], worst[-1]
    return {
        "chosen_steps": _steps(best[shared:]),
        "rejected_steps": _steps(worst[shared:]),
        "question_id": chosen["question_id"],
        "dataset": chosen["dataset"],
        "depth": shared,
        "chosen_reward": chosen["f1"],
        "rejected_reward": rejected["f1"],
        "margin": chosen["f1"] - rejected["f1"],
        "chosen_node_id": chosen["node_id"],
        "rejected_node_id": rejected["node_id"],
    }


def _steps(path: Sequence[Row]) -> list[Row]:
    """Without those of which nothing was written before they were cut off: there is nothing to score."""
    steps = [{name: node[name] for name in ("prompt", "prefix", "text")} | {"end": step_end(node)} for node in path]
    return [step for step in steps if step["text"] or step["end"] != "length"]
