from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from reasonrag.commands.parse import parse as command
from reasonrag.core.errors import ConfigError, DataError

GOOD = {"text": "<think>t</think><search>q</search><information>x</information><think>c</think><answer>Dr. No</answer>"}
STRAY = {"text": "Well. <think>t</think><answer>U.S. Navy</answer>", "golden_answers": ["US Navy", "the Navy"]}


def parse(name, file):
    """Run the command as a function: its options are not parsed, and its errors are raised."""
    command.callback(name, "house", str(file))


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.fixture
def parsed(tmp_path, capsys):
    def write_and_parse(*rows, name="search_r1"):
        file = tmp_path / "t.jsonl"
        file.write_text(lines(*rows), encoding="utf-8")
        parse(name, file)
        printed = capsys.readouterr()
        return [json.loads(line) for line in printed.out.splitlines()], printed.err

    return write_and_parse


def test_a_row_says_what_its_text_is(parsed):
    rows, counted = parsed(GOOD, STRAY, {"text": ""})
    assert rows == [
        {
            **{"well_formed": True, "reason": "", "steps": 1, "searches": 1, "queries": ["q"]},
            **{"answer": "Dr. No", "em": None, "f1": None},
        },
        {
            **{"well_formed": False, "reason": "stray_text", "steps": 1, "searches": 0, "queries": []},
            **{"answer": "U.S. Navy", "em": 1.0, "f1": 1.0},
        },
        {
            **{"well_formed": False, "reason": "no_answer", "steps": 0, "searches": 0, "queries": []},
            **{"answer": None, "em": None, "f1": None},
        },
    ]
    assert counted.splitlines() == [
        "3 rows read as search_r1: 1 well-formed, 2 with an answer",
        "       1 stray_text",
        "       1 no_answer",
    ]


@pytest.mark.parametrize("name", ["reasonrag", "search_r1", "hiprag", "search_p1", "when_to_search"])
def test_every_format_parses(parsed, name):
    rows, _ = parsed(GOOD, STRAY, name=name)
    assert [row["answer"] for row in rows] == ["Dr. No", "U.S. Navy"]


def test_compressed_files_are_read(tmp_path, capsys):
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(gzip.compress(lines(GOOD).encode()))
    parse("search_r1", file)
    assert json.loads(capsys.readouterr().out)["answer"] == "Dr. No"


def test_nothing_but_ascii_and_newlines_is_printed(tmp_path, capsys):
    hostile = "<answer>\x1b[31m\u202e\u2028\x07\x7f\x9bé\ud800</answer>"
    file = tmp_path / "t.jsonl"
    file.write_text(lines({"text": hostile}))
    parse("search_r1", file)
    printed = capsys.readouterr()
    assert all(char == "\n" or " " <= char <= "~" for char in printed.out + printed.err)
    assert json.loads(printed.out)["answer"] == hostile[8:-9]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("not json", "not a JSON object with each key once in 1 row \\(2"),
        ("[1]", "not a JSON object with each key once in 1 row \\(2"),
        ("[" * 100_000, "not a JSON object with each key once in 1 row \\(2"),
        ({"question": "Who?"}, "no `text` in 1 row \\(2"),
        ({"text": None}, "no `text` in 1 row \\(2"),
        ({"text": "x", "golden_answers": "Dr. No"}, "`golden_answers` is no list of texts in 1 row \\(2 'Dr. No'"),
        ({"text": "x", "golden_answers": [7]}, "`golden_answers` is no list of texts in 1 row"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_those_before_it_are_there(tmp_path, capsys, bad, told):
    file = tmp_path / "t.jsonl"
    file.write_text(lines(GOOD, bad, STRAY))
    with pytest.raises(DataError, match=told):
        parse("search_r1", file)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match="file not found"):
        parse("search_r1", tmp_path / "t.jsonl")


def test_a_damaged_archive_is_told(tmp_path):
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(gzip.compress(lines(GOOD).encode())[:-9])
    with pytest.raises(DataError, match="complete"):
        parse("search_r1", file)


def test_an_unknown_format_is_told(tmp_path):
    with pytest.raises(ConfigError, match="hiprag"):
        parse("nope", tmp_path / "t.jsonl")


PIPED = (sys.executable, "-m", "reasonrag", "parse", "--format", "search_r1", "-")


def piped(text, **options):
    return subprocess.run(PIPED, input=text, capture_output=True, timeout=60, **options)


def test_stdin_is_read_as_it_comes():
    done = piped(lines(GOOD, "", STRAY).encode() + b'{"text": "\xe9"}\n')
    assert [json.loads(line)["answer"] for line in done.stdout.splitlines()] == ["Dr. No", "U.S. Navy"]
    assert done.returncode != 0 and b"stdin: not a JSON object with each key once in 1 row (4" in done.stderr


def test_a_reader_that_goes_away_ends_it_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(PIPED, input=lines(*[GOOD] * 2000).encode(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
