"""The recipes at full scale: settings are those of the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from reasonrag.online_rl.settings import RLSettings, rl_presets
from tests.docs.story import PAGES, ROOT

PAGE = "docs/papers.md"


def test_settings_in_tables_are_those_of_the_configuration_files() -> None:
    seen = 0
    for file, rows in _tables():
        settings = rl_presets().get(file) or yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        for name, shown in rows:
            found: Any = settings
            for part in name.split("."):
                found = found[part]
            assert yaml.safe_load(shown) == found or float(shown) == found, f"{file}: {name}"
            seen += 1
    assert seen > 50


def test_arithmetic_that_is_shown_comes_to_what_it_says() -> None:
    text = PAGES[PAGE].read_text(encoding="utf-8")
    shown = re.findall(r"^([\d][\d,.e *+/()-]*) = ([\d,.]+(?:e\d+)?)", text, re.MULTILINE)
    for sum_, result in shown:
        computed, stated = eval(sum_.replace(",", "")), float(result.replace(",", ""))  # digits and signs alone
        assert abs(computed - stated) <= 0.01 * stated, sum_
    assert len(shown) > 30


def test_presets_train_on_the_batches_and_attempts_of_their_table() -> None:
    text = PAGES[PAGE].read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| (\d+) \* (\d+) \| (\d+) \| ([\d,]+) \|", text, re.MULTILINE)
    of_papers = {name for name in rl_presets() if not name.startswith("demo-")}
    assert {name for name, *_ in rows} == of_papers
    for name, *shown in rows:
        batches, questions, attempts, updates, total = (int(cell.replace(",", "")) for cell in shown)
        settings = RLSettings.model_validate({"reward": {"name": "outcome"}, **rl_presets()[name]})
        rollout = settings.rollout
        assert (batches, updates) == (settings.max_steps, rollout.minibatches), name
        assert (questions, attempts) == (rollout.questions_per_step, rollout.group_size), name
        assert batches * questions * attempts == total, name


def _tables() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of each table of settings, with the configuration file or preset that is named next."""
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for found in re.finditer(r"^\| setting \| value \| source \|\n(?:\|.*\n)+", text, re.MULTILINE):
        rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", found[0], re.MULTILINE)
        named = re.search(r"--(?:config|preset) ((?!configs/fsdp)[\w./-]+)", text[found.end() :])
        assert named is not None
        yield named[1], rows
