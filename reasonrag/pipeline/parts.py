"""Open the parts that a configuration names: questions, retriever, format, policy and judge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from reasonrag.core.config import Config, JudgeConfig, ModelConfig, QuestionsConfig
from reasonrag.core.errors import BackendError, ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.plugins import make_plugin
from reasonrag.core.settings import named_path
from reasonrag.core.types import Passage, Question
from reasonrag.formats import Format, PromptSet, check_prompts, open_format, open_recorded
from reasonrag.llm.base import LLM, Sampling, StepScorer
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.pipeline.models import check_llm, commits, once_up, open_llm
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.open import open_index
from reasonrag.rollout import Engine, FirstSteps
from reasonrag.storage.questions import (
    leave_out,
    load_questions,
    merged,
    named_sets,
    paragraph_corpus,
    questions_fingerprint,
    sample_questions,
)

if TYPE_CHECKING:
    from reasonrag.rewards.judge import JudgeService, ProcessJudge

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run.

    `content` holds names and checksums of the inputs; if one changes, results may change.
    """

    questions: list[Question]
    retriever: Retriever
    format: Format
    policy: LLM
    judge: LLM | None  # None if nodes are valued by rollouts
    content: dict[str, str]
    scorer: StepScorer | None = None

    async def aclose(self) -> None:
        for part in (self.policy, self.judge, self.retriever, self.scorer):
            if part is not None:
                await part.aclose()


def open_parts(
    config: Config,
    *,
    questions: list[Question] | None = None,
    retriever: Retriever | None = None,
    format: Format | None = None,
    policy: LLM | None = None,
) -> Parts:
    """Open everything that the configuration names; a part that is given as an object is taken instead.

    Raises:
        ConfigError, DataError: a part does not exist or cannot work; one line names it and the remedy.
    """
    if policy is None:
        check_llm(config.policy, "policy")  # before anything is downloaded
    questions = questions if questions is not None else open_questions(config)
    if config.search.recording is not None:
        format = recorded = open_recorded(config, questions)
        questions = recorded.questions
    retriever = retriever or open_retriever(config, questions)
    format = format or open_format(config)
    policy = policy or open_llm(config.policy, "policy")
    content = {
        "questions": questions_fingerprint(questions),
        "corpus": retriever.fingerprint,
        "prompts": format.fingerprint,
        "policy": policy.name,
    }
    judge = None
    if config.value.kind == "judge":
        judge = _open_judge_model(config, policy)
        content |= {"judge": judge.name, "judge_prompt": open_judge(judge, config).fingerprint}
    scorer = open_step_scorer(config, format)
    if scorer is not None:
        content["prm"] = scorer.name
    content |= commits(policy=policy, judge=judge)
    return Parts(questions, retriever, format, policy, judge, content, scorer)


def open_step_scorer(config: Config, format: Format) -> StepScorer | None:
    """Open the process reward model of `choice.prm`, if there is one; warn if it learned another format."""
    spec = config.choice.prm
    if spec is None:
        return None
    from reasonrag.prm.scorer import open_scorer  # imports torch

    check_prompts(ModelAddress("hf", spec), format)
    return open_scorer(spec)


def _open_judge_model(config: Config, policy: LLM) -> LLM:
    """Open the judge of Eq. 6: `--judge`, or `--judge-model` on the policy's server, or the policy itself."""
    if config.judge.spec is not None:
        return open_llm(config.judge.llm, "judge", beside=policy)
    backend = config.policy.address.backend
    if config.judge.model in (None, config.policy.model) and (backend is None or backend.judges):
        return policy  # the same object, so that a model in this process is loaded once
    own = ("model", "temperature", "max_tokens", "concurrency")
    named = {name: getattr(config.judge, name) for name in own} | {"top_p": 1.0}
    return open_llm(config.policy.model_copy(update=named), "judge", beside=policy)


def open_questions(config: Config) -> list[Question]:
    """Load the questions of `questions.dataset`, without those of `questions.exclude`, and sample each data set."""
    settings = config.questions
    if settings.dataset is None:
        raise ConfigError(
            "no questions: give --dataset a name (hotpotqa, ...), `demo`, a JSONL or Parquet file, or several of them "
            "with commas between"
        )
    loaded = [_open_set(name, split or settings.split, settings) for name, split in named_sets(settings.dataset)]
    questions = leave_out(merged(loaded), settings.exclude)
    return sample_questions(questions, settings.limit, seed=config.seed)


def _open_set(name: str, split: str | None, settings: QuestionsConfig) -> list[Question]:
    if name != "demo":
        return load_questions(name, split=split)
    from reasonrag.demo.world import DEMO_SPLITS, demo_questions

    if split not in (None, *DEMO_SPLITS):
        raise ConfigError(f"the demo world has the splits {', '.join(DEMO_SPLITS)}, not {split!r}")
    return demo_questions(split or "train", seed=settings.world_seed)


