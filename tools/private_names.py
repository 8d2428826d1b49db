"""The private names of TRL, transformers, accelerate, PEFT, uvicorn and vLLM that the package uses or overrides.

    python -m tools.private_names

Such a name may change in any release of its library. `LISTED` names them all, with the reason; a test fails if the
package uses one that is not listed, or if a listed one has gone from the package or from its library. A name is private
if it begins with an underscore, or is imported from a module that is more than one level below its package.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("trl", "transformers", "accelerate", "peft", "uvicorn", "vllm")
# What the package derives from, by library.
BASES = {
    "trl": ("trl:DPOTrainer", "trl:GRPOTrainer", "trl:SFTTrainer"),
    "transformers": ("transformers:Trainer", "transformers:PreTrainedModel"),
    "accelerate": ("accelerate:Accelerator", "accelerate.state:GradientState"),
    "uvicorn": ("uvicorn:Server", "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"),
}
LISTED: dict[str, dict[str, str]] = {
    "trl": {
        "_prepare_dataset": "overridden: DPOTrainer has no public way to take rows of token ids",
        "_metrics": "GRPOTrainer and DPOTrainer: what is logged at the next step; the same since TRL 0.9",
        "_generate_and_score_completions": "overridden: advantages of rows and tokens, and weights of rows as the mask",
        "_last_loaded_step": "set, with `use_vllm`, for the correction of the sampler's log-probabilities",
        "_save_checkpoint": "overridden: a checkpoint counts once it is whole",
    },
    "transformers": {
        "_run_epoch": "overridden: no step after the last one of a checkpoint",
        "_get_grad_norm": "overridden: no step by a gradient that is not finite",
        "_determine_best_metric": "overridden: the best step by two metrics",
        "_load_best_model": "called once the weights of an earlier step are kept",
        "_is_stateful": "read: a model whose state is no cache shares no prefix",
    },
    "peft": {"tuners.tuners_utils.BaseTunerLayer": "which modules have an adapter; TRL imports it from there too"},
    "uvicorn": {
        "protocols.http.httptools_impl.HttpToolsProtocol": "derived from: limits headers, which uvicorn does with h11"
    },
}


def used() -> dict[str, set[str]]:
    """Return the private names in the package, by library."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "reasonrag").rglob("*.py"))]
    own = {name for tree in trees for name in _own(tree)}
    names: dict[str, set[str]] = {}
    for tree in trees:
        for library, name in _imported(tree):
            names.setdefault(library, set()).add(name)
        derived = _in_derived(tree)
        for name in _attributes(tree):
            for library in BASES if name in derived or name not in own else ():
                if _has(library, name):
                    names.setdefault(library, set()).add(name)
                    break
    return names


def gone() -> list[str]:
    """Return the listed names that an installed library has no more."""
    return [f"{library}: {name}" for library in LISTED for name in LISTED[library] if not _has(library, name)]


def _has(library: str, name: str) -> bool:
    if library not in BASES or "." in name:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(f"{library}.{module}"), attribute)
    return re.search(rf"(def |self\.|^    ){name}\b", _source(library), re.MULTILINE) is not None


@cache
def _source(library: str) -> str:
    """Return the source of the classes that the package derives from, with those that they derive from themselves."""
    classes: dict[type, None] = {}
    for place in BASES[library]:
        module, _, name = place.partition(":")
        mro = getattr(importlib.import_module(module), name).__mro__
        classes |= dict.fromkeys(each for each in mro if each.__module__.split(".")[0] == library)
    return "\n".join(map(inspect.getsource, classes))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            library, _, module = node.module.partition(".")
            for alias in node.names:
                if "." in module or alias.name.startswith("_"):
                    yield library, f"{module}.{alias.name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _attributes(node: ast.AST) -> set[str]:
    """Return private attributes that are read, set or called, and private methods."""
    names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call) and ast.unparse(each.func) == "getattr")
    names |= {str(each.args[1].value) for each in calls if isinstance(each.args[1], ast.Constant)}
    return {name for name in names | _methods(node) if _is_private(name)}


def _methods(tree: ast.AST) -> set[str]:
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {method.name for each in classes for method in each.body if isinstance(method, ast.FunctionDef)}


def _in_derived(tree: ast.AST) -> set[str]:
    """Return the private attributes in classes that derive from a class of a library, or from one of ours that does."""
    bases = {place.partition(":")[2] for places in BASES.values() for place in places} | {"GuardedTrainer"}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and bases & {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
            names |= _attributes(node)
    return names


def _own(tree: ast.AST) -> Iterator[str]:
    """Yield what a module defines or sets itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def main() -> None:
    """Print each name with its reason."""
    for library, names in used().items():
        for name in sorted(names):
            print(f"{library:12} {name:50} {LISTED.get(library, {}).get(name, 'is not listed')}")


if __name__ == "__main__":
    main()
