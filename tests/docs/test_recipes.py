"""The recipes at full scale: arithmetic is computed again, settings are the files', figures the papers'."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.story import PAGES, ROOT, blocks

PAGE = "docs/recipes.md"
PAPERS = ROOT.parent / "shared" / "papers"

_TWO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

# Figure on the page, paper, and the words that it comes from.
QUOTED = (
    ("3,000 each", "reasonrag", "randomly sample 3,000 questions each from PopQA"),
    ("13,289 of 4,603 questions", "reasonrag", "4,603 questions and 13,289 distinct preference pairs"),
    ("difference of at least 0.01", "reasonrag", "reward difference less than 0.01"),
    ('"an advanced large language model"', "reasonrag", "An advanced large language model serves as the policy model"),
    ("3 passages, Wikipedia 2018 and passages", "reasonrag", "consistently retrieving the top 3 documents"),
    ("33,790 questions", "reasonrag", "33,790"),
    ("a response (66", "reasonrag", "65.5/9/60/625"),
    ("4 A100 of 80 GB", "hiprag", "four NVIDIA A100 80GB GPUs"),
    ("| `max_steps` | 400 |", "hiprag", "a total of 400 steps and saved the checkpoint every 50 steps"),
    ("gpt-4.1-mini for needless, gpt-5-mini", "hiprag", "Over-search detection is performed by gpt-4.1-mini"),
    ("| `rollout.group_size` | 5 |", "hiprag", "with a group size of 5"),
    ("E5-base, 3 passages", "hiprag", "the top-3 relevant passages are returned"),
    ("PPO in the main experiments", "hiprag", "we use Proximal Policy Optimization (PPO)"),
    ("90K training samples", "search-p1", "all 90K training samples using HY 2.0-Instruct"),
    ("1.91 calls a sample", "search-p1", "on average 1.91 LLM calls"),
    ("8 H20", "search-p1", "8×\\times H20 GPUs using a total batch size of 512, with a mini-batch size of 256"),
    ("steps 195 to 205", "search-p1", "averaged over steps 195–205"),
    ("loses 0.8 points", "search-p1", "Qwen3-32B achieves comparable accuracy (-0.8)"),
    ("| `save_steps` | 10 |", "search-p1", "saved every 10 steps"),
    ("8 H800", "when-to-search", "eight NVIDIA H800 GPUs"),
    ("about 6 without reasoning, about 24", "when-to-search", "approximately 24 hours"),
    ("about 6 without reasoning", "when-to-search", "significantly reduced to about 6 hours"),
    ("80 % of 2WikiMultihopQA", "when-to-search", "80% is used for training"),
    ("| `max_steps` | 500 |", "when-to-search", "total_training_steps\t500"),
    ("Wikipedia of September 2025", "when-to-search", "September 2025 Wikipedia data"),
    ("| `retrieval.top_k` | 5 |", "when-to-search", "top k equal to 5"),
)


def test_all_arithmetic_on_the_pages_is_right() -> None:
    for page in (PAGE, "docs/api.md"):
        lines = list(_arithmetic(page))
        assert lines
        for expression, value in lines:
            assert _value(ast.parse(expression, mode="eval").body) == pytest.approx(value, rel=0.01), expression


def test_settings_in_tables_are_those_of_the_configuration_files() -> None:
    seen = 0
    for file, rows in _tables():
        settings = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        for name, shown in rows:
            found: Any = settings
            for part in name.split("."):
                found = found[part]
            assert yaml.safe_load(shown) == found or float(shown) == found, f"{file}: {name}"
            seen += 1
    assert seen > 50


@pytest.mark.data
@pytest.mark.skipif(not PAPERS.is_dir(), reason="../shared/papers is not there")
@pytest.mark.parametrize(("figure", "paper", "words"), QUOTED)
def test_a_figure_is_that_of_the_paper(figure: str, paper: str, words: str) -> None:
    assert figure in PAGES[PAGE].read_text(encoding="utf-8")
    assert _blankless(words) in _blankless((PAPERS / f"{paper}.txt").read_text(encoding="utf-8"))


def _arithmetic(page: str) -> Iterator[tuple[str, float]]:
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "text" else ():
            if found := re.match(r"([\d.,e()*/+\- ]+?) = ([\d.,e]+)", line):
                yield found[1].replace(",", "").strip(), float(found[2].replace(",", "").rstrip("."))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return float(_TWO[type(node.op)](_value(node.left), _value(node.right)))
    assert isinstance(node, ast.Constant)
    return float(node.value)


def _tables() -> Iterator[tuple[Path, list[tuple[str, str]]]]:
    """Rows of each table of settings, with the configuration file that is named next."""
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for found in re.finditer(r"^\| setting \| value \| source \|\n(?:\|.*\n)+", text, re.MULTILINE):
        rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", found[0], re.MULTILINE)
        named = re.search(r"--config (configs/[\w-]+\.yaml)\b(?<!fsdp\.yaml)", text[found.end() :])
        assert named is not None
        yield Path(named[1]), rows


def _blankless(text: str) -> str:
    return re.sub(r"\s+", "", text)
