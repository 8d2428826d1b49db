"""Trees to preference pairs: sibling steps by process reward (RAG-ProGuide, arXiv:2505.14069, sec. 2.2.3), and whole
trajectories by the outcome of their answers, as an outcome reward compares them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Literal

from reasonrag.core.errors import DataError
from reasonrag.core.text import common_text
from reasonrag.spre.decisions import (
    Decision,
    PairReward,
    confidence,
    content_of,
    decisions_of,
    effect_of,
    full_prompt,
    standard_error,
    step_end,
    stopping,
)
from reasonrag.spre.estimate import Weighting, outcome_of
from reasonrag.storage.parquet import Row, by_question, read_batches, read_shards, shard_paths
from reasonrag.storage.tables import tree_schema

Question = tuple[str, str]  # data set and id

_MOST_WAITING = 10_000  # pairs in memory behind one that waits for an opposite one

# Columns of `tables.tree_schema` that pairs are derived from.
NODE_COLUMNS = (
    *("dataset", "question_id", "node_id", "parent_id", "depth", "origin", "action", "content", "prompt", "prefix"),
    *("stop", "text", "finish_reason", "token_ids", "prompt_tokens", "visits", "valued", "value", "f1"),
    *("passages.list.element.id", "grade"),
)

# A margin of exactly the threshold counts; this keeps 0.81 - 0.80 from falling short of 0.01 by rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class PairRules:
    """Which decisions of a state are compared, and which comparisons become pairs.

    Attributes:
        alpha: decay per action of SPRE, in (0, 1].
        rule: "best" compares in each state the best and the worst of each type of action, searching with
            answering, and what cannot be read with the best step. "siblings" compares every two siblings, as
            the paper does (arXiv:2505.14069, sec. 2.2.3), and takes only steps of equal text for the same.
        min_margin: smallest difference of rewards, in [0, 1].
        min_confidence: smallest probability that the order is right
            (`spre.decisions`), in [0, 1]; it is unknown for "judge" and "prm".
        path_share: share of the pairs that differ only in the length of their paths that is kept, in [0, 1].
        per_question: most pairs of a question, the surest first; 0 keeps all.
        reward: "spre", or "judge" or "prm" for the search's value Q.
        weighting: how trajectories are averaged.
    """

    alpha: float = 0.9
    rule: Literal["best", "siblings"] = "best"
    min_margin: float = 0.01
    min_confidence: float = 0.0
    path_share: float = 1.0
    per_question: int = 0
    reward: PairReward = "spre"
    weighting: Weighting = "trajectories"

    @property
    def least(self) -> float:
        """The least difference that counts: equal rewards are no preference, whatever the threshold."""
        return max(self.min_margin - _ROUNDING, _ROUNDING)


DEFAULT_RULES = PairRules()


def derive_pairs(
    nodes: Iterable[Row],
    rules: PairRules = DEFAULT_RULES,
    *,
    policy: str,
    config_hash: str,
    read_ids: bool = True,
    repeated: Collection[tuple[str, str]] | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Row]:
    """Yield preferences between two decisions of a state, as rows of `tables.pair_schema`.

    No two pairs contradict each other, as steps of one state that do the same are one
    decision with one reward (`decisions_of`). Both sides of a pair have a reward (a
    branch without a final answer has none), and the rewards differ by at least
    `rules.min_margin`. The higher one is chosen; a step that could not be parsed is never
    chosen. A preference that occurs again in another tree is kept once. One that another
    tree reverses, as the same question with other golden answers may, is left out.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and by id.
        rules: what is compared and kept.
        policy: name of the model that wrote the steps.
        config_hash: of the run that made the trees.
        read_ids: whether the policy read ids, so that an open turn
            kept its sampled ids; a server that gets text encodes it again.
        repeated: data set and id of the questions with a text that another tree has too, so that only
            their pairs are remembered; by default the pairs of all trees are.
        left_out: counts pairs that are left out, by cause: "low confidence", "small margin", "beyond the
            most of a question", "shorter path", "reversed", "one-sided yes or no" (more of one order than
            of the other).
    """
    left_out = Counter() if left_out is None else left_out
    # More of one order than of the other would teach how often each is right, so a pair waits for an opposite
    # one. Those behind it wait, too, as pairs stand in the order of the trees.
    one_sided: dict[tuple[str, str], list[str]] = {("yes", "no"): [], ("no", "yes"): []}
    queue: deque[tuple[tuple[str, str], Row]] = deque()
    for tree, seen in _trees(nodes, repeated):
        for chosen, rejected in rivals_of(tree, rules, left_out):
            # Single verdicts of a judge are not kept, so nothing is known of how sure its values are.
            sureness = confidence(chosen.decision, rejected.decision) if rules.reward == "spre" else None
            if cause := _lack(chosen, rejected, rules, sureness):
                left_out[cause] += 1
                continue
            prompt, contents = full_prompt(chosen.node), [content_of(side.node) for side in (chosen, rejected)]
            if fingerprint := _new(seen, left_out, prompt, *contents):
                turn = open_turn(path_from_root(tree, chosen.node)) if read_ids else None
                pair = _step_pair(chosen, rejected, rules.reward)
                pair |= {"prompt": prompt, "turn": turn, "confidence": sureness, "policy": policy}
                pair |= {"pair_id": _digest(config_hash, fingerprint)[:16], "config_hash": config_hash}
                answers = contents[0][1], contents[1][1]
                queue.append((answers, pair))
                if rules.rule != "siblings" and answers in one_sided:
                    if opposite := one_sided[answers[::-1]]:
                        opposite.pop()
                    else:
                        one_sided[answers].append(pair["pair_id"])
                yield from _in_order(queue, one_sided, left_out, most=_MOST_WAITING)
    yield from _in_order(queue, one_sided, left_out, most=0)


def _in_order(
    queue: deque[tuple[tuple[str, str], Row]],
    waiting: Mapping[tuple[str, str], list[str]],
    left_out: Counter[str],
    *,
    most: int,
) -> Iterator[Row]:
    """Yield the pairs before the first that waits for an opposite one; leave that out while more than `most` queue."""
    while queue:
        answers, pair = queue[0]
        if pair["pair_id"] in (of_order := waiting.get(answers, [])):
            if len(queue) <= most:
                return
            of_order.remove(pair["pair_id"])
            left_out["one-sided yes or no"] += 1
        else:
            yield pair
        queue.popleft()


def derive_trajectory_pairs(
    nodes: Iterable[Row],
    *,
    policy: str,
    config_hash: str,
    min_margin: float = 0.01,
    read_ids: bool = True,
    repeated: Collection[tuple[str, str]] | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Row]:
    """Yield rows of `tables.trajectory_pair_schema`: the best trajectory against the worst, the next best against
    the next worst, and so on.

    The policy gets a new prompt at every step, so a trajectory is several
    prompts with a step each, and its log-probability is the sum over its steps.
    Steps that both share are left out, as they cancel. Each distinct trajectory
    is in one pair at most, so that a question with many does not outweigh the
    others. A trajectory with a step that could not be parsed is never chosen.
    Pairs that other trees repeat or reverse are left out, as in `derive_pairs`.

    The arguments are those of `derive_pairs`; `min_margin` is the smallest difference of outcomes, in [0, 1].
    """
    left_out = Counter() if left_out is None else left_out
    for tree, seen in _trees(nodes, repeated):
        ranked = _ranked_trajectories(tree)
        parseable = [path for path in ranked if all(step["action"] != "malformed" for step in path)]
        for best, worst in zip(parseable, reversed(ranked), strict=False):
            if path_outcome(best) - path_outcome(worst) < max(min_margin - _ROUNDING, _ROUNDING):
                break  # margins only shrink from here, and stopping keeps every trajectory in at most one pair
            pair = _trajectory_pair(best, worst, read_ids=read_ids)
            if pair["rejected_steps"] and _new(seen, left_out, pair["chosen_steps"], pair["rejected_steps"]):
                node_ids = [step["node_id"] for step in (*best, *worst)]
                pair_id = _digest(config_hash, node_ids, best[0]["dataset"], best[0]["question_id"])[:16]
                yield pair | {"pair_id": pair_id, "policy": policy, "config_hash": config_hash}


def repeated_questions(trees: Iterable[Path]) -> dict[Question, Question]:
    """Return the questions with a text that another one has too, each with the first of its text, from files of trees.

    Only their trees can repeat or reverse each other's pairs. Case and white space make no difference.
    """
    import pyarrow.compute as pc

    first: dict[str, Question] = {}  # by text
    repeated: dict[Question, Question] = {}
    for path in trees:
        for batch in read_batches(path, tree_schema(), columns=("parent_id", "dataset", "question_id", "question")):
            for root in batch.filter(pc.less(batch.column("parent_id"), 0)).to_pylist():
                question, text = (root["dataset"], root["question_id"]), common_text(root["question"] or "")
                if text and (other := first.setdefault(text, question)) != question:
                    repeated |= {question: other, other: other}
    return repeated


def in_test_split(question: Question, share: float, repeated: Mapping[Question, Question] | None = None) -> bool:
    """Return whether a question is held out: by a hash of its id, so that rows of one question never part.

    Nor do questions of one text, if they are given as `repeated_questions` returns them.

    >>> sum(in_test_split(("d", str(i)), 0.1) for i in range(1000))
    117
    """
    dataset, question_id = (repeated or {}).get(question, question)
    digest = hashlib.sha256(f"{dataset}\0{question_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split_trees(run: Path, columns: Sequence[str], share: float) -> Iterator[tuple[str, Question, list[Row]]]:
    """Yield each tree of a run, with the split that holds its question, train or test, and the question."""
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    for question, tree in _placed(read_shards(run / "trees", "nodes", tree_schema(), columns=columns)):
        yield "test" if in_test_split(question, share, repeated) else "train", question, tree


def _trees(nodes: Iterable[Row], repeated: Collection[tuple[str, str]] | None) -> Iterator[tuple[list[Row], set[str]]]:
    """Yield each tree with the digests of the preferences seen before; prompts of other questions differ from its."""
    seen: set[str] = set()
    for question, tree in _placed(nodes):
        yield tree, seen if repeated is None or question in repeated else set()


def _placed(nodes: Iterable[Row]) -> Iterator[tuple[Question, list[Row]]]:
    """Yield each tree; raise DataError if a node of it is not where an earlier one may be its parent."""
    for question, tree in by_question(nodes):
        for place, row in enumerate(tree):
            if row["node_id"] != place or row["parent_id"] >= place:
                problem = f"question {question[1]!r}, node {row['node_id']}: no tree of build-tree has it there"
                raise DataError(f"{problem}; run the same build-tree command to write the tables again")
        yield question, tree


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a pair: a node that was written in the state, and the decision that it stands for."""

    node: Row
    decision: Decision


