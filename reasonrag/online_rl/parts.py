"""Settings to what a training is made of: questions, the engine on the trainer's weights, and the reward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.card import PolicyCard
from reasonrag.config import Config
from reasonrag.errors import ConfigError
from reasonrag.formats import FORMATS, Format, PromptSet
from reasonrag.journal import Journal
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.online_rl.settings import RLSettings
from reasonrag.parts import judge_service, open_format, open_questions, open_retriever
from reasonrag.policies import check_llm, open_llm
from reasonrag.questions import KNOWN, questions_fingerprint, sample_questions
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.retrieval.encoders import open_encoder
from reasonrag.rewards import Reward, RewardParts, open_reward
from reasonrag.rewards.judge import JudgeService
from reasonrag.rewards.reference_plans import load_plans
from reasonrag.types import Question


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained on, the same on every process.

    Attributes:
        questions: of training.
        held_out: of validation; empty without one.
        retriever: for both.
        content: names and checksums of all that the settings point at.
        card: how the policy is asked.
    """

    questions: list[Question]
    held_out: list[Question]
    retriever: Retriever
    format: Format
    config: Config
    content_of: dict[str, str]
    card: PolicyCard
    name: str
    places: int = 0  # rows of TRL's sampler

    @property
    def content(self) -> str:
        """16 hex digits of all of it."""
        return hashlib.sha256(json.dumps(self.content_of, sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """For `training.json`."""
        return {
            "source": self.name,
            "checksum": self.content,
            "train": {"questions": len(self.questions)},
            "held_out": {"questions": len(self.held_out)},
            "content": self.content_of,
        }

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Places for TRL's sampler: which questions come is the collector's affair, so that it survives a restart."""
        return {"train": [{"prompt": str(place)} for place in range(self.places)]}


def open_task(settings: RLSettings) -> Task:
    """Questions, corpus and format.

    Raises:
        ConfigError, DataError: something is not there or cannot work; one line says what and what to do.
    """
    config = settings.search()
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a name (hotpotqa, ..., demo) or a file of questions")
    format = open_format(config)
    if not format.append_only:
        raise ConfigError(
            f"format {format.name!r} rewrites its prompt at every step, so one trajectory gives several training rows "
            f"and GRPO takes one; choose an append-only format: {', '.join(_append_only())}"
        )
    if settings.judge.spec is not None:
        check_llm(settings.judge, "judge")
    questions = open_questions(config)
    held_out = _held_out(settings, config, questions)
    retriever = open_retriever(config, [*questions, *held_out])
    content = {
        "questions": questions_fingerprint(questions),
        "corpus": retriever.fingerprint,
        "prompts": format.fingerprint,
    }
    if settings.plans is not None:
        content["plans"] = hashlib.sha256(Path(settings.plans).read_bytes()).hexdigest()[:16]
    card = PolicyCard.of(config.model_dump(mode="json"))
    named = Path(settings.data)
    name = named.resolve().name if named.exists() else settings.data
    batches = -(-settings.max_steps // settings.rollout.minibatches)
    places = batches * settings.rollout.questions_per_step
    return Task(questions, held_out, retriever, format, config, content, card, name, places)


def open_task_reward(settings: RLSettings, task: Task, policy: LLM, journal: Path) -> tuple[Reward, list[Any]]:
    """The reward with its judge, encoder and plans, and what has to be closed at the end.

    Args:
        settings: of the training.
        task: what is trained on.
        policy: answers HiPRAG's queries without a search.
        journal: the file of what the judge was asked; a verdict is never paid for twice.
    """
    judge: JudgeService | None = None
    closing: list[Any] = []
    if settings.judge.spec is not None:
        kept = Journal(journal)
        llm = JournaledLLM(open_llm(settings.judge, "judge"), kept, kind="judge")
        judge = judge_service(llm, settings.judge, PromptSet.find(settings.format.prompts))
        closing += [llm, kept]
    parts = RewardParts(
        task.format,
        judge=judge,
        policy=policy,
        encoder=open_encoder(settings.reward.when_to_search.encoder),
        plans=load_plans(Path(settings.plans)) if settings.plans else {},
    )
    return open_reward(settings.reward, parts), closing


def batched(task: Task) -> BatchedRetriever:
    """The retriever, which gathers the searches of many trajectories."""
    return BatchedRetriever(task.retriever)


async def close(closing: list[Any], task: Task) -> None:
    """Close what is open."""
    for part in closing:
        if isinstance(part, Journal):
            part.close()  # SQLite wants it in the thread that opened it
        else:
            await part.aclose()
    await task.retriever.aclose()


def _held_out(settings: RLSettings, config: Config, training: Sequence[Question]) -> list[Question]:
    """Questions of validation: other ones than those of training. None where nothing says which.

    Raises:
        ConfigError: all of them are trained on.
    """
    wanted = settings.validation
    data = wanted.data or settings.data or ""
    split = wanted.split or ("dev" if data == "demo" or "dev" in KNOWN.get(data, ()) else None)
    if not wanted.steps or (wanted.data is None and split is None):
        return []
    chosen = config.questions.model_copy(update={"dataset": data, "split": split, "limit": None})
    trained_on = {question.question for question in training}
    found = open_questions(config.model_copy(update={"questions": chosen}))
    left = [question for question in found if question.question not in trained_on]
    if not left:
        raise ConfigError(
            "validation has no question that is not trained on; give validation.data or validation.split others, or "
            "set validation.steps to 0"
        )
    return sample_questions(left, wanted.limit, seed=settings.seed)


def _append_only() -> list[str]:
    return [name for name, format in FORMATS.items() if getattr(format, "append_only", False)]
