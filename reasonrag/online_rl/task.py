"""Settings to what a training is made of: questions, the engine on the trainer's weights, and the reward."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config, JudgeConfig
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.plugins import import_plugin
from reasonrag.core.policy_card import PolicyCard
from reasonrag.core.types import Question
from reasonrag.formats import FORMATS, Format, PromptSet
from reasonrag.formats.base import fingerprint
from reasonrag.llm.base import LLM, public_name
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.model_folder import model_identity
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.online_rl.settings import RLSettings
from reasonrag.pipeline.models import check_llm, open_llm
from reasonrag.pipeline.parts import judge_service, open_format, open_questions, open_retriever
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever, MemoryStore
from reasonrag.retrieval.encoders import LexicalEncoder, open_encoder
from reasonrag.rewards import Reward, RewardParts, open_reward
from reasonrag.rewards.judge import JudgeService
from reasonrag.rewards.reference_plans import Plans, load_plans
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import KNOWN, questions_fingerprint, sample_questions

# Of a query's passages each: about a gigabyte of three long ones, and more than the queries of an epoch.
KEPT_RANKINGS = 100_000


@dataclass(frozen=True, slots=True)
class Uses:
    """Which parts a reward asks for; all that are given, of a reward of one's own."""

    judge: bool
    encoder: bool
    plans: bool


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained on, the same on every process.

    Attributes:
        questions: of training.
        held_out: of validation; empty without one.
        retriever: of training.
        held_out_retriever: of validation; the very same unless each searches in what its questions carry.
        content_of: names and checksums of all that the settings point at.
        card: how the policy is asked.
        uses: what the reward is made of.
        plans: Search-P1's.
        places: rows of TRL's sampler.
    """

    questions: list[Question]
    held_out: list[Question]
    retriever: Retriever
    held_out_retriever: Retriever
    format: Format
    config: Config
    content_of: dict[str, str]
    card: PolicyCard
    name: str
    uses: Uses
    plans: Plans
    places: int

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

    def told(self) -> str:
        """One line for people."""
        if self.held_out:
            return f"{len(self.questions)} questions, {len(self.held_out)} held out for validation"
        return (
            f"{len(self.questions)} questions, none held out: nothing is validated, and no best policy is kept "
            "(validation.data and validation.split name some)"
        )

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Places for TRL's sampler: which questions come is the collector's affair, so that it survives a restart."""
        return {"train": [{"prompt": str(place)} for place in range(self.places)]}


