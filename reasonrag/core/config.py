"""The settings of `build-tree`, `eval` and `rl plan`: questions, retrieval, models, format, tree search, pairs."""

from __future__ import annotations

import reprlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from reasonrag.core.errors import ConfigError
from reasonrag.core.models import DEMO_FORMATS, ModelAddress, choices
from reasonrag.core.settings import (
    CHAT_TEMPLATE,
    Dotted,
    Section,
    Tree,
    execution,
    gather,
    merge,
    price,
    read_yaml,
    refuse_links,
    setting,
    share,
    to_yaml,
    validate,
)

DATASET = (
    "questions: a known data set (hotpotqa, 2wikimultihopqa, musique, popqa, ...), demo, a JSONL, CSV or Parquet file. "
    "Several, A,B, are merged; NAME:SPLIT takes a split of one"
)
LIMIT = "use a random sample of this many questions (default: all). Of several data sets, this many of each"
UNREADABLE = "abort if more than this share of the first 60 steps, or all of the first 12, cannot be read; 1 only warns"
_MODEL_NAME = "model name that the {}'s server expects (default: its only model)"
_RECORDING = "folder that contrib.record wrote: branch each step of an agent's conversations (needs format tool_calls)"
_ALPHA = "SPRE decay per action; 1 removes the shortest-path term"
_LAG = (
    "iterations of a tree in flight while the next one selects (default: three eighths of all, at most 24); 0 is the "
    "search of the paper"
)
_CONFIRM = "fresh rollouts of each side of a pair, made after the search to confirm it; 0 makes none"
PRM = "process reward model: the folder that `prm train` wrote, or python:PACKAGE.MODULE:NAME"
EXCLUDE = "leave out the questions of a run of build-tree or of rl train, or those in a file"


class QuestionsConfig(Section):
    """Which questions to use. Their content, not their path, is part of the identity of a run."""

    dataset: str | None = execution(None, DATASET, "--dataset")
    split: str | None = execution(None, "split of a known data set: train, dev or test", "--split")
    limit: int | None = execution(None, LIMIT, "--limit", ge=1)
    exclude: tuple[str, ...] = execution((), EXCLUDE, "--exclude")
    world_seed: int = execution(0, "seed of the demo world", "--world-seed")


class RetrievalConfig(Section):
    """Where to search. The fingerprint of the retriever is part of the identity of a run."""

    kind: str | None = execution(
        None,
        "how to search an index: bm25, dense or hybrid (default: the best that it has). Without an index also remote, "
        "or python:PACKAGE.MODULE:NAME, such as those in contrib/ (databases, web search, MCP)",
        "--retriever",
    )
    corpus: str | None = execution(
        None, "corpus to search: a file of JSONL(.gz), CSV or Parquet, with id and contents", "--corpus"
    )
    index: str | None = execution(None, "folder of an index that `index build` made", "--index")
    encoder: str | None = execution(
        None, "sentence-transformers model that encodes passages and queries: a Hub id or a folder", "--encoder"
    )
    gpu: bool = execution(False, "search the vectors of an index on all GPUs", "--gpu")
    device: str | None = execution(None, "device of the encoder, for example cpu, cuda or cuda:1", "--device")
    url: tuple[str, ...] = execution(
        (), "URL of a retrieval server that speaks POST /retrieve, or of that of --retriever", "--retriever-url"
    )
    identity: str = setting("remote", "contents of the retrieval servers, for example corpus and index by name")
    backend: dict[str, Any] = execution({}, "options of a plug-in retriever, by the names that its module describes")
    top_k: int = setting(3, "passages per search", "--top-k", ge=1, le=100)
    passage_order: Literal["best_first", "best_last"] = setting("best_first", "order of the passages in a prompt")
    max_passage_chars: int = setting(4000, "maximum characters of a passage in a prompt; the rest is cut off", ge=100)
    cache: str = execution("~/.cache/reasonrag", "folder that keeps the indexes of corpora")
    timeout_s: float = execution(60.0, "timeout in seconds of one request to a retrieval server", gt=0)

    # One place to search: a reader must see in the settings what was searched.
    @model_validator(mode="after")
    def _one_place(self) -> RetrievalConfig:
        if self.url and self.corpus:
            raise ValueError("both a corpus and a retrieval server are given; the server has its own, leave one out")
        if self.index and (self.url or self.corpus):
            raise ValueError("an index and another place to search are given; leave one out")
        if self.url and self.kind in ("bm25", "dense", "hybrid"):
            raise ValueError(
                f"a retrieval server is given, which searches in its own way; leave --retriever {self.kind} out"
            )
        return self

    @property
    def is_remote(self) -> bool:
        """Whether searches ask a server, which holds passages of its own."""
        return self.kind == "remote" or (self.kind is None and bool(self.url))


