"""Every command of the documentation is run, or named with the reason why it is not."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from docs.reference import commands as reference
from docs.reference.schema import JSON_FILES
from reasonrag.cli import cli
from tests.docs import story
from tests.docs.story import NOT_RUN, PAGES, READ_ONLY, RUN, SHOWN, Once, blocks, commands, small
from tests.e2e import product
from tests.warmed import run

# What a page takes for granted: files of the reader, and what other pages have made.
GIVEN = {
    "README.md": ("questions.jsonl", "corpus.jsonl.gz"),
    "docs/training.md": ("questions.jsonl", "dev.jsonl", "corpus.jsonl.gz", "base", "runs/hotpotqa"),
    "docs/outcomes.md": ("questions.jsonl", "dev.jsonl", "corpus.jsonl.gz"),
    "docs/corpus.md": ("questions.jsonl", "dev.jsonl", "corpus.jsonl.gz", "texts", "passages.db"),
    "docs/evaluation.md": ("policies/dpo", "policies/hiprag"),
    "docs/publish.md": (
        *("runs/demo", "runs/hotpotqa", "policies/dpo", "reports/hotpotqa"),
        *("RAG_ProGuide.json", "preferences.jsonl"),
    ),
    "docs/formats.md": ("base",),
    "docs/look.md": ("runs/demo", "runs/hotpotqa", "policies/dpo", "reports/hotpotqa"),
    "docs/online.md": ("policies/dpo",),
    "docs/retrieval.md": ("questions.jsonl", "dev.jsonl", "corpus.jsonl.gz"),
    "docs/schema.md": ("runs/demo",),
    "docs/engines.md": ("policies/dpo", "questions.jsonl", "indexes/mine"),
}


@pytest.mark.parametrize(
    ("page", "folder"), [(page, GIVEN.get(page, ())) for page in PAGES], ids=list(PAGES), indirect=["folder"]
)
def test_a_page_runs_from_top_to_bottom(page: str, folder: Path, places: dict[str, str], once: Once) -> None:
    printed = ""
    for block in blocks(page):
        if block.language == "python":
            done = run(story.python_in, str(folder), block.text, environment=product.environment())
            assert done.returncode == 0, f"{page}, line {block.line}:\n{done.stderr}"
        elif block.language == "bash":
            printed = "".join(
                once(small(command, places), folder, **command.environment)
                for command in commands(block)
                if command.ours and not command.begins(READ_ONLY)
            )
        elif block.language == "text" and "--dry-run" in block.behind:
            assert printed.endswith(block.text), f"{page}, line {block.line}: it printed\n{printed}"


def test_every_command_is_run_or_named_with_its_reason() -> None:
    for command in _all_commands():
        if not command.ours:
            assert command.begins(NOT_RUN), f"{command.page}, line {command.line}: {command} is not run, for no reason"
        else:
            assert command.words[0] == "reasonrag" or command.begins(READ_ONLY), f"{command.page}: {command}"


def test_every_command_of_ours_can_be_read_as_it_stands() -> None:
    for command in _all_commands():
        if command.ours:
            story.read(command.ours)


def test_an_example_of_a_help_is_a_line_of_its_own_and_can_be_read() -> None:
    for path, command in reference.commands(cli, ("reasonrag",)):
        lines = (command.help or "").replace("\\\n", " ").splitlines()
        examples = [line for line in lines if re.search(r"(?<!`)\breasonrag [a-z-]+ ", f"{line} ")]
        for line in examples:
            found = re.fullmatch(r" +(?:accelerate launch .* -m )?reasonrag (.+)", line)
            assert found, f"{path}: {line}"
            story.read(tuple(shlex.split(found[1])))


def test_no_reason_and_no_substitution_is_left_over() -> None:
    said = [str(command) for command in _all_commands()]
    assert [key for key in (*NOT_RUN, *READ_ONLY) if not any(f"{text} ".startswith(f"{key} ") for text in said)] == []
    assert [flag for flag, *_ in story.SUBSTITUTES if not any(f"{flag} " in text for text in said)] == []


def test_every_fenced_block_names_its_language() -> None:
    found = {(block.page, block.line): block.language for page in PAGES for block in blocks(page)}
    assert {place: name for place, name in found.items() if name not in RUN + SHOWN} == {}


def test_every_page_begins_with_the_command_that_does_it() -> None:
    shown = {"docs/papers.md", "docs/log.md"}  # to be read
    assert [page for page in PAGES if page not in shown and next(blocks(page)).language != "bash"] == []


@pytest.mark.parametrize(
    ("file", "written"),
    [
        ("run.json", ["runs/demo/run.json"]),
        ("training.json", ["policies/dpo/training.json", "policies/hiprag/training.json"]),
        ("metrics.json", ["reports/hotpotqa/metrics.json", "reports/hiprag/metrics.json"]),
    ],
)
def test_the_keys_of_json_files_are_those_of_the_schema_page(file: str, written: list[str], home: Path) -> None:
    _, described = JSON_FILES[file]
    patterns = {name: _pattern(name) for name in described}
    keys = {key for path in written for key in _keys(json.loads((home / path).read_text(encoding="utf-8")), described)}
    assert [key for key in sorted(keys) if not any(p.fullmatch(key) for p in patterns.values())] == []
    assert [name for name, p in patterns.items() if not any(p.fullmatch(key) for key in keys)] == []


def _all_commands() -> Iterator[story.Command]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                yield from commands(block)


def _pattern(name: str) -> re.Pattern[str]:
    """`a|b.*.c` as a pattern: `*` is any name at that level, and everything below it at the end."""
    inside = "".join("[^.]+" if c == "*" else c if c == "|" else re.escape(c) for c in name.removesuffix(".*"))
    head, _, tail = inside.partition("\\.")
    return re.compile(f"(?:{head})" + (f"\\.{tail}" if tail else "") + ("(?:\\..*)?" if name.endswith(".*") else ""))


def _keys(value: Any, described: Mapping[str, str], path: str = "") -> Iterator[str]:
    """Dotted names of all leaves; names with dots in them are one level."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys(inner, described, f"{path}{'.' if path else ''}{str(name).replace('.', '_')}")
    else:
        yield path
