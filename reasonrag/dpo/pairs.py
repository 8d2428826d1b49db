"""Sibling nodes to preference pairs: RAG-ProGuide (arXiv:2505.14069, sec. 2.2.3)."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations, groupby
from typing import Literal

from reasonrag.core.text import normalize_answer
from reasonrag.storage.parquet import Row

PairReward = Literal["spre", "judge"]


def derive_pairs(
    nodes: Iterable[Row],
    *,
    policy: str,
    config_hash: str,
    min_margin: float = 0.01,
    reward: PairReward = "spre",
) -> Iterator[Row]:
    """Every preference between two siblings, as rows of `tables.pair_schema`.

    Both siblings have a reward (a branch without a final answer has none), the rewards differ by at least
    `min_margin`, and the contents differ. The higher one is chosen; a step that could not be read is never chosen.
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
    for _, tree in groupby(nodes, key=lambda row: (row["dataset"], row["question_id"])):
        for first, second in _siblings(tree):
            chosen, rejected = (first, second) if _more(first, second, column) else (second, first)
            if not _is_preference(chosen, rejected, column, min_margin):
                continue
            mark = digest(_asked(chosen), chosen["text"], rejected["text"])
            if mark not in seen:
                seen.add(mark)
                pair_id = digest(config_hash, mark)[:16]
                yield _pair(chosen, rejected, column) | {
                    "pair_id": pair_id,
                    "policy": policy,
                    "config_hash": config_hash,
                }


def in_test_split(dataset: str, question_id: str, share: float) -> bool:
    """Whether a question is held out: by a hash of its id, so that rows of one question never part.

    >>> sum(in_test_split("d", str(i), 0.1) for i in range(1000))
    117
    """
    digest = hashlib.sha256(f"{dataset}\0{question_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _siblings(tree: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    families: dict[int, list[Row]] = defaultdict(list)
    for node in tree:
        families[node["parent_id"]].append(node)
    for children in families.values():
        yield from combinations(children, 2)


def _more(first: Row, second: Row, column: str) -> bool:
    return first[column] is not None and (second[column] is None or first[column] >= second[column])


def _is_preference(chosen: Row, rejected: Row, column: str, min_margin: float) -> bool:
    if chosen[column] is None or rejected[column] is None or chosen["action"] == "malformed":
        return False
    if not rejected["text"] and step_end(rejected) == "length":  # nothing was written: there is nothing to score
        return False
    # A margin of exactly the threshold counts; 1e-12 keeps 0.81 - 0.80 from falling short of 0.01 by rounding.
    if chosen[column] - rejected[column] < max(min_margin - 1e-12, 1e-12):
        return False
    return _content(chosen) != _content(rejected)


def _content(node: Row) -> str:
    """What stands inside the tag, normalised; the whole step where that is nothing or there is no tag."""
    inside = "" if node["action"] == "malformed" else normalize_answer(node["content"])
    return inside or str(node["text"]).strip()


def _pair(chosen: Row, rejected: Row, column: str) -> Row:
    return {
        "prompt": _asked(chosen),
        "chosen": [{"role": "assistant", "content": chosen["text"]}],
        "rejected": [{"role": "assistant", "content": rejected["text"]}],
        "question_id": chosen["question_id"],
        "dataset": chosen["dataset"],
        "depth": chosen["depth"] - 1,
        "chosen_type": chosen["action"],
        "rejected_type": rejected["action"],
        "chosen_end": step_end(chosen),
        "rejected_end": step_end(rejected),
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


def _asked(node: Row) -> list[Row]:
    """What the policy was asked. A turn that was open already is the last message, which TRL goes on with too."""
    open_turn = [{"role": "assistant", "content": node["prefix"]}] if node.get("prefix") else []
    return [*node["prompt"], *open_turn]


def step_end(node: Row) -> str:
    """What ended a step. Only a turn that the policy itself ended has an end-of-turn token to score."""
    if node["text"].endswith(tuple(node["stop"])):
        return "stop"
    return "turn" if node["finish_reason"] == "stop" else "length"


def digest(*parts: object) -> str:
    """64 hex digits that identify JSON-able parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
