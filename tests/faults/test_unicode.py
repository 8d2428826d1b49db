"""Characters that few programs expect, in everything that a run reads and writes: kept, or replaced as documented."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.text import parse_json, valid_unicode
from reasonrag.dpo.preferences import read_preferences
from reasonrag.publish.verify import verify
from reasonrag.retrieval.passages import open_corpus
from reasonrag.storage.inputs import CALLS, read_calls
from reasonrag.storage.questions import load_questions
from tests.e2e import product
from tests.fakes.model_server import FakeOpenAI
from tests.faults.matrix import Figure
from tests.growth import LIMIT, TIMES, growth

STRINGS = (
    *("a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc", "a\x1cb\x1dc\x1ed"),
    *("a\x00b", "a\rb", "a\r\nb", "a\tb", "a\x7fb"),
    *("a\ud800b", "a\udfffb", "\udc00\ud800", "a\ufffeb\uffff", "\ufeffa", "a\u200bb\u200dc", "a\u202eb\u2066c\u2069"),
    *("e\u0301", "\u00e9", "Z\u0351\u036b\u0343", "\U0001f469\u200d\U0001f680", "\U0001f1e9\U0001f1ea", "\U00010fff"),
    *("\u5929\u6c17", "\u05d0\u05d1 abc \u0627\u0644", "\u0130\u0131\u1e9e\ufb01", "\uff21\uff22", "\ue000\uf8ff"),
    *('"\\u2028\\', "a\u00a0b\u3000c"),
)


def raw_jsonl(path: Path, rows: Iterable[product.Row]) -> Path:
    """Write rows with every character as it is, but for halves of characters, which only an escape can stand for."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines = [line if valid_unicode(line) == line else json.dumps(json.loads(line)) for line in lines]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def reply(request: product.Row) -> str:
    """Search for the odd text of the question, quote it as evidence, and answer with it."""
    asked = json.dumps(request["messages"])
    number = asked.partition("Odd ")[2].partition(" ")[0]
    tag = ("query", "evidence", "answer")[min(asked.count("x-"), 2)]
    return f"So <{tag}>Odd {number} x-{STRINGS[int(number)]}-x</{tag}>"


@pytest.mark.fault(
    "26",
    "30 texts (line ends of Unicode, NUL, halves of characters, right-to-left, combining, joined emoji) as ids, "
    "questions, answers, metadata, passages and words of a policy; the run is killed and resumed",
    "each as it was, halves of characters replaced; the same rows",
)
def test_odd_characters_go_through_a_run(tmp_path: Path, figure: Figure) -> None:
    odd = list(enumerate(STRINGS))
    asked = [
        {"id": f"q{n}{text}q", "question": f"Odd {n} {text}?", "golden_answers": [f"g{text}g"], "metadata": {"k": text}}
        for n, text in odd
    ]
    pages = [{"id": f"p{n}{text}p", "contents": f"Odd {n}\nOdd {n} {text}."} for n, text in odd]
    flags = ("--dataset", raw_jsonl(tmp_path / "q.jsonl", asked), "--corpus", raw_jsonl(tmp_path / "c.jsonl", pages))
    flags += ("--set", f"retrieval.cache={tmp_path / 'cache'}", "--iterations", "3", "--concurrency", "4")
    with FakeOpenAI(reply, latency_s=0.002) as server:
        flags += ("--policy", server.base_url, "--policy-model", "fake")
        product.build(*flags, "--out", tmp_path / "whole")
        calls = len(server.requests)
        child = product.start("build-tree", *flags, "--out", tmp_path / "run")
        product.wait_until(lambda: len(server.requests) > 1.5 * calls)
        child.kill()
        assert child.wait(60) == -9
        product.build(*flags, "--out", tmp_path / "run")
    rows = product.tree_rows(tmp_path / "run")
    wrong = []
    for n, text in odd:
        kept = valid_unicode(text)
        mine = [row for row in rows if row["question_id"] == f"q{n}{kept}q"]
        seen = {
            *(row["question"] for row in mine),
            *(answer for row in mine for answer in row["golden_answers"]),
            *(row["text"] for row in mine if row["text"]),
            *((p["id"], p["contents"]) for row in mine for p in row["passages"] if p["id"].startswith(f"p{n}{kept}p")),
        }
        written = {f"So <{tag}>Odd {n} x-{kept}-x</{tag}>" for tag in ("query", "evidence", "answer")}
        page = (f"p{n}{kept}p", f"Odd {n}\nOdd {n} {kept}.")
        wrong += [text] * (seen != {f"Odd {n} {kept}?", f"g{kept}g", page, *written})
    figure(f"{len(odd) - len(wrong)} of {len(odd)} texts went through; {len(rows)} rows")
    assert not wrong
    assert rows == product.tree_rows(tmp_path / "whole")


@pytest.mark.fault(
    "26",
    "text that is no UTF-8 in a Parquet file of questions, passages or pairs, and in a recording",
    "one line; verify names it",
    before="traceback (UnicodeDecodeError), in verify too",
)
def test_text_that_is_no_utf8_is_refused(tmp_path: Path, figure: Figure) -> None:
    file = tmp_path / "text.parquet"
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    columns = ("id", "question", "golden_answers", "contents", "prompt", "chosen", "rejected")
    pq.write_table(pa.table(dict.fromkeys(columns, bad)), file)
    (tmp_path / CALLS).write_bytes(b'{"conversation": "\xff"}\n')
    reads = (
        lambda: load_questions(str(file)),
        lambda: list(open_corpus(str(file)).rows()),
        lambda: read_preferences(str(file)),
        lambda: list(read_calls(tmp_path)),
    )
    for read in reads:
        with pytest.raises(DataError):
            read()
    (problem,) = verify(file).problems
    figure(f"{len(reads)} of {len(reads)} readers refuse it; verify: {problem.replace(str(tmp_path), 'DIR')[:90]}")


@pytest.mark.fault(
    "A6",
    "JSON of many keys, one of them twice",
    "refused at the cost of reading it",
    before="a square of the keys: 95 s for 100,000, hours for a million",
)
def test_a_key_that_stands_twice_among_many_is_found_in_linear_time(figure: Figure) -> None:
    def keys(count: int) -> str:
        return "{" + ",".join(f'"k{n}": 1' for n in range(count)) + ', "k999": 2}'

    def refuse(text: str) -> None:
        with pytest.raises(ValueError, match="'k999' stands in it twice"):
            parse_json(text)

    found = growth(refuse, keys, 5_000)
    figure(f"{TIMES} times the keys take {found.ratio:.1f} times the CPU ({found.seconds:.1f} s)")
    assert found.ratio < LIMIT
