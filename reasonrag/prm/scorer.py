"""Values of steps by a process reward model: the one place in which such a model is opened.

The model is a causal language model, so any one can be trained, with adapters or
whole, and its folder is loaded by whatever loads policies. After the last token of a
step it predicts one of two tokens; the value is the probability of the first, given
that it is one of them (Math-Shepherd, arXiv:2312.08935). `prm.json` names the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, DataError, LLMError
from reasonrag.core.event_loop import Worker
from reasonrag.core.plugins import make_plugin
from reasonrag.core.settings import named_path
from reasonrag.core.types import Completion, Prompt
from reasonrag.dpo.preferences import CheckedRow, StepSides, StepText
from reasonrag.dpo.token_rows import encode
from reasonrag.llm.base import StepScorer
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.local import load_model, padded
from reasonrag.llm.model_folder import model_identity
from reasonrag.spre.decisions import step_end
from reasonrag.storage.files import read_json

PRM_FILE = "prm.json"


def open_scorer(spec: str) -> StepScorer:
    """Open the process reward model in a folder, or the scorer that calling `python:PACKAGE.MODULE:NAME` makes.

    Raises:
        ConfigError: the folder holds no such model, or it cannot be loaded.
    """
    if spec.startswith("python:"):
        scorer: StepScorer = make_plugin(spec, ("name", "score", "aclose"))
        return scorer
    return ProcessRewardModel(named_path(spec))


class ProcessRewardModel:
    """A process reward model in this process; `name` is the folder's, with a checksum of its files."""

    def __init__(self, folder: Path) -> None:
        """Load the model, which takes seconds to minutes; raise ConfigError if the folder holds none."""
        if (described := read_json(folder / PRM_FILE)) is None:
            raise ConfigError(
                f"{folder} has no {PRM_FILE}, so it is no process reward model; train one with `reasonrag prm train`"
            )
        self.name = model_identity(str(folder))
        self.chat = ChatTemplate.load(str(folder))
        self.token_ids = answer_ids(self.chat, described["tokens"])
        self.model = load_model(str(folder), ModelConfig())
        self._thread = Worker(self.name)  # one call at a time

    async def score(self, steps: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """Return `[n]` values in [0, 1], as `StepScorer.score` does.

        Raises:
            LLMError: with cause `empty` (a step without tokens),
                `context_overflow`, `engine` or `not_finite`.
        """
        rows = self._rows(steps)
        try:
            values = await self._thread.call(self._values, rows)
        except Exception as error:
            raise LLMError(f"{self.name}: {type(error).__name__}", quoting=error, cause="engine") from error
        if not all(map(math.isfinite, values)):
            raise LLMError(f"{self.name} returned non-finite values ({values}); retrain it", cause="not_finite")
        return values

    async def aclose(self) -> None:
        self.model = None

    def _rows(self, steps: Sequence[tuple[Prompt, Completion]]) -> list[tuple[int, ...]]:
        """Return the token ids of each step after its prompt, as in training."""
        checked = []
        for prompt, done in steps:
            end = step_end({"text": done.text, "stop": prompt.stop, "finish_reason": done.finish_reason})
            step = StepText(prompt, done.text, end, done.token_ids)
            checked.append(CheckedRow("a step", StepSides((step,), ()), None, 0, ("", "")))
        try:
            pairs, _ = encode(checked, self.chat)
        except DataError as error:
            raise LLMError(f"{self.name}: {error}", cause="empty") from error
        rows = [segment.prompt_ids + segment.completion_ids for pair in pairs for segment in pair.chosen]
        context = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        if (longest := max(map(len, rows), default=0)) > context:
            raise LLMError(f"{self.name} reads {context} tokens, not {longest}", cause="context_overflow")
        return rows

    def _values(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        import torch

        if not rows:
            return []
        with torch.inference_mode():
            input_ids, attention_mask = (part.to(self.model.device) for part in padded(rows, side="right"))
            odds = log_odds(self.model, input_ids, attention_mask, self.token_ids)
            values: list[float] = torch.sigmoid(odds).tolist()
        return values


def answer_ids(chat: ChatTemplate, tokens: Sequence[str]) -> tuple[int, int]:
    """Return the ids of two tokens; raise ConfigError if they are not two different ones of the vocabulary."""
    ids = [chat.encode(token) for token in tokens]
    unknown = chat.tokenizer.unk_token_id
    if len(ids) != 2 or ids[0] == ids[1] or any(len(of_one) != 1 or of_one[0] == unknown for of_one in ids):
        raise ConfigError(
            f"{' and '.join(map(repr, tokens))} are not two tokens of the model's vocabulary; name others with "
            "--set tokens=[GOOD,BAD]"
        )
    return ids[0][0], ids[1][0]


def log_odds(model: Any, input_ids: Any, attention_mask: Any, token_ids: tuple[int, int]) -> Any:
    """Return `[R]` log-odds of the first token against the second after the last one of rows, padded on the right."""
    import torch

    # Only the last positions that occur get logits `[R, ends, V]`:
    # a vocabulary is larger than all hidden states.
    ends, place = torch.unique(attention_mask.sum(1) - 1, return_inverse=True)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=ends).logits
    last = logits[torch.arange(len(place), device=place.device), place].float()
    return last[:, token_ids[0]] - last[:, token_ids[1]]