class ModelConfig(Section):
    """A model. Its name, not its address, is part of the identity of a run."""

    spec: str | None = execution(None, f"model that acts: {choices('policy')}", "--policy")
    model: str | None = execution(None, _MODEL_NAME.format("policy"), "--policy-model")
    card: str | None = execution(
        None, "folder whose reasonrag.yaml has the policy's prompt settings (default: the one that is loaded)", "--card"
    )
    api: Literal["chat", "completions"] = setting("chat", "API of the server; completions sends text or token ids")
    tokenizer: str | None = setting(None, "tokenizer for api=completions (default: the model's own)")
    chat_template: str | None = execution(None, CHAT_TEMPLATE, "--chat-template")
    vllm: bool = setting(False, "the server is vLLM: request token ids and stop strings (default: detected)")
    seeded: bool = execution(True, "send seeds to a server; without them a sample cannot be repeated")
    api_key_env: str = execution("OPENAI_API_KEY", "environment variable with the server's API key; never the key")
    revision: str | None = setting(None, "revision of a Hub model: commit, tag or branch")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")
    temperature: float = setting(1.0, "sampling temperature; 0 is greedy decoding", "--temperature", ge=0, le=5)
    top_p: float = setting(1.0, "nucleus sampling: probability mass that is kept", gt=0, le=1)
    max_tokens: int = setting(512, "maximum tokens of one completion", "--max-tokens", ge=1)
    think: bool | None = setting(None, "turn thinking on or off in the chat template of a server's model")
    logprobs: bool = execution(False, "request token log-probabilities from a server")
    timeout_s: float = execution(300.0, "timeout in seconds of one request to a server, retries included", gt=0)
    patience_s: float = execution(600.0, "seconds to wait for a server that does not answer, as at a restart", ge=0)
    concurrency: int | None = execution(
        None, "requests in flight at one server (default: as many as it answers faster for)", "--concurrency", ge=1
    )
    batch_size: int = execution(32, "prompts per batch of a model in this process", ge=1)
    device: str | None = execution(None, "device of hf: models: cpu, cuda, cuda:1, ... (default: a GPU if any)")
    dtype: str | None = setting(None, "dtype of the weights: float32, bfloat16 or float16 (default: the backend's)")
    input_price: float | None = price("price of one million prompt tokens", "--input-price")
    output_price: float | None = price("price of one million completion tokens", "--output-price")

    @property
    def address(self) -> ModelAddress:
        """The address of the model."""
        return ModelAddress.parse(self.spec)

    @property
    def carrier(self) -> ModelAddress:
        """The address with the `reasonrag.yaml` that counts, for `carried_settings`."""
        return ModelAddress("hf", self.card) if self.card else self.address

    @property
    def reads_ids(self) -> bool:
        """Whether the model reads ids, so that an open turn keeps the sampled ids.

        A server with the chat API reports ids and is sent text, which it encodes again.
        """
        # vLLM's chat API renders the template itself, so the ids of an open turn are lost.
        return self.api == "completions" or not self.vllm

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Return the cost of some tokens in the currency of the prices; None if a price is unknown."""
        if self.input_price is None or self.output_price is None:
            return None
        # Prices are of one million tokens, as providers list them.
        return (prompt_tokens * self.input_price + completion_tokens * self.output_price) / 1e6


class JudgeConfig(Section):
    """A model that gives verdicts."""

    spec: str | None = execution(
        None, "model that judges: as for --policy, or demo-judge[:WORLD_SEED[:ERROR]]", "--judge"
    )
    model: str | None = execution(None, _MODEL_NAME.format("judge"), "--judge-model")
    vllm: bool = setting(False, "the judge's server is vLLM (default: detected)")
    api_key_env: str = execution("OPENAI_API_KEY", "environment variable with its server's API key; never the key")
    max_tokens: int = setting(512, "maximum tokens of one reply", ge=1)
    temperature: float = setting(0.0, "temperature of a verdict; 0 is greedy; some APIs only accept 1", ge=0, le=5)
    think: bool | None = setting(None, "let the model think before its reply (default: as its chat template does)")
    timeout_s: float = execution(300.0, "timeout in seconds of one request to a server, retries included", gt=0)
    concurrency: int | None = execution(None, "requests in flight at one server (default: as for the policy)", ge=1)
    input_price: float | None = price("price of one million prompt tokens", "--judge-input-price")
    output_price: float | None = price("price of one million completion tokens", "--judge-output-price")

    @property
    def llm(self) -> ModelConfig:
        """The settings of the model; settings that a judge leaves out have their defaults."""
        return ModelConfig(**self.model_dump(exclude_unset=True) | {"temperature": self.temperature})


class CompleterConfig(Section):
    """Another policy, which writes the rollouts that value the nodes (Eq. 1); it is asked and sampled as the policy."""

    spec: str | None = execution(
        None, "model that writes rollouts, such as a stronger one: as for --policy (default: the policy)", "--completer"
    )
    model: str | None = execution(None, _MODEL_NAME.format("completer"), "--completer-model")
    vllm: bool = setting(False, "the completer's server is vLLM (default: detected)")


class FormatConfig(Section):
    """How steps are written. The prompt texts, not their name, are part of the identity of a run."""

    name: str = setting(
        "reasonrag",
        "format of the steps: reasonrag, search_r1, hiprag, search_p1, when_to_search, tool_calls, or "
        "python:PACKAGE.MODULE:NAME",
        "--format",
    )
    tool_parser: Literal["hermes", "llama3"] | None = setting(
        None, "how the policy writes the calls of format tool_calls (default: as its chat template does)"
    )
    open_tags: bool = setting(
        False, "open the tag for the policy in steps with one valid action (format reasonrag)", "--open-tags"
    )
    prompts: str = execution("default", "prompt texts: default, brief, or a folder", "--prompts")
    max_steps: int = setting(8, "maximum actions in a trajectory; the last one must answer", "--max-turns", ge=1)
    max_searches: int | None = setting(
        None, "maximum searches in a trajectory; after the last one the policy must answer", "--max-searches", ge=0
    )


class SearchConfig(Section):
    """Budget and shape of a tree (arXiv:2505.14069, App. A)."""

    recording: str | None = execution(None, _RECORDING, "--recording")
    search_function: str | None = execution(
        None, "search function of the recorded agent, NAME or NAME.ARGUMENT (default: by its name)", "--search-function"
    )
    answer_function: str | None = execution(
        None, "function by which the recorded agent answers (default: final_answer, final_result or submit)"
    )
    iterations: int = setting(64, "MCTS iterations per tree", "--iterations", ge=1)
    lag: int | None = setting(None, _LAG, "--lag", ge=0, le=1000)
    max_calls: int | None = setting(None, "maximum policy and judge calls per tree", "--max-calls", ge=1)
    max_children: int = setting(3, "maximum children of a node", "--max-children", ge=1, le=1000)
    selection: Literal["puct", "ucb1"] = setting("puct", "formula that selects a child: Eq. 5 or UCB1", "--selection")
    c_uct: float = setting(1.414, "exploration weight in Eq. 5 and UCB1", ge=0)
    rejudge_terminal: bool = setting(False, "ask the judge again at every visit of an answer")

    @property
    def in_flight(self) -> int:
        """Iterations of a tree that may be in flight while the next one selects."""
        return min(self.iterations * 3 // 8, 24) if self.lag is None else self.lag


class ValueConfig(Section):
    """How nodes get values: by rollouts (Eq. 1) or a judge (Eq. 6), and SPRE."""

    kind: Literal["rollout", "judge", "prm"] = setting(
        "rollout", "value of a new node: by rollouts (Eq. 1), a judge (Eq. 6), or the process reward model", "--value"
    )
    rollouts: int = setting(2, "rollouts per new node: k of Eq. 1", "--rollouts", ge=1, le=1000)
    alpha: float = setting(0.9, _ALPHA, "--alpha", gt=0, le=1)
    weighting: Literal["trajectories", "visits"] = setting(
        "trajectories", "average for the SPRE of a node: every complete trajectory once, or children by their visits"
    )


class OutcomeConfig(Section):
    """What an answer is worth. Trees, pairs, evaluation, process labels and rewards share it; SPRE discounts it."""

    name: str = setting(
        "f1",
        "what an answer is worth, in [0, 1]: f1, em, cover (it contains a golden answer), list (F1 over its items), "
        "judge (by the rubric, the reference or the golden answers), or python:PACKAGE.MODULE:NAME (default of rl "
        "train: the metric of the reward)",
        "--outcome",
    )
    votes: int = setting(1, "verdicts of a judge on an answer, whose mean counts", "--judge-votes", ge=1, le=100)

    @property
    def verdicts(self) -> int:
        """Verdicts on each answer."""
        return self.votes if self.name == "judge" else 0


class ChoiceConfig(Section):
    """Which of several steps is taken, and which of several attempts is kept."""

    prm: str | None = execution(None, PRM, "--prm")
    candidates: int = setting(
        1, "steps sampled in each state; the one that --prm values highest is taken", "--step-candidates", ge=1, le=1000
    )
    best_of: int = setting(1, "attempts at a question, of which --choose keeps one", "--best-of", ge=1, le=1000)
    rule: Literal["prm", "majority", "first"] = setting(
        "prm", "attempt that is kept: by the value of --prm, by the most frequent answer, or the first", "--choose"
    )


class PairsConfig(Section):
    """Which siblings become pairs (arXiv:2505.14069, sec. 2.2.3). Other pairs can be derived without model calls."""

    rule: Literal["best", "siblings"] = execution(
        "best",
        "what is compared in a state: best (the best with the worst step of each type, searching with answering) or "
        "siblings (every two, as in the paper)",
        "--pair-rule",
    )
    confirm: int = setting(4, _CONFIRM, "--confirm", ge=0, le=1000)
    min_confidence: float = share(0.8, "minimum probability that the order of two steps is right", "--min-confidence")
    min_margin: float = execution(0.01, "minimum difference between the two rewards of a pair", "--min-margin", ge=0)
    path_share: float = share(
        0.5, "share to keep of the pairs whose sides differ only in the length of their paths", "--path-share"
    )
    per_question: int = execution(8, "maximum pairs of a question, the surest first; 0 keeps all", "--max-pairs", ge=0)
    reward: Literal["spre", "judge", "prm"] = execution(
        "spre", "reward that pairs compare: SPRE, or the values of the judge or model of --value", "--pair-reward"
    )
    alpha: float | None = execution(None, f"{_ALPHA} (default: value.alpha)", "--alpha", gt=0, le=1)
    level: Literal["step", "trajectory"] = execution(
        "step", "what pairs compare: sibling steps, or whole trajectories by outcome", "--level"
    )
    test_share: float = execution(0.1, "share of the questions that form the test split", "--test-share", ge=0, lt=1)


class StallConfig(Section):
    """When a run that stands still is ended."""

    stall_s: float | None = execution(
        None, "seconds without a token, reply or commit after which a run ends, with exit code 75 (default: 3600)", gt=0
    )


class RunConfig(StallConfig):
    """How a run proceeds; nothing here changes a result."""

    max_failed: float = share(0.05, "maximum share of failed questions; above it, the exit code is 1", "--max-failed")
    max_unreadable: float = share(0.9, UNREADABLE, "--max-unreadable")
    wait_s: float = execution(0.0, "seconds to wait at startup for servers that are still loading", "--wait", ge=0)
    report_to: str | None = execution(
        None, "tracker that gets the numbers at the end, for example tensorboard, wandb or mlflow", "--report-to"
    )


class Config(Section):
    """Everything that a run depends on, section by section."""

    seed: int = setting(0, "random seed; the same seed repeats every random choice", "--seed")
    questions: QuestionsConfig = QuestionsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    policy: ModelConfig = ModelConfig()
    judge: JudgeConfig = JudgeConfig()
    completer: CompleterConfig = CompleterConfig()
    format: FormatConfig = FormatConfig()
    search: SearchConfig = SearchConfig()
    value: ValueConfig = ValueConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    choice: ChoiceConfig = ChoiceConfig()
    pairs: PairsConfig = PairsConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Config:
        if self.outcome.votes > 1 and self.outcome.name != "judge":
            raise ValueError("several verdicts are asked for, but no judge grades the answers; add --outcome judge")
        if self.value.kind != "rollout" and self.completer.spec:
            raise ValueError(f"nodes are valued by a {self.value.kind}, and a completer writes rollouts; leave one out")
        if self.completer.model and not self.completer.spec:
            raise ValueError("a completer's model is named, and not where it is; add --completer")
        if not self.search.recording and (self.search.search_function or self.search.answer_function):
            raise ValueError("functions of a recorded agent are named, and no recording; add --recording")
        reward = self.pairs.reward
        if reward not in ("spre", self.value.kind):
            raise ValueError(f"pairs.reward is {reward}, but no {reward} values the nodes; add --value {reward}")
        for name in ("alpha", "min_confidence", "confirm"):
            # config.yaml of a run holds every setting, defaults included.
            if reward != "spre" and getattr(self.pairs, name) not in (None, 0, PairsConfig.model_fields[name].default):
                raise ValueError(f"pairs.{name} is for SPRE, but pairs.reward is {reward}; leave one of them out")
        # A choice needs several candidates, which only sampling gives.
        choice = self.choice
        is_sampled = choice.candidates > 1 or choice.best_of > 1
        needs_prm = self.value.kind == "prm" or choice.candidates > 1 or (choice.best_of > 1 and choice.rule == "prm")
        if needs_prm and choice.prm is None:
            raise ValueError("a process reward model has to value or choose; name it with --prm")
        if choice.prm is not None and not (needs_prm or is_sampled):
            raise ValueError("the process reward model is not used; add --value prm, --step-candidates or --best-of")
        if is_sampled and self.policy.temperature == 0:
            raise ValueError("greedy decoding always writes the same steps; add --temperature")
        if self.pairs.level == "trajectory" and (reward != "spre" or self.pairs.alpha is not None):
            raise ValueError("whole trajectories are compared by their outcomes; leave reward and alpha out")
        return self

    @property
    def fresh_rollouts(self) -> int:
        """Fresh rollouts that confirm each side of a pair; none if pairs compare anything but SPRE."""
        return self.pairs.confirm if (self.pairs.reward, self.pairs.level) == ("spre", "step") else 0

    @property
    def stall_s(self) -> float:
        """Return the seconds without any progress after which a run is ended."""
        # A server that restarts may be away for timeout_s + patience_s, and nothing stands still then.
        longest_wait_s = max(model.timeout_s + model.patience_s for model in self.prices.values())
        return self.run.stall_s or max(3600.0, 2 * longest_wait_s)

    def model_of(self, role: str) -> ModelConfig:
        """Return the settings of the policy, the judge or the completer."""
        if role == "completer":
            shared = {"api_key_env", "temperature", "top_p", "max_tokens", "timeout_s", "patience_s", "concurrency"}
            own = self.completer.model_dump(exclude_unset=True)
            return ModelConfig(**self.policy.model_dump(include=shared) | own)
        return self.policy if role == "policy" else self.judge.llm

    @property
    def prices(self) -> dict[str, ModelConfig]:
        """The model that pays for each kind of call; without a judge, the policy judges."""
        own = self.judge.spec or self.judge.model or self.judge.input_price is not None
        completer = {"completer": self.model_of("completer")} if self.completer.spec else {}
        return {"policy": self.policy, "judge": self.judge.llm if own else self.policy, **completer}


# Every two siblings, whatever their confidence.
_PAPER_PAIRS: Tree = {"rule": "siblings", "confirm": 0, "min_confidence": 0.0, "path_share": 1.0, "per_question": 0}
# The tiny policy was trained on brief prompts with one passage per query, and is useless with others.
_DEMO_POLICY: Tree = {"policy": {"max_tokens": 48}, "format": {"prompts": "brief"}, "retrieval": {"top_k": 1}}

PRESETS: dict[str, Tree] = {
    "paper": {
        # Appendix A: Eq. 5 selects, one judge call (Eq. 6) values a node; App. E.1: the top 3 passages.
        "search": {"selection": "puct", "lag": 0},
        "value": {"kind": "judge"},
        "retrieval": {"top_k": 3},
        "pairs": _PAPER_PAIRS,
    },
    "official": {
        # The published builder: 64 iterations, 2 children, 7 free steps and
        # then a forced answer, UCB1, judge values, terminal nodes judged at
        # every visit, inner rewards weighted by visits, best passage last.
        "search": {
            **{"iterations": 64, "lag": 0, "max_children": 2, "selection": "ucb1", "c_uct": 1.414},
            "rejudge_terminal": True,
        },
        "value": {"kind": "judge", "alpha": 0.9, "weighting": "visits"},
        "format": {"max_steps": 8},
        "retrieval": {"top_k": 3, "passage_order": "best_last"},
        "pairs": _PAPER_PAIRS,
    },
    "demo": {
        **_DEMO_POLICY,
        "policy": {"spec": "demo", **_DEMO_POLICY["policy"]},
        "questions": {"dataset": "demo"},
        "search": {"iterations": 8, "lag": 0},
    },
}


def load_config(
    *, preset: str | None = None, file: Path | None = None, overrides: Dotted | None = None, judged: bool = False
) -> Config:
    """Return the resolved configuration. The folder of a policy supplies its prompts, unless others are given.

    Args:
        preset: a key of `PRESETS`.
        file: YAML file with the sections of `Config`.
        overrides: dotted names to values, `{"search.iterations": 32}`.
        judged: of an evaluation, in which a judge may be asked for metrics alone.

    Raises:
        ConfigError: a key is unknown (the message has the nearest name), a value
            out of range, the file not YAML, or nothing asks the judge that is named.
    """
    given = gather(PRESETS, preset=preset, file=file, overrides=overrides)
    questions, policy = given.get("questions"), given.get("policy")
    # Not validated yet, so a section may be of any type; what is wrong with it is reported below.
    if isinstance(questions, dict) and questions.get("dataset") == "demo" and isinstance(policy, dict | None):
        given["policy"] = policy = {"spec": "demo"} | (policy or {})  # the one policy that knows the demo world
    tree: Tree = {}
    if isinstance(policy, dict):  # before it is validated, as these settings are the defaults
        card, spec = policy.get("card"), policy.get("spec")
        tree = carried_settings(ModelAddress("hf", str(card)) if card else ModelAddress.parse(str(spec or "")))
    # The card is below everything that the user gave: flags, --set, the file and the preset win.
    merge(tree, given)
    config = validate(Config, tree)
    is_asked = judged or "judge" in (config.value.kind, config.outcome.name)
    if not is_asked and (config.judge.spec or config.judge.model):
        raise ConfigError("configuration: a judge is named, and nothing asks it; add --value judge or --outcome judge")
    return config


# --- The card of a policy: `reasonrag.yaml` next to its weights ---

POLICY_CARD = "reasonrag.yaml"
SHIPPED_PROMPTS = ("default", "brief")
OWN_PROMPTS = "prompts"  # the folder next to the card with prompts that are not shipped
_FINGERPRINT = "prompts_fingerprint"
# What a policy's folder may set. A folder may come from anywhere: it can name neither code nor a path.
CARRIED = {
    "format": {"name", "prompts", "max_steps", "tool_parser", "open_tags"},
    "retrieval": {"top_k", "passage_order", "max_passage_chars"},
    "policy": {"max_tokens"},
}


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """The settings that a policy was trained with, which are the defaults wherever it is used.

    Attributes:
        text: content of `reasonrag.yaml`.
        prompts: folder of custom prompts; None if the prompts are shipped ones.
    """

    text: str
    prompts: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Mapping[str, object]], fingerprint: str | None = None) -> PolicyCard:
        """Return the card of a resolved configuration, as `Config.model_dump(mode="json")` gives it.

        `fingerprint` is that of the format: the shipped prompts may be others in another version.
        """
        carried: Tree = {}
        for section, names in sorted(CARRIED.items()):
            given = {name: value for name in sorted(names) if (value := config[section].get(name))}
            # A custom format is code, which a downloaded
            # folder must not name: the user has to ask for it.
            carried[section] = {name: value for name, value in given.items() if not str(value).startswith("python:")}
        prompts = str(carried["format"]["prompts"])
        custom = None if prompts in SHIPPED_PROMPTS else prompts
        if custom:
            carried["format"]["prompts"] = OWN_PROMPTS
        if fingerprint:
            carried[_FINGERPRINT] = fingerprint
        head = "# How this policy was trained to be asked: the defaults wherever it is used.\n"
        return cls(head + to_yaml(dict(sorted(carried.items()))), custom)

    @classmethod
    def read(cls, folder: Path) -> PolicyCard | None:
        """Return the card of a folder; None if it has none.

        Raises:
            ConfigError: the card sets something that a policy's folder may not set.
        """
        if not carried_settings(ModelAddress("hf", str(folder))):
            return None
        custom = folder / OWN_PROMPTS
        return cls((folder / POLICY_CARD).read_text(encoding="utf-8"), str(custom) if custom.is_dir() else None)

    def write(self, folder: Path) -> None:
        """Write the card into the folder of a policy, or of the data that one will be trained on."""
        (folder / POLICY_CARD).write_text(self.text, encoding="utf-8")
        if self.prompts is None:
            return
        # The tree of a prompt set: one folder for each format.
        refuse_links(Path(self.prompts))
        for text in Path(self.prompts).glob("*/*.txt"):  # FORMAT/NAME.txt; other texts of the folder stay there
            target = folder / OWN_PROMPTS / text.relative_to(self.prompts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, target)


def copy_card(source: Path, folder: Path) -> bool:
    """Copy the card and its prompts from one policy's folder to another's; return whether there is one."""
    if (card := PolicyCard.read(source)) is not None:
        card.write(folder)
    return card is not None


def carried_settings(address: ModelAddress) -> Tree:
    """Return the settings in `reasonrag.yaml` of a policy's folder; an empty tree without that file.

    Raises:
        ConfigError: the file sets something that a policy's folder
            may not set, or no demo policy speaks that format.
    """
    folder, tree = address.folder, _card(address)
    tree.pop(_FINGERPRINT, None)
    if folder is None or not tree:
        return {}
    for section, values in tree.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            may_set = name in CARRIED.get(section, ()) and isinstance(value, str | int)
            if not may_set or str(value).startswith("python:"):
                raise ConfigError(
                    f"{folder / POLICY_CARD}: {reprlib.repr(f'{section}.{name}')} cannot be set by a policy's folder, "
                    "or not in this form; remove it, and set it by a flag or in your own configuration"
                )
    if address.scheme == "demo" and address.rest in DEMO_FORMATS:  # one policy that speaks several formats
        merge(tree, {"format": {"name": address.rest}})
    prompts = tree.get("format", {}).get("prompts")
    if prompts == OWN_PROMPTS:
        refuse_links(folder, OWN_PROMPTS)
        tree["format"]["prompts"] = str(folder / OWN_PROMPTS)
    elif prompts not in (None, *SHIPPED_PROMPTS):
        raise ConfigError(
            f"{folder / POLICY_CARD}: prompts {reprlib.repr(prompts)} are neither shipped "
            f"({', '.join(SHIPPED_PROMPTS)}) nor the folder {OWN_PROMPTS!r} next to the file; give them with --prompts"
        )
    return tree


def carried_fingerprint(address: ModelAddress) -> str | None:
    """Return the fingerprint of the format that a policy was trained in; None if its folder has none."""
    fingerprint = _card(address).get(_FINGERPRINT)
    return None if fingerprint is None else str(fingerprint)


def _card(address: ModelAddress) -> Tree:
    file = None if address.folder is None else address.folder / POLICY_CARD
    return read_yaml(file) if file is not None and file.is_file() else {}