def open_retriever(config: Config, questions: list[Question]) -> Retriever:
    """Open the retriever of `retrieval.kind`; by default the given index or server, else BM25.

    BM25 searches the given corpus, or the paragraphs that come with the questions.
    """
    settings = config.retrieval
    if settings.kind is not None and settings.kind.startswith("python:"):
        plugin: Retriever = make_plugin(settings.kind, ("fingerprint", "search", "aclose"), config, questions)
        return plugin
    if settings.kind not in (None, "bm25", "remote", "dense", "hybrid"):
        raise ConfigError(
            f"retriever {settings.kind!r} is unknown; known: bm25, dense, hybrid, remote, "
            "python:PACKAGE.MODULE:NAME. Plug-ins for databases, web search and MCP are in contrib/ "
            "(docs/corpus.md)"
        )
    if settings.index is not None:
        return open_index(settings)
    if settings.kind in ("dense", "hybrid"):
        raise ConfigError(
            f"{settings.kind} search needs an index: run `index build --kind dense` and give its folder as --index"
        )
    if settings.kind == "remote" or (settings.kind is None and settings.url):
        from reasonrag.retrieval.remote import RemoteRetriever

        if not settings.url:
            raise ConfigError("remote retrieval needs the URL of a server; give --retriever-url")
        return RemoteRetriever(settings.url, timeout_s=settings.timeout_s, identity=settings.identity)
    from reasonrag.retrieval.bm25 import BM25Retriever

    corpus: Path | list[Passage]
    if settings.corpus is not None:
        corpus = named_path(settings.corpus)
    elif {name for name, _ in named_sets(config.questions.dataset or "")} == {"demo"}:
        from reasonrag.demo.world import demo_corpus

        corpus = demo_corpus(config.questions.world_seed)
    else:
        corpus = paragraph_corpus(questions)
    return BM25Retriever.open(corpus, cache=named_path(settings.cache) / "bm25")


def open_engine(
    config: Config,
    policy: LLM,
    retriever: Retriever,
    format: Format,
    scorer: StepScorer | None = None,
    *,
    tokens_flag: str = "--max-tokens ",
) -> Engine:
    """Create the engine that runs a policy as configured. `tokens_flag` sets the limit of a step, for an error."""
    first_steps = FirstSteps(
        policy.name,
        most_unreadable=config.run.max_unreadable,
        longer=f"{tokens_flag}{4 * config.policy.max_tokens}",
        refuse=policy.journal.drain if isinstance(policy, JournaledLLM) else None,
    )
    return Engine(
        policy,
        retriever,
        format,
        max_steps=config.format.max_steps,
        max_searches=config.format.max_searches,
        top_k=config.retrieval.top_k,
        sampling=sampling(config.policy),
        first_steps=first_steps,
        scorer=scorer,
        candidates=config.choice.candidates,
    )


def open_judge(llm: LLM, config: Config) -> ProcessJudge:
    """Create the process judge of Eq. 6 on a given model."""
    from reasonrag.rewards.judge import ProcessJudge

    return ProcessJudge(llm, PromptSet.find(config.format.prompts), sampling=sampling(config.judge.llm))


def judge_service(llm: LLM, judge: JudgeConfig, prompts: PromptSet) -> JudgeService:
    """Create the service that rewards and metrics ask for verdicts, on a given model."""
    from reasonrag.rewards.judge import JudgeService

    # An engine with slots has its own time limit, which does not count the wait for a slot.
    engine = llm.inner if isinstance(llm, JournaledLLM) else llm
    deadline_s = None if hasattr(engine, "slots") else judge.timeout_s
    return JudgeService(llm, prompts, sampling=sampling(judge.llm), deadline_s=deadline_s)


def sampling(model: ModelConfig) -> Sampling:
    """Return the sampling settings of a configured model."""
    return Sampling(temperature=model.temperature, top_p=model.top_p, max_tokens=model.max_tokens)


async def check(parts: Parts, *, begun: bool = False, wait_s: float = 0.0) -> None:
    """Check that all servers answer, within `wait_s`, before any call is paid for.

    A run that had `begun` has found them before: one that does not answer now is waited for, as if it had gone away
    later.

    Raises:
        LLMError, RetrievalError, ConfigError: a part will not work; one clear line.
    """

    async def check_one(part: Any) -> None:
        try:
            await once_up(part, 0.0 if begun else wait_s)
        except BackendError as error:
            if not (begun and error.cause == "unreachable"):
                raise
            log.warning(f"the run goes on, as it had begun: {error}")

    opened = (parts.policy, parts.judge, parts.retriever)
    await asyncio.gather(*(check_one(part) for part in opened if hasattr(part, "check")))
