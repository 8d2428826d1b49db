"""Training on preference pairs, through TRL: DPO, and supervised fine-tuning on the chosen steps.

`train_dpo` reads from top to bottom: preferences -> pairs of token rows -> trainer -> train -> evaluate -> save.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reasonrag.core.config import PolicyCard
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import nearest
from reasonrag.dpo.preferences import CheckedRow, PairRules, Preferences, read_preferences
from reasonrag.dpo.token_rows import Encoded, Pair, encode, fit
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.model import load_weights
from reasonrag.training.run import Log, TokenRows, TrainingData, TrainingRun
from reasonrag.training.settings import DPOSettings, PairSettings, SFTSettings

LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
# They depend on which pairs share a forward pass.
_BATCH_LOSS_TYPES = ("aot", "aot_unpaired", "sft")
_IGNORED_LABEL = -100


def train_dpo(settings: DPOSettings, out: Path | None, *, log: Log = print) -> TrainingRun[DPOSettings]:
    """Train a policy on preferences between steps (arXiv:2505.14069, sec. 2.2.3 and eq. 3), or resume in `out`.

    The loss is -log sigmoid(beta * (log-ratio of the chosen step - log-ratio of the rejected step)), over the tokens
    of the steps alone; a log-ratio is log p(step | prompt) of the policy less that of the reference model.
    """
    from trl import DPOConfig

    check_loss(settings)
    run = TrainingRun("dpo", settings, out, log=log)
    run.prepare(
        DPOConfig,
        loss_type=[settings.loss_type],
        precompute_ref_log_probs=settings.reference == "precomputed",
    )
    if settings.reference == "adapter_off" and run.source.is_adapter:
        raise ConfigError(
            f"{settings.model} is an adapter, so the reference is a frozen copy of it, not the model below; "
            "take reference auto, or merge the adapter first"
        )

    def read() -> TrainingData:
        preferences = read_preferences(data_of(settings))
        pairs = tokenise(preferences, settings, run.chat, context=run.source.context(), log=run.log)
        return TrainingData(pairs.checksum, pairs.card, pairs.facts, partial(pair_rows, pairs, settings))

    with run:
        rows = run.open(read)
        if rows is None:  # the folder holds the finished run
            return run

        # With adapters the reference is the model below them; otherwise it is a frozen copy. It is loaded here, as TRL
        # would load the model's newest revision, whatever revision the settings name.
        frozen = settings.reference == "frozen" or (settings.reference == "auto" and settings.method == "full")
        reference = load_weights(run.source, settings) if frozen else None

        from reasonrag.dpo.trainer import StepDPOTrainer

        trainer = run.build_trainer(StepDPOTrainer, *rows, ref_model=reference, sft_weight=settings.sft_weight)
        run.train(trainer)
        run.evaluate(trainer)
        run.save(trainer)
    return run


def train_sft(settings: SFTSettings, out: Path | None, *, log: Log = print) -> TrainingRun[SFTSettings]:
    """Fine-tune on steps, each once: all of the best trajectories, or the chosen steps of pairs.

    The second is DPO's rival in arXiv:2505.14069, Table 3.
    """
    from trl import SFTConfig

    from reasonrag.dpo.demonstrations import read_demonstrations

    run = TrainingRun("sft", settings, out, log=log)
    run.prepare(SFTConfig)

    def read() -> TrainingData:
        data = data_of(settings)
        if settings.examples == "chosen":
            preferences = read_preferences(data)
        else:
            preferences = read_demonstrations(data, settings)
            run.log(
                "demonstrations: {trajectories} trajectories, of {questions} of {of_questions} questions, "
                "{mean_f1:.2f} F1 and {mean_steps:.1f} steps on average".format(**preferences.trajectories or {})
            )
        pairs = tokenise(preferences, settings, run.chat, context=run.source.context(), log=run.log)
        return TrainingData(pairs.checksum, pairs.card, pairs.facts, partial(step_rows, pairs))

    with run:
        rows = run.open(read)
        if rows is None:
            return run
        from reasonrag.dpo.trainer import StepSFTTrainer

        trainer = run.build_trainer(StepSFTTrainer, *rows)
        run.train(trainer)
        run.evaluate(trainer)
        run.save(trainer)
    return run


def data_of(settings: PairSettings) -> str:
    """Return the data of the settings; raise ConfigError if none is named."""
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a run's folder, a Parquet or JSONL file, or a Hub id")
    return settings.data


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs as token ids, without pairs that are too long, and their source."""

    train: list[Pair]
    test: list[Pair]  # of held-out questions; empty if the source holds none out
    source: str  # the data, as it was named
    checksum: str  # changes with any row of the source, whether it is in a sample or not
    card: PolicyCard | None  # how the policy was prompted, if the data comes from a known run
    encoded: Encoded  # how many steps are scored with the ids that were sampled
    facts: dict[str, Any]  # counts and lengths, for `training.json`


