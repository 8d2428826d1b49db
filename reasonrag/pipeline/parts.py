"""Open the parts that a configuration names: questions, retriever, format, policy and judge.

The addresses of models are checked before anything is
loaded, and their servers are asked what they serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import structlog

from reasonrag.core import event_loop
from reasonrag.core.config import Config, JudgeConfig, ModelConfig, QuestionsConfig, carried_settings
from reasonrag.core.errors import BackendError, ConfigError
from reasonrag.core.models import DEMO_FORMATS, PAPER_POLICY, ModelAddress, choices
from reasonrag.core.plugins import make_plugin, place_of
from reasonrag.core.settings import COMMIT, Tree, merge, named_path, validate
from reasonrag.core.text import excerpt
from reasonrag.core.types import Passage, Question
from reasonrag.formats import Format, PromptSet, check_prompts, open_format, open_recorded
from reasonrag.formats.base import fingerprint
from reasonrag.formats.stream import StreamFormat
from reasonrag.llm.base import LLM, Sampling, StepScorer
from reasonrag.llm.chat_template import check_chat_template, loading
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.model_folder import adapter_base, local_folder, served_identity
from reasonrag.pipeline.work import Progress
from reasonrag.retrieval.base import BatchedRetriever, Retriever
from reasonrag.retrieval.open import open_index
from reasonrag.rewards.answers import check_gradable, check_outcome
from reasonrag.rollout import Engine, FirstSteps, callable_in_notebooks
from reasonrag.storage.folder import RunFolder
from reasonrag.storage.journal import Journal
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
    from reasonrag.rewards.judge import JudgeService

log = structlog.get_logger()

Role = Literal["policy", "judge", "completer"]

_POLL_S = 1.0  # between two questions to a server that does not answer yet


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run.

    `content` holds names and checksums of the inputs; if one changes, results may change.
    """

    questions: list[Question]
    retriever: Retriever
    format: Format
    policy: LLM
    judge: LLM | None  # None if it neither values nodes nor grades answers
    content: dict[str, str]
    scorer: StepScorer | None = None
    completer: LLM | None = None  # None if the policy completes its trajectories itself
    outcome: Any = None  # a function or an `Outcome` of yours; None opens that of the configuration

    def journaled(
        self, progress: Progress, journal: Journal, config: Config
    ) -> tuple[JournaledLLM, JudgeService | None, Retriever]:
        """Return policy, judge and retriever with their replies in a journal, and their calls counted."""
        policy = progress.open(self.policy, journal, "policy", config.policy.concurrency)
        judge = None
        if self.judge is not None:
            judging = progress.open(self.judge, journal, "judge", config.judge.concurrency)
            judge = judge_service(judging, config.judge, PromptSet.find(config.format.prompts))
        return policy, judge, BatchedRetriever.of_run(self.retriever, journal)

    async def aclose(self) -> None:
        for part in (self.policy, self.judge, self.completer, self.retriever, self.scorer):
            try:
                await part.aclose() if part is not None else None
            except Exception as error:  # of a plug-in: the work is done
                log.warning("a part could not be closed", place=place_of(error), error=excerpt(str(error)))


def open_parts(
    config: Config,
    *,
    questions: list[Question] | None = None,
    retriever: Retriever | None = None,
    format: Format | None = None,
    policy: LLM | None = None,
    outcome: Any = None,
) -> Parts:
    """Open everything that the configuration names; a part that is given as an object is taken instead.

    An `outcome` is a function that `outcome.name` could name (docs/extend.md).

    Raises:
        ConfigError, DataError: a part does not exist or cannot work; one line names it and the remedy.
    """
    # Before anything is downloaded.
    if outcome is None:
        check_outcome(config.outcome)
    if policy is None:
        check_llm(config.policy, "policy")
        name, address = config.format.name, config.policy.address
        if address.scheme == "demo" and name in DEMO_FORMATS and address.rest not in DEMO_FORMATS:
            raise ConfigError(f"the policy demo speaks the format reasonrag; give --policy demo:{name}")
    questions = questions if questions is not None else open_questions(config)
    if config.search.recording is not None:
        format = recorded = open_recorded(config, questions)
        questions = recorded.questions
    if outcome is None:
        check_gradable(config.outcome, questions)
    retriever = retriever or open_retriever(config, questions)
    format = format or open_format(config)
    policy = policy or open_llm(config.policy, "policy")
    content = contents(questions, retriever, format, policy)
    judge = None
    if "judge" in (config.value.kind, config.outcome.name):
        judge = _open_judge_model(config, policy)
        content["judge"] = judge.name
        prompts = PromptSet.find(config.format.prompts)
        if config.value.kind == "judge":
            content["judge_prompt"] = fingerprint(prompts.text("judge/process"))
        if config.outcome.name == "judge":
            content["outcome_prompts"] = fingerprint(prompts.text("judge/answer"), prompts.text("judge/grade"))
    if (scorer := open_step_scorer(config, format)) is not None:
        content["prm"] = scorer.name
    completer = None
    if config.completer.spec is not None:
        completer = open_llm(config.model_of("completer"), "completer")
        content["completer"] = completer.name
    content |= commits(judge=judge, completer=completer)
    return Parts(questions, retriever, format, policy, judge, content, scorer, completer, outcome)


