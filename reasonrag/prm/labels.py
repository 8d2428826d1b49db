"""Trees to soft labels: a step's SPRE is what a process reward model should say of it, as surely as it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reasonrag.core.documents import named_path
from reasonrag.core.errors import DataError
from reasonrag.core.policy_card import PolicyCard
from reasonrag.dpo.demonstrations import read_prompt
from reasonrag.dpo.pairs import in_test_split, path_from_root, repeated_questions
from reasonrag.dpo.preferences import CheckedRow, Preferences, StepSides, StepText, Target
from reasonrag.spre import Decision, decisions_of, standard_error, step_end
from reasonrag.storage.parquet import Row, by_question, read_shards, shard_paths
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import tree_schema
from reasonrag.training.settings import PRMSettings

_COLUMNS = (
    *("dataset", "question_id", "node_id", "parent_id", "depth", "action", "content", "visits", "f1"),
    *("prompt", "prefix", "stop", "text", "finish_reason", "token_ids"),
)


def read_labels(data: str, settings: PRMSettings) -> Preferences:
    """Read the labelled steps of a run of build-tree; raise DataError or RunError if it is unfinished or has none."""
    path = named_path(data)
    config, summary = read_run(path)
    alpha = settings.alpha or config.value.alpha
    splits: dict[str, list[CheckedRow]] = {"train": [], "test": []}
    nodes = read_shards(path / "trees", "nodes", tree_schema(), columns=_COLUMNS)
    repeated = repeated_questions(shard_paths(path / "trees", "nodes"))
    for question, tree in by_question(nodes):
        split = "test" if in_test_split(question, settings.test_share, repeated) else "train"
        splits[split] += label_steps(tree, alpha=alpha, read_ids=config.policy.reads_ids)
    if not splits["train"]:
        raise DataError(
            f"{data}: no step that is not held out has an answer below it; build trees of more questions, "
            "with more --iterations, or lower --test-share"
        )
    card = PolicyCard.of(config.model_dump(mode="json"), (summary.get("content") or {}).get("prompts"))
    return Preferences(splits["train"], splits["test"], card, noun="steps")


def label_steps(tree: Sequence[Row], *, alpha: float, read_ids: bool = True) -> Iterator[CheckedRow]:
    """Yield each decision of a tree once, as its earliest node wrote it, with its SPRE and how sure that is.

    A decision below which no trajectory has an answer has no value, never 0, and is left out. Only answers are certain.
    `tree` are rows of `tables.tree_schema` of one question, by id; `alpha` and `read_ids` are as in `derive_pairs`.
    """
    states: dict[tuple[object, str], int] = {}  # the first parent after which a prompt was read
    for node, decision in zip(tree, decisions_of(tree, alpha=alpha), strict=True):
        if decision is None or decision.reward is None or decision.nodes[0] != node["node_id"]:
            continue
        prompt = read_prompt(path_from_root(tree, node), node["stop"], read_ids=read_ids)
        state = states.setdefault((prompt.messages, prompt.prefix), node["parent_id"])
        ids = None if node["token_ids"] is None else tuple(node["token_ids"])
        step = StepText(prompt, node["text"], step_end(node), ids)
        target = Target(decision.reward, certainty(decision), state)
        place, group = f"question {node['question_id']}, node {node['node_id']}", (node["dataset"], node["question_id"])
        sides, kinds = StepSides((step,), ()), (node["action"], "")
        yield CheckedRow(place, sides, None, node["depth"] - 1, group, kinds, target)


def certainty(decision: Decision) -> float:
    """Return how sure the reward of a decision is: the share of the variance before any trajectory that is gone.

    Before, the reward was 0 or the highest that is possible (`spre.confidence`), with variance `ceiling**2 / 8`.

    >>> from dataclasses import replace
    >>> right = Decision(("query", "a"), (1,), 0.81, ends=(0.81,), ceiling=0.81)
    >>> certainty(right), round(certainty(replace(right, ends=(0.81, 0.81))), 2)
    (0.5, 0.72)
    """
    if decision.ceiling is None:
        return 1.0
    return 1.0 - 8 * (standard_error(decision) / decision.ceiling) ** 2