def tokenise(
    preferences: Preferences, settings: PairSettings, chat: ChatTemplate, *, context: int | None, log: Log
) -> TokenPairs:
    """Check and tokenise preferences; leave out, whole, pairs that are too long.

    A split by question in the source is kept, and none is made up: without one every pair is for training.
    `settings.limit` samples so many questions of each split by `settings.seed`. `context` is that of the policy in
    tokens, if it is known. `log` receives counts and lengths before a refusal.

    Raises:
        DataError: a question is in both splits, or too many pairs are too long.
    """
    source, noun = data_of(settings), preferences.noun
    rules = PairRules()
    for split, rows in (("train", preferences.train), ("test", preferences.test)):
        for row in rows:
            rules.add_pair(split, row)
    rules.check_questions(source)
    train = _sample(preferences.train, settings)
    test = _sample(preferences.test, settings)
    log(f"{len(train)} {noun} to train on, {len(test)} held out")
    kinds = {"train": _kinds(train), "test": _kinds(test)}
    if balance := ", ".join(f"{count} {kind}" for kind, count in kinds["train"].items()):
        log(f"kinds of steps to learn: {balance}")
    if str(rules):
        log(f"warning: {rules}; all are trained on")
    pairs, encoded = encode([*train, *test], chat)
    if str(encoded):
        log(str(encoded))
    splits = {"train": pairs[: len(train)], "test": pairs[len(train) :]}
    kept, lengths = fit(
        splits,
        settings,
        context=context,
        log=log,
        shifted=encoded.shifted,
        shared_prompts=len(rules.shared_texts),
        noun=noun,
    )
    path, checksum = Path(source), preferences.checksum()
    facts = {
        "source": path.resolve().name if path.exists() else source,  # no path of this machine
        "checksum": checksum,
        "train": {noun: len(kept["train"]), "questions": len({pair.group for pair in kept["train"]})},
        "held_out": {noun: len(kept["test"]), "questions": len({pair.group for pair in kept["test"]})},
        "kinds": kinds,
        "trajectories": preferences.trajectories,
        "contradictory": rules.summary(),
        "token_ids": encoded.summary(),
        "lengths": lengths,
    }
    return TokenPairs(kept["train"], kept["test"], source, checksum, preferences.card, encoded, facts)


def _kinds(rows: Sequence[CheckedRow]) -> dict[str, int]:
    return dict(Counter(row.types[0] for row in rows if row.types[0]).most_common())


def _sample(rows: list[CheckedRow], settings: PairSettings) -> list[CheckedRow]:
    """Return the rows of a random sample of at most `limit` questions, in their order."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if settings.limit is None or settings.limit >= len(groups):
        return rows
    sampled = set(random.Random(settings.seed).sample(groups, settings.limit))
    return [row for row in rows if row.group in sampled]


def pair_rows(pairs: TokenPairs, settings: DPOSettings) -> dict[str, TokenRows]:
    """Return token rows by split, as `dpo.trainer` describes them; weights have mean 1 over the train set.

    `length` lets the trainer put pairs of like length into one forward pass, unless that changes the loss.

    Raises:
        DataError: the settings ask for weights or reward margins, and some pairs have no margin.
    """
    both = [*pairs.train, *pairs.test]
    weighted, margined = settings.weight == "margin", settings.reward_margin > 0
    without_margin = sum(pair.margin is None for pair in both)
    if (weighted or margined) and without_margin:
        raise DataError(
            f"{pairs.source}: {without_margin} of {len(both)} pairs have no margin of rewards, which weight and "
            "reward_margin need; leave those out, or give pairs with a margin column"
        )
    mean = sum(pair.margin or 0.0 for pair in pairs.train) / max(len(pairs.train), 1)
    if weighted and mean <= 0:
        raise DataError(f"{pairs.source}: the margins are {mean:g} on average, so they cannot weigh the pairs")
    # A pair of single steps after one prompt has TRL's own columns.
    as_steps = all(
        len(pair.chosen) == len(pair.rejected) == 1 and pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids
        for pair in both
    )
    rows_by_split: dict[str, TokenRows] = {}
    for split, members in (("train", pairs.train), ("test", pairs.test)):
        rows_by_split[split] = []
        for pair in members:
            row: dict[str, Any] = {}
            if as_steps:
                row["prompt_ids"] = list(pair.chosen[0].prompt_ids)
            for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                if as_steps:
                    row[f"{side}_ids"] = list(segments[0].completion_ids)
                else:
                    row[f"{side}_prompts"] = [list(segment.prompt_ids) for segment in segments]
                    row[f"{side}_completions"] = [list(segment.completion_ids) for segment in segments]
            if weighted:
                row["pair_weight"] = (pair.margin or 0.0) / mean
            if margined:
                row["pair_margin"] = settings.reward_margin * (pair.margin or 0.0)
            if settings.loss_type not in _BATCH_LOSS_TYPES:
                row["length"] = pair.tokens
            rows_by_split[split].append(row)
    return rows_by_split


def step_rows(pairs: TokenPairs) -> dict[str, TokenRows]:
    """Return `input_ids`, `labels` and `length` by split: every chosen step once, with its tokens alone scored."""
    rows_by_split: dict[str, TokenRows] = {}
    for split, members in (("train", pairs.train), ("test", pairs.test)):
        rows_by_split[split] = []
        for segment in dict.fromkeys(segment for pair in members for segment in pair.chosen):
            labels = [_IGNORED_LABEL] * len(segment.prompt_ids) + list(segment.completion_ids)
            ids = [*segment.prompt_ids, *segment.completion_ids]
            rows_by_split[split].append({"input_ids": ids, "labels": labels, "length": len(ids)})
    return rows_by_split


def check_loss(settings: DPOSettings) -> None:
    """Raise ConfigError if TRL has no such loss: TRL itself does so at the first step."""
    loss_type = settings.loss_type
    if loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type {loss_type!r} is unknown{nearest(loss_type, LOSS_TYPES)}")