def contents(questions: list[Question], retriever: Retriever, format: Format, policy: LLM) -> dict[str, str]:
    """Return what a run is compared with when it goes on: other contents would mix rows of two runs."""
    return {
        "questions": questions_fingerprint(questions),
        "corpus": retriever.fingerprint,
        "prompts": format.fingerprint,
        "policy": policy.name,
        **commits(policy=policy),
    }


def open_step_scorer(config: Config, format: Format) -> StepScorer | None:
    """Open the process reward model of `choice.prm`, if there is one; warn if it learned another format."""
    if (spec := config.choice.prm) is None:
        return None
    from reasonrag.prm.scorer import open_scorer  # imports torch

    check_prompts(ModelAddress("hf", spec), format)
    return open_scorer(spec)


def _open_judge_model(config: Config, policy: LLM) -> LLM:
    """Open the judge of Eq. 6: `--judge`, or `--judge-model` on the policy's server, or the policy itself."""
    if config.judge.spec is not None:
        return open_llm(config.judge.llm, "judge")
    backend = config.policy.address.backend
    if config.judge.model in (None, config.policy.model) and (backend is None or backend.judges):
        return policy  # the same object, so that a model in this process is loaded once
    # Another model on the policy's server: its address and key, with the judge's own settings.
    settings = config.judge.model_dump(include={"model", "max_tokens", "concurrency"})
    return open_llm(config.policy.model_copy(update=settings | {"temperature": 0.0, "top_p": 1.0}), "judge")


def open_llm(config: ModelConfig, role: Role) -> LLM:
    """Open the model that the configuration names; without a name, the paper's if this machine has a GPU.

    Raises:
        ConfigError: no model is named on a machine without a
            GPU, the address is unknown, or it cannot work here.
    """
    address = _address(config, role)
    # The engine is named by its path, so that only the one in use is imported: each import takes seconds.
    assert address.backend is not None
    if config.spec is None:
        log.info(f"no --{role} is given: taking the paper's", model=str(address))
    if address.is_server and config.model is None:
        from reasonrag.llm.server import NAME_IT

        raise ConfigError(f"{config.spec} needs the name of the model that it serves: {NAME_IT}")
    llm: LLM = resolve_name(address.backend.opener)(address, config)
    return llm


def commits(**models: LLM | None) -> dict[str, str]:
    """Return the commits of the models that are from the Hub: `{"policy_commit": ...}`."""
    known = {f"{role}{COMMIT}": getattr(model, "commit", None) for role, model in models.items()}
    return {name: commit for name, commit in known.items() if commit}


def check_llm(config: ModelConfig, role: Role) -> None:
    """Check a model's address without loading the model: its backend, and the files of a folder.

    Raises:
        ConfigError: the model cannot work here; one line names the reason.
    """
    address = _address(config, role)
    if config.card and not carried_settings(config.carrier):
        raise ConfigError(f"--card {config.card}: that folder has no reasonrag.yaml; give the one that training wrote")
    if address.loads_weights:
        check_chat_template(address.model, config.chat_template)
        folder = Path(address.model)
        base = adapter_base(folder)
        if folder.is_dir() and base is None and not (folder / "config.json").is_file():
            raise ConfigError(
                f"{config.spec}: there is no model in that folder (no config.json, adapter_config.json); give the "
                "folder of a training that has finished"
            )
        name = base or address.model
        if local_folder(name) is None:  # a small file tells whether the Hub has such a model
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError

            with loading(name):
                try:
                    hf_hub_download(name, "config.json")
                except EntryNotFoundError:
                    hf_hub_download(name, "adapter_config.json")
    elif config.chat_template is not None and config.api != "completions":
        raise ConfigError(
            f"{config.spec}: a chat template is for hf: and vllm: models, and for --set {role}.api=completions; a "
            "server has that of its model, and is started with another one (vllm serve --chat-template FILE)"
        )
    if config.think is not None and (config.api == "completions" or not address.is_server):
        raise ConfigError(
            f"{config.spec}: --set {role}.think is for a server with the chat API, which has the chat template"
        )
    _ = address.folder  # raises if no demo policy speaks the format


