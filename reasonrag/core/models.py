"""Addresses of models, as `--policy` and `--judge` take them, and the engines that they name.

A new engine is one entry of `BACKENDS` and the module that
opens it: help texts, checks and cards follow the entry.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import named_path

PAPER_POLICY = "Qwen/Qwen2.5-7B-Instruct"
DEMO_FORMATS = ("search_r1", "hiprag", "search_p1", "when_to_search")
"""Formats of the demo policy `demo:FORMAT`; `demo` alone speaks `reasonrag`."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine and its abilities.

    Attributes:
        opener: `PACKAGE.MODULE:NAME`, called with the address and its `ModelConfig`; imported when a
            model is opened. It returns an `LLM`.
        form: the form of its addresses, with a note, for help texts and errors.
        description: a policy of this engine, for the card of a data set.
        is_server: whether the model is on a server, which decides on the chat template.
        loads_weights: whether the rest of the address is a folder or a Hub name, loaded in this process.
        trainable: whether `dpo train --model` can start from the same weights.
        needs_gpu: whether it runs on a GPU only.
        acts: whether it can be a policy.
        judges: whether it can be a judge.
    """

    opener: str
    form: str
    description: str = "a language model"
    is_server: bool = False
    loads_weights: bool = False
    trainable: bool = False
    needs_gpu: bool = False
    acts: bool = True
    judges: bool = True


_SERVER = Backend(
    "reasonrag.llm.server:open_server",
    "http://HOST:PORT/v1 (vLLM, SGLang, any OpenAI-compatible server; several with commas)",
    is_server=True,
)
BACKENDS: dict[str, Backend] = {
    # A server's address is its own form: the scheme of the URL is the key.
    "http": _SERVER,
    "https": _SERVER,
    "hf": Backend(
        "reasonrag.llm.local:open_transformers",
        "hf:NAME_OR_PATH (transformers in this process)",
        loads_weights=True,
        trainable=True,
    ),
    "vllm": Backend(
        "reasonrag.llm.vllm_engine:VLLMEngine",
        "vllm:NAME_OR_PATH (vLLM in this process)",
        loads_weights=True,
        trainable=True,
        needs_gpu=True,
    ),
    "demo": Backend(
        "reasonrag.llm.local:open_transformers",
        "demo[:FORMAT] (a tiny model for the demo world)",
        "a tiny language model of the demo world",
        trainable=True,
        judges=False,
    ),
    "demo-judge": Backend(
        "reasonrag.demo.judge:open_judge",
        "demo-judge[:WORLD_SEED[:ERROR]] (knows the demo world's answers)",
        acts=False,
    ),
    "extractive": Backend(
        "reasonrag.demo.reader:open_reader",
        "extractive (no neural network)",
        "no language model, but rules that copy from passages",
        judges=False,
    ),
    "python": Backend(
        "reasonrag.core.plugins:open_model", "python:PACKAGE.MODULE:FACTORY (your own)", "code of its own"
    ),
}


def choices(role: str) -> str:
    """Return the forms of address that a role (`policy` or `judge`) may have, for help texts and errors."""
    backends = dict.fromkeys(BACKENDS.values())  # http and https are one
    return ", ".join(backend.form for backend in backends if role == "judge" or backend.acts)


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """The address of a model: an engine (a key of `BACKENDS`, unless mistyped) and the path or name it opens.

    >>> ModelAddress.parse("hf:Qwen/Qwen2.5-7B")
    ModelAddress(scheme='hf', rest='Qwen/Qwen2.5-7B')
    >>> str(ModelAddress.of_model("demo:hiprag")), str(ModelAddress.of_model("out/policy"))
    ('demo:hiprag', 'hf:out/policy')
    """

    scheme: str
    rest: str = ""

    @classmethod
    def parse(cls, text: str | None) -> ModelAddress:
        """Parse an address as `--policy` takes it; None is one without an engine."""
        scheme, _, rest = (text or "").partition(":")
        return cls(scheme.lower(), rest)

    @classmethod
    def of_model(cls, name: str) -> ModelAddress:
        """Return the address of a model to train, as `--model` takes it: a folder, a Hub name, or `demo[:FORMAT]`."""
        address = cls.parse(name)
        return address if address.scheme == "demo" else cls("hf", name)

    def __str__(self) -> str:
        return f"{self.scheme}:{self.rest}" if self.rest else self.scheme

    @property
    def backend(self) -> Backend | None:
        """The engine; None if the address names none."""
        return BACKENDS.get(self.scheme)

    @property
    def is_server(self) -> bool:
        return self.backend is not None and self.backend.is_server

    @property
    def loads_weights(self) -> bool:
        return self.backend is not None and self.backend.loads_weights

    @property
    def model(self) -> str:
        """What transformers and vLLM load: a Hub name, or a folder with `~` written out, for `demo` the shipped one.

        Raises:
            ConfigError: no model is named, or no shipped policy speaks that format.
        """
        if self.scheme == "demo":
            return str(demo_folder(self.rest))
        if not self.rest:
            raise ConfigError("hf: and vllm: need a model, such as hf:Qwen/Qwen2.5-7B-Instruct or hf:FOLDER")
        return str(named_path(self.rest)) if self.rest.startswith("~") else self.rest

    @property
    def folder(self) -> Path | None:
        """The folder that the weights would be in, whether it exists or not; None for an engine that loads none."""
        if self.scheme != "demo" and not (self.loads_weights and self.rest):
            return None
        return named_path(self.model)


def demo_folder(format: str = "") -> Path:
    """Return the folder of the shipped policy that speaks a format; "" and "reasonrag" are ReasonRAG's.

    Raises:
        ConfigError: no shipped policy speaks it.
    """
    if format not in ("", "reasonrag", *DEMO_FORMATS):
        names = ", ".join(f"demo:{name}" for name in DEMO_FORMATS)
        raise ConfigError(f"no demo policy speaks {reprlib.repr(format)}; choose demo, or one of: {names}")
    return Path(__file__).parents[1] / "demo" / ("stream_policy" if format in DEMO_FORMATS else "policy")