def rivals_of(tree: Sequence[Row], rules: PairRules, left_out: Counter[str] | None = None) -> list[tuple[Side, Side]]:
    """Return the pairs of a tree, the better side first, as its search shows it: before fresh rollouts confirm them.

    Others, of which one side is better too, are counted in `left_out` by cause.
    """
    left_out = Counter() if left_out is None else left_out
    is_best = rules.rule == "best"
    same = effect_of if is_best else content_of
    decisions = decisions_of(tree, alpha=rules.alpha, reward=rules.reward, weighting=rules.weighting, same=same)
    # By state or parent, then by the decision's oldest node. A decision may have nodes
    # below several parents, as equal states are reached on several paths.
    families: dict[int, dict[int, Side]] = defaultdict(dict)
    for node, decision in zip(tree, decisions, strict=True):
        if decision is not None and decision.reward is not None:
            family = families[decision.state if is_best else node["parent_id"]]
            family.setdefault(decision.nodes[0], Side(node, decision))
    compare = partial(_best_and_worst, tree, alpha=rules.alpha) if is_best else _siblings
    rivals = []
    for chosen, rejected in compare(families.values()):
        sureness = margin = _reward(chosen) - _reward(rejected)
        if chosen.node["action"] == "malformed" or margin < _ROUNDING:
            continue
        if margin < rules.least:
            left_out["small margin"] += 1
        else:
            if rules.reward == "spre":
                sureness = confidence(chosen.decision.searched, rejected.decision.searched)
            rivals.append((sureness, chosen, rejected))
    if rules.per_question:
        surest = _surest_of_each_type(rivals)
        rivals = surest[: rules.per_question]
        left_out.update(["beyond the most of a question"] * (len(surest) - len(rivals)))
    return [(chosen, rejected) for _, chosen, rejected in rivals]