def _address(config: ModelConfig, role: Role) -> ModelAddress:
    """Return the address of a model, the paper's if none is given; raise ConfigError if it cannot have this role."""
    address = config.address
    if not config.spec:
        if not has_gpu():
            raise ConfigError(
                f"no --{role} is given and there is no GPU for {PAPER_POLICY}; choose one of: {choices(role)}"
            )
        return ModelAddress("vllm" if find_spec("vllm") else "hf", PAPER_POLICY)
    if address.backend is None:
        hint = f"did you mean hf:{config.spec}? Or " if "/" in config.spec and not address.rest else ""
        raise ConfigError(f"--{role} {config.spec!r} names no backend; {hint}choose one of: {choices(role)}")
    if role == "judge" and not address.backend.judges:
        known = " (demo-judge knows the demo world)" if address.scheme == "demo" else ""
        raise ConfigError(
            f"{address.scheme} cannot judge; choose a model with --judge{known}, or value nodes by --value rollout"
        )
    if role != "judge" and not address.backend.acts:
        raise ConfigError(
            f"{address.scheme} only judges steps and cannot act as a {role}; "
            "use it as --judge, and --policy demo for the demo world"
        )
    if config.model and not address.is_server and address.scheme != "python":
        raise ConfigError(f"{config.spec} is no server that needs the name of a model; leave {config.model!r} out")
    return address


def has_gpu() -> bool:
    """Return whether torch is installed and sees a CUDA device."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@callable_in_notebooks
def as_served(
    config: Config, out: Path | None = None, *, asked: Sequence[Role] = ("policy", "judge", "completer")
) -> Config:
    """Return a configuration with the name, kind and card of the models on servers that have one of some roles.

    Explicit settings stay. A run that has begun in `out` goes on with the values that it began with.

    Raises:
        ConfigError: a server or a context cannot serve this run; one line names the remedy.
        LLMError: a server does not answer, or refuses the key.
    """
    roles = [role for role in asked if config.model_of(role).address.is_server]
    before = RunFolder.begun_with(out) if out and roles else {}
    has_begun = all(before.get(role, {}).get("model") for role in roles)
    for role in roles:
        if has_begun:
            learnt = {name: before[role][name] for name in ("model", "vllm", "card") if name in before[role]}
        else:
            learnt = event_loop.run(_ask_server(config, role))
        # Of a model's card, and of what its server says, explicit settings stay.
        tree = carried_settings(ModelAddress("hf", learnt["card"])) if learnt.get("card") else {}
        merge(tree, {role: learnt})
        merge(tree, config.model_dump(exclude_unset=True))
        config = validate(Config, tree)
    return config


async def _ask_server(config: Config, role: Role) -> Tree:
    """Return the settings that follow from a server: the name of its model, whether it is vLLM, and a policy's card.

    Raises:
        ConfigError: a step alone fills the model's context.
    """
    from reasonrag.llm.server import open_server  # imports aiohttp

    model = config.model_of(role)
    check_llm(model, role)
    async with aclosing(open_server(model.address, model)) as llm:
        if (served := await _once_up(llm, config.run.wait_s)) is None:  # it lists no models
            return {}
        learnt: Tree = {"model": served.name} | ({"vllm": True} if served.is_vllm else {})
        if role == "policy" and not model.card and carried_settings(ModelAddress("hf", served.root)):
            learnt["card"] = served.root
        if served.context is not None and model.max_tokens >= served.context:
            raise ConfigError(
                f"{served.name} has a context of {served.context} tokens, too few for {role}.max_tokens "
                f"{model.max_tokens}: lower it, or start the server with a longer one (vllm serve --max-model-len)"
            )
        if learnt.keys() - model.model_fields_set:
            is_vllm = ", which is vLLM" if served.is_vllm else ""
            card = f"; it is prompted as {learnt['card']}/reasonrag.yaml says" if "card" in learnt else ""
            log.info(f"the {role} at {model.spec} is {served.name}{is_vllm}{card}")
        return learnt


async def _once_up(part: Any, wait_s: float) -> Any:
    """Return the result of a part's `check`; repeat it for `wait_s` seconds while its server does not answer yet."""
    ends_at, is_waiting = time.monotonic() + wait_s, False
    while True:
        try:
            return await part.check()
        except BackendError as error:
            if error.cause != "unreachable" or time.monotonic() + _POLL_S > ends_at:
                raise
            if not is_waiting:
                log.warning(f"{error}; waiting up to {wait_s:g} s")
                is_waiting = True
        await asyncio.sleep(_POLL_S)


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
    # An index knows its own kind.
    if settings.index is not None:
        return open_index(settings)
    if settings.kind in ("dense", "hybrid"):
        raise ConfigError(
            f"{settings.kind} search needs an index: run `index build --kind dense` and give its folder as --index"
        )
    if settings.is_remote:
        from reasonrag.retrieval.remote import RemoteRetriever

        if not settings.url:
            raise ConfigError("remote retrieval needs the URL of a server; give --retriever-url")
        return RemoteRetriever(settings.url, timeout_s=settings.timeout_s, identity=settings.identity)
    from reasonrag.retrieval.bm25 import BM25Retriever

    # BM25 over a file, over the demo world, or over the paragraphs of the questions.
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


