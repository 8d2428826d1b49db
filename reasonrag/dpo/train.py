"""Training runs on preference pairs, through TRL: DPO, and supervised fine-tuning on the chosen steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import nearest
from reasonrag.dpo.demonstrations import read_demonstrations
from reasonrag.dpo.examples import Examples, longest, open_examples, sft_segments
from reasonrag.dpo.preferences import Preferences, read_preferences
from reasonrag.dpo.token_rows import Pair
from reasonrag.training.model import load_weights
from reasonrag.training.run import TokenRows, TrainingData, TrainingRun
from reasonrag.training.settings import DPOSettings, PairSettings, SFTSettings

P = TypeVar("P", bound=PairSettings)

LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
_SMOOTHED_LOSS_TYPES = ("robust", "exo_pair")
# They depend on which pairs share a forward pass.
_BATCH_LOSS_TYPES = ("aot", "aot_unpaired", "sft")
_IGNORED_LABEL = -100


class PairRun(TrainingRun[P]):
    """A training run on the recorded steps of preference pairs."""

    def open_data(self) -> TrainingData:
        context = self.source.context()
        examples = open_examples(self.settings, self.chat, context=context, log=self.log, read=self.read)
        return TrainingData(examples.checksum, examples.card, examples.facts(), lambda: self.token_rows(examples))

    def read(self, data: str) -> Preferences:
        """Return the rows of the data."""
        return read_preferences(data)

    @abstractmethod
    def token_rows(self, examples: Examples) -> dict[str, TokenRows]: ...


class DPORun(PairRun[DPOSettings]):
    """Direct preference optimisation (arXiv:2505.14069, sec. 2.2.3 and eq. 3)."""

    stage = "dpo"

    def trl_config(self) -> tuple[Any, dict[str, Any]]:
        from trl import DPOConfig

        settings = self.settings
        _check_loss(settings)
        return DPOConfig, {
            "loss_type": [settings.loss_type],
            "precompute_ref_log_probs": settings.reference == "precomputed",
        }

    def token_rows(self, examples: Examples) -> dict[str, TokenRows]:
        return pair_rows(examples, self.settings)

    def build_trainer(self, **common: Any) -> Any:
        from reasonrag.dpo.trainer import StepDPOTrainer

        settings = self.settings
        if settings.reference == "adapter_off" and self.source.is_adapter:
            raise ConfigError(
                f"{settings.model} is an adapter, so the reference is a frozen copy of it, not the model below; "
                "take reference auto, or merge the adapter first"
            )
        frozen = settings.reference == "frozen" or (settings.reference == "auto" and settings.method == "full")
        # Loaded here: TRL would load the model's newest revision, whatever revision the settings name.
        reference = load_weights(self.source, settings) if frozen else None
        return StepDPOTrainer(ref_model=reference, sft_weight=settings.sft_weight, **common)


class SFTRun(PairRun[SFTSettings]):
    """Supervised fine-tuning on steps, each once: all of the best trajectories, or the chosen ones of pairs, the rival
    of DPO in arXiv:2505.14069, Table 3.
    """

    stage = "sft"

    def read(self, data: str) -> Preferences:
        if self.settings.examples == "chosen":
            return read_preferences(data)
        preferences = read_demonstrations(data, self.settings)
        self.log(
            "demonstrations: {trajectories} trajectories, of {questions} of {of_questions} questions, "
            "{mean_f1:.2f} F1 and {mean_steps:.1f} steps on average".format(**preferences.trajectories or {})
        )
        return preferences

    def trl_config(self) -> tuple[Any, dict[str, Any]]:
        from trl import SFTConfig

        return SFTConfig, {}

    def token_rows(self, examples: Examples) -> dict[str, TokenRows]:
        return step_rows(examples)

    def build_trainer(self, **common: Any) -> Any:
        from reasonrag.dpo.trainer import StepSFTTrainer

        return StepSFTTrainer(**common)


def pair_rows(examples: Examples, settings: DPOSettings) -> dict[str, TokenRows]:
    """Return token rows by split, as `dpo.trainer` describes them; weights have mean 1 over the train set.

    `length` lets the trainer put pairs of like length into one forward pass, where that does not change the loss.

    Raises:
        DataError: the settings ask for weights or reward margins, and some pairs have no margin.
    """
    weighted, margined = settings.weight == "margin", settings.reward_margin > 0
    pairs = [*examples.train, *examples.test]
    without_margin = sum(pair.margin is None for pair in pairs)
    if (weighted or margined) and without_margin:
        raise DataError(
            f"{examples.source}: {without_margin} of {len(pairs)} pairs have no margin of rewards, which weight and "
            "reward_margin need; leave those out, or give pairs with a margin column"
        )
    mean = sum(pair.margin or 0.0 for pair in examples.train) / max(len(examples.train), 1)
    if weighted and mean <= 0:
        raise DataError(f"{examples.source}: the margins are {mean:g} on average, so they cannot weigh the pairs")
    as_steps = all(_is_step_pair(pair) for pair in pairs)

    def row(pair: Pair) -> dict[str, Any]:
        columns = _step_columns(pair) if as_steps else _segment_columns(pair)
        if weighted:
            columns["pair_weight"] = (pair.margin or 0.0) / mean
        if margined:
            columns["pair_margin"] = settings.reward_margin * (pair.margin or 0.0)
        if settings.loss_type not in _BATCH_LOSS_TYPES:
            columns["length"] = longest(pair)
        return columns

    return {"train": [row(pair) for pair in examples.train], "test": [row(pair) for pair in examples.test]}


def step_rows(examples: Examples) -> dict[str, TokenRows]:
    """Return `input_ids`, `labels` and `length` by split: only the tokens of the step are scored."""
    rows_by_split: dict[str, TokenRows] = {}
    for split, pairs in (("train", examples.train), ("test", examples.test)):
        rows_by_split[split] = []
        for segment in sft_segments(pairs):
            labels = [_IGNORED_LABEL] * len(segment.prompt_ids) + list(segment.completion_ids)
            ids = [*segment.prompt_ids, *segment.completion_ids]
            rows_by_split[split].append({"input_ids": ids, "labels": labels, "length": len(ids)})
    return rows_by_split


def _is_step_pair(pair: Pair) -> bool:
    return len(pair.chosen) == len(pair.rejected) == 1 and pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids


def _step_columns(pair: Pair) -> dict[str, Any]:
    (chosen,), (rejected,) = pair.chosen, pair.rejected
    return {
        "prompt_ids": list(chosen.prompt_ids),
        "chosen_ids": list(chosen.completion_ids),
        "rejected_ids": list(rejected.completion_ids),
    }


def _segment_columns(pair: Pair) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        columns[f"{side}_prompts"] = [list(segment.prompt_ids) for segment in segments]
        columns[f"{side}_completions"] = [list(segment.completion_ids) for segment in segments]
    return columns


def _check_loss(settings: DPOSettings) -> None:
    loss_type = settings.loss_type
    if loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type {loss_type!r} is unknown{nearest(loss_type, LOSS_TYPES)}")
    label_smoothing = settings.trainer.get("label_smoothing", 0.0)
    if loss_type == "exo_pair" and not label_smoothing:
        raise ConfigError("loss_type exo_pair needs trainer.label_smoothing above 0; its authors take 0.001")
    if label_smoothing and loss_type not in _SMOOTHED_LOSS_TYPES:
        raise ConfigError(
            f"loss_type {loss_type} has no label_smoothing ({label_smoothing}); "
            f"only {' and '.join(_SMOOTHED_LOSS_TYPES)} do"
        )