def _surest_of_each_type(rivals: Iterable[tuple[float, Side, Side]]) -> list[tuple[float, Side, Side]]:
    """Return the pairs of each type in turn, the surest first: answers are surest, and alone they teach no search."""
    taken = Counter[tuple[str, str]]()
    turns = []
    for rival in sorted(rivals, key=lambda rival: -rival[0]):
        types = rival[1].node["action"], rival[2].node["action"]
        turns.append((taken[types], rival))
        taken[types] += 1
    return [rival for _, rival in sorted(turns, key=lambda turn: turn[0])]


def _siblings(families: Iterable[Mapping[int, Side]]) -> Iterator[tuple[Side, Side]]:
    """Yield each two decisions that are siblings somewhere in the tree, once, the better one first."""
    compared: set[tuple[int, ...]] = set()
    for family in families:
        for two in combinations(sorted(family), 2):
            if two not in compared:
                compared.add(two)
                worse, better = sorted((family[two[1]], family[two[0]]), key=_reward)
                yield better, worse


def _best_and_worst(
    tree: Sequence[Row], states: Iterable[Mapping[int, Side]], *, alpha: float
) -> Iterator[tuple[Side, Side]]:
    """Yield, for each state, the best decision against the worst one of each type of action, what cannot be read
    against the best of all, and searching against answering.
    """
    for family in states:
        ranked = sorted(family.values(), key=_reward, reverse=True)
        by_type: dict[str, list[Side]] = defaultdict(list)
        for side in ranked:
            by_type[side.node["action"]].append(side)
        broken = by_type.pop("malformed", [])
        for sides in by_type.values():
            if len(sides) > 1:
                yield sides[0], sides[-1]
        if broken and len(ranked) > len(broken):
            yield next(side for side in ranked if side.node["action"] != "malformed"), broken[-1]
        if "query" in by_type and "answer" in by_type:
            search, answers = by_type["query"][0], by_type["answer"]
            stop = stopping(tree, [answer.decision for answer in answers], alpha=alpha)
            if _reward(search) > (stop.reward or 0.0):
                yield search, Side(answers[-1].node, stop)
            else:
                yield Side(answers[0].node, stop), search


