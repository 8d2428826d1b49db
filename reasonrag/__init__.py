"""Process rewards for agentic RAG: from questions to a policy that is trained on each of its steps.

The surface of the library; everything else is internal and may move between
releases. Importing it is cheap: each name is imported when it is first used,
and torch, trl, datasets, faiss and vllm inside the functions that need them.

Build trees and pairs, then look at them:

    import reasonrag

    config = reasonrag.load_config(preset="demo", overrides={"questions.limit": 20})
    summary = reasonrag.build_trees(config, "runs/demo")

Run the one rollout engine with parts of your own (`LLM`, `Retriever`, `Format` are protocols):

    engine = reasonrag.Engine(llm, retriever, reasonrag.FORMATS["search_r1"](), max_steps=5)
    trajectories = await engine.run([reasonrag.Trajectory(question)], seeds=[0])

Train on the pairs, with the settings of `reasonrag dpo train` as arguments; the same call resumes:

    reasonrag.train_dpo(reasonrag.DPOSettings(data="runs/demo", model="demo"), Path("policies/dpo"))

`examples/questions_to_policy.py` does all of it and evaluates the policy.
Rewards, formats, retrievers and models of yours are named in a configuration
as `python:PACKAGE.MODULE:NAME`; docs/extend.md has an example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The names of the surface by the module that defines them;
# `__getattr__` imports one from there when it is first used.
_SURFACE = {
    "pipeline.build": "build_trees",
    "pipeline.parts": "open_parts open_retriever",
    "dpo.pairs": "derive_pairs",
    "dpo.train": "train_dpo train_sft",
    "online_rl.train": "train_online",
    "training.settings": "DPOSettings SFTSettings",
    "online_rl.settings": "RLSettings load_rl_settings",
    "evaluation.run": "Evaluation",
    "core.config": "Config load_config",
    "rollout": "Engine",
    "mcts.search": "TreeSearch Evaluator",
    "formats": "FORMATS",
    "formats.base": "Format Reading PromptSet Block",
    "formats.stream": "StreamFormat",
    "rewards": "REWARDS",
    "rewards.base": "Reward Score",
    "retrieval.base": "Retriever",
    "llm.base": "LLM Sampling",
    "core.types": "Question Passage Message Prompt Completion Step Trajectory Search Note Answer Malformed Span Shard",
    "core.text": "exact_match token_f1 cover_match",
    "core.errors": "ReasonRAGError ConfigError LLMError RetrievalError",
}
_HOMES = {name: module for module, names in _SURFACE.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from reasonrag.core.config import Config as Config
    from reasonrag.core.config import load_config as load_config
    from reasonrag.core.errors import ConfigError as ConfigError
    from reasonrag.core.errors import LLMError as LLMError
    from reasonrag.core.errors import ReasonRAGError as ReasonRAGError
    from reasonrag.core.errors import RetrievalError as RetrievalError
    from reasonrag.core.text import cover_match as cover_match
    from reasonrag.core.text import exact_match as exact_match
    from reasonrag.core.text import token_f1 as token_f1
    from reasonrag.core.types import Answer as Answer
    from reasonrag.core.types import Completion as Completion
    from reasonrag.core.types import Malformed as Malformed
    from reasonrag.core.types import Message as Message
    from reasonrag.core.types import Note as Note
    from reasonrag.core.types import Passage as Passage
    from reasonrag.core.types import Prompt as Prompt
    from reasonrag.core.types import Question as Question
    from reasonrag.core.types import Search as Search
    from reasonrag.core.types import Shard as Shard
    from reasonrag.core.types import Span as Span
    from reasonrag.core.types import Step as Step
    from reasonrag.core.types import Trajectory as Trajectory
    from reasonrag.dpo.pairs import derive_pairs as derive_pairs
    from reasonrag.dpo.train import train_dpo as train_dpo
    from reasonrag.dpo.train import train_sft as train_sft
    from reasonrag.evaluation.run import Evaluation as Evaluation
    from reasonrag.formats import FORMATS as FORMATS
    from reasonrag.formats.base import Block as Block
    from reasonrag.formats.base import Format as Format
    from reasonrag.formats.base import PromptSet as PromptSet
    from reasonrag.formats.base import Reading as Reading
    from reasonrag.formats.stream import StreamFormat as StreamFormat
    from reasonrag.llm.base import LLM as LLM
    from reasonrag.llm.base import Sampling as Sampling
    from reasonrag.mcts.search import Evaluator as Evaluator
    from reasonrag.mcts.search import TreeSearch as TreeSearch
    from reasonrag.online_rl.settings import RLSettings as RLSettings
    from reasonrag.online_rl.settings import load_rl_settings as load_rl_settings
    from reasonrag.online_rl.train import train_online as train_online
    from reasonrag.pipeline.build import build_trees as build_trees
    from reasonrag.pipeline.parts import open_parts as open_parts
    from reasonrag.pipeline.parts import open_retriever as open_retriever
    from reasonrag.retrieval.base import Retriever as Retriever
    from reasonrag.rewards import REWARDS as REWARDS
    from reasonrag.rewards.base import Reward as Reward
    from reasonrag.rewards.base import Score as Score
    from reasonrag.rollout import Engine as Engine
    from reasonrag.training.settings import DPOSettings as DPOSettings
    from reasonrag.training.settings import SFTSettings as SFTSettings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'reasonrag' has no attribute {name!r}")
    value = getattr(import_module(f"reasonrag.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
