"""Demonstrations: the best whole trajectories of a run's trees, step by step.

Pairs teach which of two steps is better, and hold only states in which siblings differ. A model that has
never written a step needs every stage of good attempts, the answer at the last step included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from reasonrag.core.config import PolicyCard
from reasonrag.core.errors import DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import cover_match, normalize_answer
from reasonrag.core.types import Answer, Completion, Message, Note, Passage, Prompt, Question, Search, Span, Step
from reasonrag.dpo.pairs import open_turn, path_from_root, path_outcome, split_trees
from reasonrag.dpo.preferences import CheckedRow, Preferences, StepSides, StepText, as_ids
from reasonrag.formats import Format, open_format
from reasonrag.spre.decisions import content_of, step_end
from reasonrag.spre.estimate import outcome_of
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row
from reasonrag.training.settings import SFTSettings

FORCED = "forced answer"
_NODE_COLUMNS = (
    *("dataset", "question_id", "question", "node_id", "parent_id", "depth", "action", "content", "stop_reason"),
    *("prompt", "prefix", "stop", "text", "finish_reason", "token_ids", "passages", "f1", "grade"),
)
_OPEN_TAG = re.compile(r"<\w+>$")
_ACTIONS: dict[str, type[Search | Note | Answer]] = {"query": Search, "evidence": Note, "answer": Answer}


def read_demonstrations(data: str, settings: SFTSettings) -> Preferences:
    """Read the best trajectories of each question: best outcome, supporting notes, fewest steps; equal ones once.

    A step is one row, once per question, after the prompt that the policy saw. The
    answer is also one after the prompt of the last step, which demands it; or, if it
    was demanded, after the prompt that leaves the choice. A step that completes a turn
    of its format ends with the end-of-turn token, unless its sampled ids are known.

    Args:
        data: folder of a run of build-tree.
        settings: `per_question`, `min_reward` and `test_share` are used.

    Raises:
        DataError, RunError: the folder is missing, its tables
            are damaged, or no trajectory is good enough.
    """
    run = named_path(data)
    config, summary = read_run(run)
    format = open_format(config)
    splits: dict[str, list[CheckedRow]] = {"train": [], "test": []}
    # By question, the steps of each attempt from below the root to the answer.
    learned: list[list[list[Row]]] = []
    for split, key, tree in split_trees(run, _NODE_COLUMNS, settings.test_share):
        # A step that cannot be parsed is never learned. Of equal attempts the first counts.
        distinct: dict[tuple[object, ...], list[Row]] = {}
        for node in tree:
            steps = path_from_root(tree, node)
            is_good = outcome_of(node) is not None and path_outcome([node]) >= settings.min_reward
            if is_good and all(step["action"] in _ACTIONS for step in steps):
                distinct.setdefault(tuple(map(content_of, steps)), steps)
        # The paper's preference for short paths comes last: the shortest of all guesses instead of searching.
        ranked = sorted(
            distinct.values(), key=lambda steps: (-path_outcome(steps), not _is_supported(steps), len(steps))
        )
        learned.append(ranked[: settings.per_question])
        rows: dict[tuple[object, ...], CheckedRow] = {}  # every step once
        for attempt in learned[-1]:
            for depth, (kind, step) in enumerate(_steps(attempt, format, config.policy.reads_ids)):
                row = CheckedRow(f"question {key[1]}, {kind}", StepSides((step,), ()), None, depth, key, (kind, ""))
                rows.setdefault((step.prompt.messages, step.prompt.prefix, step.text), row)
        splits[split] += rows.values()
    if not splits["train"]:
        raise DataError(
            f"{data}: none of {len(learned)} questions has a complete trajectory with an outcome of --min-reward "
            f"({settings.min_reward:g}) that is not held out; lower it, build trees of more questions, or lower "
            "--test-share"
        )
    attempts = [attempt for of_question in learned for attempt in of_question]
    facts = {
        "trajectories": len(attempts),
        "questions": sum(map(bool, learned)),
        "of_questions": len(learned),
        "mean_outcome": fmean(map(path_outcome, attempts)),
        "mean_steps": fmean(map(len, attempts)),
    }
    fingerprint = (summary.get("content") or {}).get("prompts") or format.fingerprint
    card = PolicyCard.of(config.model_dump(mode="json"), fingerprint)
    return Preferences(splits["train"], splits["test"], card, noun="steps", trajectories=facts)


def _is_supported(steps: Sequence[Row]) -> bool:
    """Return whether the notes hold the answer; no note holds yes or no, which two notes support."""
    notes = [step["content"] for step in steps if step["action"] == "evidence"]
    answer = steps[-1]["content"]
    if normalize_answer(answer) in ("yes", "no"):
        return len({*map(normalize_answer, notes)} - {"none"}) > 1
    return any(cover_match(note, [answer]) for note in notes)


def _steps(attempt: Sequence[Row], format: Format, read_ids: bool) -> Iterator[tuple[str, StepText]]:
    """Yield kind and text of every step, then the answer again: as one that is demanded, or as a choice if it was."""
    steps: tuple[Step, ...] = ()
    last = attempt[-1]
    is_forced = last["stop_reason"] == "forced_answer"
    for number, row in enumerate(attempt, 1):
        written = read_step(attempt[:number], read_ids=read_ids)
        # A search in a growing turn is followed by its passages; any other step ends the policy's turn.
        ends_turn = row["action"] == "answer" or not format.append_only
        if written.end == "stop" and written.token_ids is None and ends_turn:
            written = replace(written, end="turn")
        yield FORCED if is_forced and row is last else row["action"], written
        passages = tuple(Passage(**passage) for passage in row["passages"] or ())
        completion = Completion(row["text"], token_ids=written.token_ids if read_ids else None)
        steps = (*steps, Step(written.prompt, completion, _ACTIONS[row["action"]](row["content"]), passages))
    question = Question(last["question_id"], last["question"], (), last["dataset"])
    if (text := answer_asked(question, steps, format, final=not is_forced)) is not None:
        yield "answer" if is_forced else FORCED, text


def read_step(path: Sequence[Row], *, read_ids: bool) -> StepText:
    """Return the last step of a path from the root, of rows with the columns of a node.

    `read_ids`: it read the ids that it had sampled, not text that was encoded again.
    """
    row = path[-1]
    whole = [{"text": row["prefix"], "token_ids": None}] if row["prefix"] else []
    turn = (open_turn(path) if read_ids else None) or whole
    messages = tuple(Message(message["role"], message["content"]) for message in row["prompt"])
    spans = tuple(Span(span["text"], as_ids(span["token_ids"])) for span in turn)
    prompt = Prompt(messages, spans, tuple(row["stop"]))
    return StepText(prompt, row["text"], step_end(row), as_ids(row["token_ids"]))


def answer_asked(question: Question, steps: tuple[Step, ...], format: Format, *, final: bool) -> StepText | None:
    """Return a trajectory's answer as a step after the prompt that demands it (`final`), or that leaves the choice.

    The steps have it after the other of the two. None if
    the format cannot read it there, or has changed since.
    """
    before, last = steps[:-1], steps[-1]
    prompt, other = (format.prompt(question, before, final=demanded) for demanded in (final, not final))
    if (other.messages, other.prefix) != (last.prompt.messages, last.prompt.prefix):
        return None
    text = last.completion.text
    if other.prefix != prompt.prefix:  # the last prompt opens the answer's tag, after the thought of a free answer
        opened = _OPEN_TAG.search(prompt.prefix)
        if not final or opened is None:
            return None
        text = text.rpartition(opened[0])[2]
    read = format.parse(text, before, final=final)
    same = isinstance(read, Answer) and isinstance(last.action, Answer) and read.answer == last.action.answer
    ids = last.completion.token_ids if text == last.completion.text else None
    fits = same and text.endswith(prompt.stop or "")
    return StepText(prompt, text, "turn" if ids is None else "stop", ids) if fits else None