def _reward(side: Side) -> float:
    return side.decision.reward or 0.0


def _lack(chosen: Side, rejected: Side, rules: PairRules, sureness: float | None) -> str:
    """Return why two sides make no pair, after all rollouts; "" if they do."""
    better, worse = chosen.decision, rejected.decision
    if sureness is not None and sureness < rules.min_confidence:
        return "low confidence"
    if better.estimate - worse.estimate < rules.least:
        return "small margin"
    is_longer = (better.correctness or 0.0) - (worse.correctness or 0.0) < _ROUNDING  # as often right, in more steps
    # By a number in [0, 1) that depends on the preference alone.
    draw = int(_digest(full_prompt(chosen.node), chosen.node["text"])[:12], 16) / 16**12
    return "shorter path" if rules.reward == "spre" and is_longer and draw >= rules.path_share else ""


def _new(seen: set[str], left_out: Counter[str], *preference: object) -> str:
    """Return the digest of a new preference: what both sides share, if anything, then chosen and rejected. Return ""
    if it, or its reverse, was seen before.
    """
    *shared, chosen, rejected = preference
    # Digests, as the texts of all pairs of a run would not fit into memory.
    state = _digest(*shared)
    fingerprint, reverse = _digest(state, chosen, rejected), _digest(state, rejected, chosen)
    if reverse in seen:
        left_out["reversed"] += 1
        return ""
    if fingerprint in seen:
        return ""
    seen.add(fingerprint)
    return fingerprint


