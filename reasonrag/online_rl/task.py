"""Build the parts of an online training run from its settings: questions, retriever, format and reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from reasonrag.core import event_loop
from reasonrag.core.config import Config, JudgeConfig, ModelConfig, PolicyCard
from reasonrag.core.errors import ConfigError
from reasonrag.core.plugins import import_plugin
from reasonrag.core.settings import Tree, named_path
from reasonrag.core.types import Question
from reasonrag.formats import Format, PromptSet, open_format
from reasonrag.formats.base import fingerprint
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.model_folder import model_identity, public_name
from reasonrag.online_rl.reference_plans import Plans, load_plans
from reasonrag.online_rl.settings import RLSettings
from reasonrag.pipeline.parts import (
    as_served,
    check_llm,
    judge_service,
    open_llm,
    open_questions,
    open_retriever,
    served_by,
)
from reasonrag.retrieval.base import BatchedRetriever, MemoryStore, Retriever
from reasonrag.retrieval.encoders import open_encoder
from reasonrag.rewards import Reward, RewardParts, open_reward, reward_needs
from reasonrag.rewards.answers import check_outcome, open_outcome
from reasonrag.rewards.base import MISSING
from reasonrag.rewards.judge import templates_fingerprint
from reasonrag.storage.files import short_hash, size_and_digest
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import KNOWN, named_sets, questions_fingerprint, sample_questions
from reasonrag.training.run import TrainingData

# Each entry is one query's passages; 100,000 entries of three
# long passages take about 1 GB, and cover more than an epoch.
KEPT_RANKINGS = 100_000


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained on, the same on every process."""

    questions: list[Question]
    held_out: list[Question]  # empty without validation
    retriever: Retriever
    held_out_retriever: Retriever  # the same object, unless each searches its questions' passages
    format: Format
    config: Config
    content_of: dict[str, str]  # names and checksums of everything that the settings refer to
    data: TrainingData  # which the training run records
    needs: frozenset[str]  # the parts that the reward needs
    plans: Plans  # Search-P1's reference plans

    async def aclose(self) -> None:
        """Close the retrievers."""
        await self.retriever.aclose()
        if self.held_out_retriever is not self.retriever:
            await self.held_out_retriever.aclose()


def open_task(settings: RLSettings) -> Task:
    """Open questions, corpus and format, and check that the reward has what it needs. No model is loaded.

    Raises:
        ConfigError, DataError: something is missing or cannot
            work; the error, one line, names it and the remedy.
    """
    config = settings.as_config()
    if settings.data is None:
        raise ConfigError("no questions: add --dataset with a name (hotpotqa, ..., demo) or a file of questions")
    format = open_format(config)
    if settings.credit == "step" and format.append_only:
        raise ConfigError(
            f"credit step values each step, but in format {format.name!r} a trajectory is one training row with one "
            "advantage; leave --credit out, or use a format that asks with a fresh prompt at each step (reasonrag)"
        )
    if settings.judge.spec is not None:
        check_llm(settings.judge.llm, "judge")
    needs = needs_of(settings, format)
    plans = load_plans(named_path(settings.plans)) if settings.plans is not None else {}
    content = _reward_content(settings, needs)
    if "judge" in needs:
        config = as_served(config, asked=["judge"])
        content |= _judge_content(config.judge)
    questions = open_questions(config)
    if plans and not any((question.dataset, question.id) in plans for question in questions):
        raise ConfigError(f"no question of {settings.data}, by data set and id, has a plan in {settings.plans}")
    held_out = _held_out(settings, config, questions)
    retriever = open_retriever(config, questions)
    content |= {"questions": questions_fingerprint(questions), "corpus": retriever.fingerprint}
    if held_out:  # the best checkpoint is chosen by them
        content["held_out"] = questions_fingerprint(held_out)
    content["prompts"] = format.fingerprint
    named, checksum = named_path(settings.data), short_hash(content)
    facts = {
        "source": named.resolve().name if named.exists() else settings.data,
        "checksum": checksum,
        "train": {"questions": len(questions)},
        "held_out": {"questions": len(held_out)},
        "content": content,
    }
    card = PolicyCard.of(config.model_dump(mode="json"), format.fingerprint)
    # TRL's sampler draws a row for each question. They
    # are numbers: the collector chooses the questions.
    drawn = settings.max_steps * settings.rollout.questions_per_step
    return Task(
        questions=questions,
        held_out=held_out,
        retriever=retriever,
        held_out_retriever=_held_out_retriever(settings, config, held_out) or retriever,
        format=format,
        config=config,
        content_of=content,
        data=TrainingData(checksum, card, facts, lambda: {"train": [{"prompt": str(row)} for row in range(drawn)]}),
        needs=needs,
        plans=plans,
    )