def judge_service(llm: LLM, judge: JudgeConfig, prompts: PromptSet) -> JudgeService:
    """Create the service that rewards and metrics ask for verdicts, on a given model."""
    from reasonrag.rewards.judge import JudgeService

    return JudgeService(llm, prompts, sampling=sampling(judge.llm))


def sampling(model: ModelConfig) -> Sampling:
    """Return the sampling settings of a configured model."""
    return Sampling(temperature=model.temperature, top_p=model.top_p, max_tokens=model.max_tokens)


async def check(
    parts: Parts, *, begun: bool = False, before: Mapping[str, Tree] | None = None, wait_s: float = 0.0
) -> dict[str, Tree]:
    """Check that all servers answer, within `wait_s`, before any call is paid for; as `served_by`."""
    opened = {"policy": parts.policy, "judge": parts.judge, "completer": parts.completer, "retriever": parts.retriever}
    served = await served_by(opened, begun=begun, before=before, wait_s=wait_s)
    # A run that goes on has found this out.
    opens_turns = isinstance(parts.format, StreamFormat) or getattr(parts.format, "openings", None)
    if opens_turns and not begun and hasattr(parts.policy, "check_open_turn"):
        await parts.policy.check_open_turn()
    return served


async def served_by(
    opened: Mapping[str, Any], *, begun: bool = False, before: Mapping[str, Tree] | None = None, wait_s: float = 0.0
) -> dict[str, Tree]:
    """Ask the servers of some parts, by role, what they serve, within `wait_s`.

    Returns:
        by role, path and identity (`served_identity`) of the weights of a server's model, if the server
        reports a path; of a retrieval server, a checksum of the passages that it finds.

    A run that had `begun` has found them `before`: one that does
    not answer now is waited for, as if it had gone away later.

    Raises:
        LLMError, RetrievalError, ConfigError, RunError: a part will not work; one clear line.
    """
    served: dict[str, Tree] = {}

    async def ask(role: str, part: Any) -> None:
        if hasattr(part, "served"):
            part.served = (before or {}).get(role, {}).get("model", "")
        try:
            answer = await _once_up(part, 0.0 if begun else wait_s)
        except BackendError as error:
            if not (begun and error.cause == "unreachable"):
                raise
            log.warning(f"the run goes on, as it had begun: {error}")
        else:
            if isinstance(answer, str):
                served[role] = {"model": answer}
            elif root := getattr(answer, "root", ""):
                served[role] = {"root": root, "model": served_identity(root)}

    await asyncio.gather(*(ask(role, part) for role, part in opened.items() if hasattr(part, "check")))
    return served