def _step_pair(chosen: Side, rejected: Side, reward: PairReward) -> Row:
    node = chosen.node
    pair: Row = {
        "question_id": node["question_id"],
        "dataset": node["dataset"],
        "depth": node["depth"] - 1,
        "margin": chosen.decision.estimate - rejected.decision.estimate,
        "parent_node_id": node["parent_id"],
        "prompt_tokens": node["prompt_tokens"],
    }
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        node, decision = side.node, side.decision
        pair[name] = [{"role": "assistant", "content": node["text"]}]
        columns = {
            "type": node["action"],
            "end": step_end(node),
            "reward": decision.estimate,
            "visits": node["visits"],
            "node_id": node["node_id"],
            "pooled": list(decision.nodes),
            "rollouts": len(decision.ends) + len(decision.fresh),
            "error": standard_error(decision) if reward == "spre" else None,
            "token_ids": node.get("token_ids"),
        }
        pair |= {f"{name}_{column}": value for column, value in columns.items()}
    return pair


def _ranked_trajectories(tree: Sequence[Row]) -> list[list[Row]]:
    """Return the distinct complete trajectories of a tree, best outcome first; ties in a fixed pseudo-random order."""
    distinct: dict[tuple[str, ...], list[Row]] = {}
    for node in tree:
        if outcome_of(node) is not None:
            path = path_from_root(tree, node)
            distinct.setdefault(tuple(step["text"] for step in path), path)
    return sorted(
        distinct.values(), key=lambda path: (-path_outcome(path), _digest(path[-1]["question_id"], path[-1]["node_id"]))
    )


def path_outcome(path: Sequence[Row]) -> float:
    """Return the outcome of the answer that ends a path; 0 without one."""
    return outcome_of(path[-1]) or 0.0


def path_from_root(tree: Sequence[Row], node: Row) -> list[Row]:
    """Return the steps of a tree that lead to a node, itself included; `tree` is its rows by id."""
    path: list[Row] = []
    while node["parent_id"] >= 0:
        path.append(node)
        node = tree[node["parent_id"]]
    return path[::-1]


def open_turn(path: Sequence[Row]) -> list[Row] | None:
    """Return the open turn of the last step of a path from the root, as `tables.span`: the text of the policy, with
    the ids that it sampled, and the texts inserted in between, each of which it read as ids of its own.

    None if no turn was open, or no step in it has ids.
    """
    *before, node = path
    if not (shown := node.get("prefix")):
        return None
    turn: list[Row] = []
    end = 0  # of the spans so far, in the text of the turn
    for step in before:
        own = step.get("prefix") or ""
        if not step["text"] or len(own) < end or not shown.startswith(own + step["text"]):
            continue  # the format does not show the step
        turn += [_span(shown[end : len(own)]), _span(step["text"], step.get("token_ids"))]
        end = len(own) + len(step["text"])
    turn.append(_span(shown[end:]))
    turn = [span for span in turn if span["text"] or span["token_ids"]]
    return turn if any(span["token_ids"] for span in turn) else None


def _span(text: str, token_ids: list[int] | None = None) -> Row:
    return {"text": text, "token_ids": token_ids}


def _trajectory_pair(best: Sequence[Row], worst: Sequence[Row], *, read_ids: bool) -> Row:
    shared = 0
    while best[shared]["text"] == worst[shared]["text"] and best[shared]["prompt"] == worst[shared]["prompt"]:
        shared += 1  # this ends: their answers have different outcomes, so some step differs
    pair: Row = {
        "question_id": best[-1]["question_id"],
        "dataset": best[-1]["dataset"],
        "depth": shared,
        "margin": path_outcome(best) - path_outcome(worst),
    }
    for side, path in (("chosen", best), ("rejected", worst)):
        steps, token_ids, turns = [], [], []
        for number, node in enumerate(path[shared:], shared + 1):
            end = step_end(node)
            if node["text"] or end != "length":  # an empty step that was cut off has nothing to score
                steps.append({name: node[name] for name in ("prompt", "prefix", "text")} | {"end": end})
                token_ids.append(node.get("token_ids"))
                turns.append(open_turn(path[:number]) if read_ids else None)
        pair[f"{side}_steps"] = steps
        pair[f"{side}_token_ids"] = token_ids if any(token_ids) else None
        pair[f"{side}_turns"] = turns if any(turns) else None
        pair |= {f"{side}_reward": path_outcome(path), f"{side}_node_id": path[-1]["node_id"]}
    return pair


def _digest(*parts: object) -> str:
    """Return 64 hex digits that identify JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