def needs_of(settings: RLSettings, format: Format) -> frozenset[str]:
    """Return the names of the parts that the reward needs (`RewardParts`).

    Raises:
        ConfigError: the reward is unknown, or a judge, plans or a PRM are missing, or given and not used.
    """
    name = settings.reward.name
    sources = {"judge": settings.judge.spec, "plans": settings.plans, "scorer": settings.reward.prm.model}
    given = {part for part, source in sources.items() if source is not None}
    needs = reward_needs(settings.reward, format)
    if needs is None:  # a user's class that declares nothing: whatever there is
        needs = frozenset(given | {"encoder"})
    check_outcome(settings.outcome)
    if settings.outcome.name == "judge":
        needs |= {"judge"}
    for part in sorted({"judge", "plans", "scorer"} & needs - given):
        raise ConfigError(f"reward {name} needs {MISSING[part]}")
    if settings.outcome.name and ":" in name and not isinstance(import_plugin(name), type):
        raise ConfigError(f"reward {name} is a function, which gets no outcome; leave --outcome out, or write a class")
    for part, flag in (("plans", "--plans"), ("scorer", "--prm")):
        if part in given - needs:
            raise ConfigError(f"reward {name} does not use {flag}; leave it out, or take another reward")
    return needs


def judge_name(judge: JudgeConfig) -> str:
    """Return a name for the judge that changes with its verdicts: its model without the address of a server.

    >>> judge_name(JudgeConfig(spec="http://127.0.0.1:8000/v1", model="org/judge"))
    'org/judge'
    >>> judge_name(JudgeConfig(spec="demo-judge"))
    'demo-judge'
    """
    address = judge.llm.address
    # A server may move: its address is not part of what the verdicts depend on.
    if address.is_server:
        return public_name(judge.model or "")
    if address.loads_weights:
        return f"{address.scheme}:{model_identity(address.model)}"
    return f"{judge.spec}" if judge.model is None else f"{judge.spec}#{judge.model}"


def _reward_content(settings: RLSettings, needs: frozenset[str]) -> dict[str, str]:
    """Return what identifies the judge's prompts, encoder, PRM and plans, on which the reward's values depend.

    Raises:
        ConfigError: the prompt set lacks a text.
    """
    reward, content = settings.reward, {}
    if "judge" in needs:
        prompts = PromptSet.find(settings.format.prompts)
        texts = [templates_fingerprint(prompts)]
        if reward.name == "hiprag":  # its question to the policy
            texts.append(prompts.text("hiprag/direct"))
        content["judge_prompts"] = fingerprint(*texts)
    if "encoder" in needs:
        encoder = reward.when_to_search.encoder
        content["encoder"] = encoder if encoder == "lexical" else model_identity(encoder)
    if reward.prm.model is not None:
        spec = reward.prm.model
        content["prm"] = spec if spec.startswith("python:") else model_identity(str(named_path(spec)))
    if (known_by := reward.hiprag.known_by) and known_by.startswith("hf:"):
        content["known_by"] = model_identity(str(named_path(known_by.removeprefix("hf:"))))
    if settings.plans is not None:
        content["plans"] = size_and_digest(named_path(settings.plans))[1][:16]
    return content


def _judge_content(judge: JudgeConfig) -> dict[str, str]:
    """Return what identifies the judge: its name and, if it is on a server that says where they are, its weights.

    Raises:
        LLMError, ConfigError: the server does not answer, or will not work.
    """

    async def ask() -> dict[str, Tree]:
        async with aclosing(open_llm(judge.llm, "judge")) as llm:
            return await served_by({"judge_weights": llm})

    served = event_loop.run(ask()) if judge.llm.address.is_server else {}
    return {"judge": judge_name(judge), **{name: behind["model"] for name, behind in served.items()}}