def open_task(settings: RLSettings) -> Task:
    """Questions, corpus and format. Nothing heavy is loaded, and what is missing of the reward is noticed.

    Raises:
        ConfigError, DataError: something is not there or cannot work; one line says what and what to do.
    """
    config = settings.search()
    if settings.data is None:
        raise ConfigError("nothing to train on: add --dataset with a name (hotpotqa, ..., demo) or a file of questions")
    format = open_format(config)
    if not format.append_only:
        raise ConfigError(
            f"format {format.name!r} rewrites its prompt at every step, so one trajectory gives several training rows "
            f"and GRPO takes one; choose an append-only format: {', '.join(_append_only())}"
        )
    if settings.judge.spec is not None:
        check_llm(settings.judge, "judge")
    uses = reward_uses(settings, format)
    plans, content = _reward_content(settings, uses)
    questions = open_questions(config)
    held_out = _held_out(settings, config, questions)
    retriever = open_retriever(config, questions)
    content |= {
        "questions": questions_fingerprint(questions),
        "corpus": retriever.fingerprint,
        "prompts": format.fingerprint,
    }
    named = Path(settings.data)
    batches = -(-settings.max_steps // settings.rollout.minibatches)
    return Task(
        questions=questions,
        held_out=held_out,
        retriever=retriever,
        held_out_retriever=_held_out_retriever(settings, config, held_out) or retriever,
        format=format,
        config=config,
        content_of=content,
        card=PolicyCard.of(config.model_dump(mode="json")),
        name=named.resolve().name if named.exists() else settings.data,
        uses=uses,
        plans=plans,
        places=batches * settings.rollout.questions_per_step,
    )


def reward_uses(settings: RLSettings, format: Format) -> Uses:
    """What the reward asks for. It is made once with nobody to ask, so that nothing is loaded for one that cannot work.

    Raises:
        ConfigError: there is no such reward, or it needs a judge or plans and has none, or has plans and needs none.
    """
    wanted, named = settings.reward, settings.judge.spec is not None
    if ":" in wanted.name and isinstance(import_plugin(wanted.name.removeprefix("python:")), type):
        # The class may take long to make, and nothing says what it uses.
        return Uses(judge=named, encoder=True, plans=settings.plans is not None)
    nobody = ScriptedLLM(())
    parts, judged = RewardParts(format, policy=nobody, encoder=LexicalEncoder()), False
    try:
        open_reward(wanted, parts)
    except ConfigError:
        if not named:
            raise
        judged = True
        open_reward(wanted, replace(parts, judge=JudgeService(nobody, PromptSet.find(settings.format.prompts))))
    planned = wanted.name == "search-p1" and wanted.search_p1.reference_track
    if planned and settings.plans is None:
        raise ConfigError(
            "reward search-p1 compares with reference plans, and none are given: make plans with `reasonrag rl plan` "
            "and name the file with --plans, or --set reward.search_p1.reference_track=false"
        )
    if settings.plans is not None and not planned:
        raise ConfigError(
            f"reference plans are given, and reward {wanted.name} makes no use of them (search-p1 does, with its "
            "reference_track); leave --plans out"
        )
    return Uses(judged, wanted.name == "when-to-search" and not wanted.when_to_search.no_r_s, planned)


def judge_name(judge: JudgeConfig) -> str:
    """The `name` that the judge's LLM has once it is opened, without loading it; of a plugin, which it is.

    >>> judge_name(JudgeConfig(spec="http://127.0.0.1:8000/v1", model="org/judge"))
    'org/judge'
    >>> judge_name(JudgeConfig(spec="demo-judge"))
    'demo-judge:0:0'
    """
    spec = judge.spec or ""
    scheme, _, rest = spec.partition(":")
    match scheme.lower():
        case "http" | "https":
            return public_name(judge.model or "")
        case "hf" | "vllm" as engine:
            return f"{engine}:{model_identity(str(Path(rest).expanduser()), judge.revision)}"
        case "demo-judge":
            from reasonrag.demo.judge import DemoJudge

            return DemoJudge.from_spec(rest).name
    return spec if judge.model is None else f"{spec}#{judge.model}"


def _reward_content(settings: RLSettings, uses: Uses) -> tuple[Plans, dict[str, str]]:
    """The plans, and what names all that the reward asks: with another judge its values would be others.

    Raises:
        ConfigError, DataError: the prompt set lacks a text, or the plans cannot be read.
    """
    plans: Plans = {}
    content: dict[str, str] = {}
    if uses.judge:
        prompts = PromptSet.find(settings.format.prompts)
        texts = [JudgeService(ScriptedLLM(()), prompts).fingerprint]
        # HiPRAG's question to the policy; a reward of one's own may ask it too.
        own = ":" in settings.reward.name and (prompts.folder / "hiprag" / "direct.txt").is_file()
        if own or settings.reward.name == "hiprag":
            texts.append(prompts.text("hiprag/direct"))
        content |= {"judge": judge_name(settings.judge), "judge_prompts": fingerprint(*texts)}
    if uses.encoder:
        encoder = settings.reward.when_to_search.encoder
        content["encoder"] = encoder if encoder == "lexical" else model_identity(encoder)
    if uses.plans and settings.plans is not None:
        path = Path(settings.plans)
        try:
            content["plans"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise DataError(
                f"plans {path} cannot be read ({error.strerror}); name the file that `reasonrag rl plan` wrote"
            ) from error
        plans = load_plans(path)
    return plans, content


def open_task_reward(settings: RLSettings, task: Task, policy: LLM, journal: Path) -> tuple[Reward, list[Any]]:
    """The reward with its judge, encoder and plans, and what has to be closed at the end.

    Args:
        settings: of the training.
        task: what is trained on.
        policy: answers HiPRAG's queries without a search.
        journal: the file of what the judge was asked; a verdict is never paid for twice.

    Raises:
        InputError: a part cannot be opened; what was open by then is closed.
    """
    uses = task.uses
    closing: list[Any] = []
    parts = RewardParts(task.format, policy=policy, plans=task.plans)
    if uses.encoder:
        parts = replace(parts, encoder=open_encoder(settings.reward.when_to_search.encoder))
    try:
        if uses.judge:
            kept = Journal(journal)
            closing.append(kept)
            llm = JournaledLLM(open_llm(settings.judge, "judge"), kept, kind="judge")
            closing.insert(0, llm)
            judge = judge_service(llm, settings.judge, PromptSet.find(settings.format.prompts))
            parts = replace(parts, judge=judge)
        return open_reward(settings.reward, parts), closing
    except BaseException:
        asyncio.run(_close(closing))
        raise


def batched(task: Task) -> BatchedRetriever:
    """The retriever of training, which gathers the searches of many trajectories."""
    return BatchedRetriever(task.retriever, store=MemoryStore(KEPT_RANKINGS))


def batched_held_out(task: Task, training: Retriever) -> Retriever:
    """That of validation: `training`, with what it keeps, where both search in the same."""
    if task.held_out_retriever is task.retriever:
        return training
    return BatchedRetriever(task.held_out_retriever, store=MemoryStore(KEPT_RANKINGS))


async def close(closing: list[Any], task: Task) -> None:
    """Close what is open."""
    await _close(closing)
    await task.retriever.aclose()
    if task.held_out_retriever is not task.retriever:
        await task.held_out_retriever.aclose()


async def _close(closing: list[Any]) -> None:
    for part in closing:
        if isinstance(part, Journal):
            part.close()  # SQLite wants it in the thread that opened it
        else:
            await part.aclose()


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


def _held_out_retriever(settings: RLSettings, config: Config, held_out: list[Question]) -> Retriever | None:
    """Validation's own, where searches go to what the questions carry; None where it is that of training.

    Held-out paragraphs in the corpus of training would make it depend on what is validated, and be found there.

    Raises:
        ConfigError, DataError: the questions carry nothing, or it cannot be opened.
    """
    wanted, data = config.retrieval, settings.validation.data or settings.data
    of_its_own = wanted.corpus is not None or wanted.index is not None
    remote = wanted.kind == "remote" or (wanted.kind is None and bool(wanted.url))
    one_world = wanted.kind in (None, "bm25") and data == settings.data == "demo"
    if not held_out or of_its_own or remote or one_world:
        return None
    chosen = config.questions.model_copy(update={"dataset": data})
    try:
        return open_retriever(config.model_copy(update={"questions": chosen}), held_out)
    except DataError as error:
        raise DataError(f"validation: {error}") from error


def _append_only() -> list[str]:
    return [name for name, format in FORMATS.items() if getattr(format, "append_only", False)]
