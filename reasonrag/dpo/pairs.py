"""Trees to preference pairs: sibling steps by process reward (RAG-ProGuide, arXiv:2505.14069, sec. 2.2.3), and whole
trajectories by the F1 of their answers, which is all that an outcome reward can compare.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, groupby
from typing import Literal

from reasonrag.core.text import normalize_answer
from reasonrag.storage.parquet import Row

PairReward = Literal["spre", "judge"]
# A margin of exactly the threshold counts; this keeps 0.81 - 0.80 from falling short of 0.01 by rounding.
_ROUNDING = 1e-12


def derive_pairs(
    nodes: Iterable[Row],
    *,
    policy: str,
    config_hash: str,
    min_margin: float = 0.01,
    reward: PairReward = "spre",
) -> Iterator[Row]:
    """Yield every preference between two siblings, as rows of `tables.pair_schema`.

    Both siblings have a reward (a branch without a final answer has none), the rewards differ by at least
    `min_margin`, and the contents differ. The higher one is chosen; a step that could not be parsed is never chosen.
    A (prompt, chosen, rejected) that occurs again anywhere in the data set is kept once.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and by id.
        policy: name of the model that wrote the steps.
        config_hash: of the run that made the trees.
        min_margin: smallest difference of rewards, in [0, 1].
        reward: "spre", or "judge" for the search's value Q.
    """
    seen: set[str] = set()
    column = "spre" if reward == "spre" else "value"
    for tree in _trees(nodes):
        for first, second in _siblings(tree):
            if first[column] is None or second[column] is None:
                continue
            chosen, rejected = (first, second) if first[column] >= second[column] else (second, first)
            if not _is_preference(chosen, rejected, chosen[column] - rejected[column], min_margin):
                continue
            fingerprint = _digest(_full_prompt(chosen), chosen["text"], rejected["text"])
            if fingerprint not in seen:
                seen.add(fingerprint)
                pair_id = _digest(config_hash, fingerprint)[:16]
                provenance = {"pair_id": pair_id, "policy": policy, "config_hash": config_hash}
                yield _step_pair(chosen, rejected, column) | provenance


def derive_trajectory_pairs(
    nodes: Iterable[Row], *, policy: str, config_hash: str, min_margin: float = 0.01
) -> Iterator[Row]:
    """Yield rows of `tables.trajectory_pair_schema`: the best trajectory against the worst, the next best against
    the next worst, and so on.

    The policy is prompted anew at every step, so a trajectory is several prompts with a step each, and its
    log-probability is the sum over its steps. Steps that both share are left out, as they cancel. Each distinct
    trajectory is in one pair at most, so that a question with many does not outweigh the others. A trajectory with a
    step that could not be parsed is never chosen.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and by id.
        policy: name of the model that wrote the steps.
        config_hash: of the run that made the trees.
        min_margin: smallest difference of F1, in [0, 1].
    """
    for tree in _trees(nodes):
        ranked = _ranked_trajectories(tree)
        parseable = [path for path in ranked if all(step["action"] != "malformed" for step in path)]
        for best, worst in zip(parseable, reversed(ranked), strict=False):
            if best[-1]["f1"] - worst[-1]["f1"] < max(min_margin - _ROUNDING, _ROUNDING):
                break  # margins only shrink from here, and stopping keeps every trajectory in at most one pair
            pair = _trajectory_pair(best, worst)
            if pair["rejected_steps"]:
                node_ids = [step["node_id"] for step in (*best, *worst)]
                pair_id = _digest(config_hash, node_ids, best[0]["question_id"])[:16]
                yield pair | {"pair_id": pair_id, "policy": policy, "config_hash": config_hash}


def in_test_split(dataset: str, question_id: str, share: float) -> bool:
    """Return whether a question is held out: by a hash of its id, so that rows of one question never part.

    >>> sum(in_test_split("d", str(i), 0.1) for i in range(1000))
    117
    """
    digest = hashlib.sha256(f"{dataset}\0{question_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _trees(nodes: Iterable[Row]) -> Iterator[list[Row]]:
    for _, tree in groupby(nodes, key=lambda row: (row["dataset"], row["question_id"])):
        yield list(tree)


def _siblings(tree: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    families: dict[int, list[Row]] = defaultdict(list)
    for node in tree:
        families[node["parent_id"]].append(node)
    for children in families.values():
        yield from combinations(children, 2)


def _is_preference(chosen: Row, rejected: Row, margin: float, min_margin: float) -> bool:
    if chosen["action"] == "malformed" or margin < max(min_margin - _ROUNDING, _ROUNDING):
        return False
    if not rejected["text"] and _step_end(rejected) == "length":  # nothing was written: there is nothing to score
        return False
    return _content(chosen) != _content(rejected)


def _content(node: Row) -> str:
    """Return the text inside the tag, normalised; the whole step if that is empty or there is no tag."""
    inside = "" if node["action"] == "malformed" else normalize_answer(node["content"])
    return inside or str(node["text"]).strip()


def _step_pair(chosen: Row, rejected: Row, column: str) -> Row:
    return {
        "prompt": _full_prompt(chosen),
        "chosen": [{"role": "assistant", "content": chosen["text"]}],
        "rejected": [{"role": "assistant", "content": rejected["text"]}],
        "question_id": chosen["question_id"],
        "dataset": chosen["dataset"],
        "depth": chosen["depth"] - 1,
        "chosen_type": chosen["action"],
        "rejected_type": rejected["action"],
        "chosen_end": _step_end(chosen),
        "rejected_end": _step_end(rejected),
        "chosen_reward": chosen[column],
        "rejected_reward": rejected[column],
        "margin": chosen[column] - rejected[column],
        "chosen_visits": chosen["visits"],
        "rejected_visits": rejected["visits"],
        "parent_node_id": chosen["parent_id"],
        "chosen_node_id": chosen["node_id"],
        "rejected_node_id": rejected["node_id"],
        "prompt_tokens": chosen["prompt_tokens"],
    }


def _full_prompt(node: Row) -> list[Row]:
    """Return the prompt of a step; a turn that was already open is its last message, which TRL continues too."""
    open_turn = [{"role": "assistant", "content": node["prefix"]}] if node.get("prefix") else []
    return [*node["prompt"], *open_turn]


def _step_end(node: Row) -> str:
    """Return what ended a step. Only a turn that the policy itself ended has an end-of-turn token to score."""
    if node["text"].endswith(tuple(node["stop"])):
        return "stop"
    return "turn" if node["finish_reason"] == "stop" else "length"


def _ranked_trajectories(tree: Sequence[Row]) -> list[list[Row]]:
    """Return the distinct complete trajectories of a tree, best F1 first; ties in a fixed pseudo-random order."""
    distinct: dict[tuple[str, ...], list[Row]] = {}
    for node in tree:
        if node["f1"] is not None:
            path = _path_from_root(tree, node)
            distinct.setdefault(tuple(step["text"] for step in path), path)
    return sorted(
        distinct.values(), key=lambda path: (-path[-1]["f1"], _digest(path[-1]["question_id"], path[-1]["node_id"]))
    )


def _path_from_root(tree: Sequence[Row], node: Row) -> list[Row]:
    path: list[Row] = []
    while node["parent_id"] >= 0:
        path.append(node)
        node = tree[node["parent_id"]]
    return path[::-1]


def _trajectory_pair(best: Sequence[Row], worst: Sequence[Row]) -> Row:
    shared = 0
    while best[shared]["text"] == worst[shared]["text"] and best[shared]["prompt"] == worst[shared]["prompt"]:
        shared += 1  # this ends: their answers have different F1, so some step differs
    chosen, rejected = best[-1], worst[-1]
    return {
        "chosen_steps": _scorable_steps(best[shared:]),
        "rejected_steps": _scorable_steps(worst[shared:]),
        "question_id": chosen["question_id"],
        "dataset": chosen["dataset"],
        "depth": shared,
        "chosen_reward": chosen["f1"],
        "rejected_reward": rejected["f1"],
        "margin": chosen["f1"] - rejected["f1"],
        "chosen_node_id": chosen["node_id"],
        "rejected_node_id": rejected["node_id"],
    }


def _scorable_steps(path: Sequence[Row]) -> list[Row]:
    """Return the steps of a path, without those that were cut off before anything was written."""
    steps = []
    for node in path:
        end = _step_end(node)
        if node["text"] or end != "length":
            steps.append({name: node[name] for name in ("prompt", "prefix", "text")} | {"end": end})
    return steps


def _digest(*parts: object) -> str:
    """Return 64 hex digits that identify JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