def open_task_reward(
    settings: RLSettings,
    task: Task,
    policy: LLM,
    journal: Path,
    opened: AsyncExitStack,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Reward:
    """Return the reward with its judge, encoder and plans; `opened` closes them.

    The `policy` answers HiPRAG's queries without a search, unless another model
    does; `decode` is its tokenizer's, if it reports log-probs. The `journal`
    keeps the judge's paid calls, so that a restart does not pay for them again.
    """
    reward, needs = settings.reward, task.needs
    if reward.hiprag.known_by and "policy" in needs:
        spec, _, model = reward.hiprag.known_by.partition("#")
        policy = open_llm(ModelConfig(spec=spec, model=model or None), "policy")
        opened.push_async_callback(policy.aclose)
    parts = RewardParts(task.format, policy=policy, plans=task.plans, decode=decode)
    if "encoder" in needs:
        parts = replace(parts, encoder=open_encoder(reward.when_to_search.encoder))
    if "scorer" in needs and reward.prm.model is not None:
        from reasonrag.prm.scorer import open_scorer

        scorer = open_scorer(reward.prm.model)
        opened.push_async_callback(scorer.aclose)
        parts = replace(parts, scorer=scorer)
    if "judge" in needs:
        calls = Journal(journal)
        opened.callback(calls.close)
        llm = JournaledLLM(open_llm(task.config.judge.llm, "judge"), calls, kind="judge")
        opened.push_async_callback(llm.aclose)
        parts = replace(parts, judge=judge_service(llm, task.config.judge, PromptSet.find(settings.format.prompts)))
    if settings.outcome.name:
        parts = replace(parts, outcome=open_outcome(settings.outcome, parts.judge))
    return open_reward(reward, parts)


def batched_retrievers(task: Task) -> tuple[Retriever, Retriever]:
    """Return retrievers of training and validation that batch searches: one, if both search the same passages."""
    training = BatchedRetriever(task.retriever, store=MemoryStore(KEPT_RANKINGS))
    if task.held_out_retriever is task.retriever:
        return training, training
    return training, BatchedRetriever(task.held_out_retriever, store=MemoryStore(KEPT_RANKINGS))


def _held_out(settings: RLSettings, config: Config, training: Sequence[Question]) -> list[Question]:
    """Return validation questions that are not trained on; none if no setting names any.

    Raises:
        ConfigError: all of them are trained on.
    """
    validation = settings.validation
    # A split that --dataset names is that of training.
    data = validation.data or ",".join(name for name, _ in named_sets(settings.data or ""))
    has_dev = all(name == "demo" or "dev" in KNOWN.get(name, ()) for name, _ in named_sets(data))
    if not validation.steps or (validation.data is None and not has_dev):
        return []
    candidates = open_questions(_of_questions(config, dataset=data, split="dev" if has_dev else None, limit=None))
    # By text: the same question may have another id in another data set.
    trained_on = {question.question for question in training}
    held_out = [question for question in candidates if question.question not in trained_on]
    if not held_out:
        raise ConfigError(
            "validation has no question that is not trained on; give others as validation.data, or set "
            "validation.steps to 0"
        )
    return sample_questions(held_out, validation.limit, seed=settings.seed)


def _of_questions(config: Config, **changes: str | None) -> Config:
    return config.model_copy(update={"questions": config.questions.model_copy(update=changes)})


def _held_out_retriever(settings: RLSettings, config: Config, held_out: list[Question]) -> Retriever | None:
    """Return a retriever for validation if searches use the questions' own passages; None if training's is used.

    Held-out passages in the training corpus would change its searches and be found during training.
    """
    retrieval, data = config.retrieval, settings.validation.data or settings.data
    has_corpus = retrieval.corpus is not None or retrieval.index is not None or retrieval.is_remote
    is_demo = retrieval.kind in (None, "bm25") and data == settings.data == "demo"
    if not held_out or has_corpus or is_demo:
        return None
    return open_retriever(_of_questions(config, dataset=data), held_out)
