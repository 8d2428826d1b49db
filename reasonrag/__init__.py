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

    settings = reasonrag.DPOSettings(data="runs/demo", model="demo", min_examples=1, min_questions=1)
    reasonrag.train_dpo(settings, Path("policies/dpo"))

`examples/questions_to_policy.py` does all of it and evaluates the policy.
Rewards, formats, retrievers and models of yours are named in a configuration
as `python:PACKAGE.MODULE:NAME`; docs/extend.md has an example of each.
"""

from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


@cache
def _homes() -> dict[str, str]:
    """Return the module of each name of the surface, as the stub beside this file says, which type checkers read."""
    with open(f"{__file__}i", encoding="utf-8") as file:  # noqa: PTH123 -- importing pathlib takes longer
        stub = file.read()
    imports = (line.split() for line in stub.splitlines() if line.startswith("from "))
    return {name: module for _, module, _, name, *_ in imports}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *_homes()]
    if name not in _homes():
        raise AttributeError(f"module 'reasonrag' has no attribute {name!r}")
    value = getattr(import_module(_homes()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
