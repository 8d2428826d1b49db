"""Questions: FlashRAG files and Hub data sets in, checked `Question` values out.

Rows that cannot be used are never skipped in silence: all of them are collected, and one `DataError` names them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import one_line, quoted, valid_unicode
from reasonrag.core.types import Passage, Question
from reasonrag.storage.records import SUFFIXES, Row, RowProblems, read_rows, text_id

HUB_REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"

# Data sets that are known by name, and their splits on the Hub; the first one is the default.
KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hotpotqa": ("train", "dev"),
        "2wikimultihopqa": ("train", "dev"),
        "musique": ("train", "dev"),
        "popqa": ("test",),
        "bamboogle": ("test",),
        "nq": ("train", "dev", "test"),
        "triviaqa": ("train", "dev", "test"),
    }
)

_ANSWERS = ("golden_answers", "answers", "answer")
_BODIES = ("sentences", "content", "paragraph_text", "text", "contents")
_HUB_TIMEOUT_S = 10.0


def load_questions(
    dataset: str, *, split: str | None = None, limit: int | None = None, seed: int = 0
) -> list[Question]:
    """Questions of a file or of a known data set on the Hub, checked, in file order.

    Args:
        dataset: a .jsonl(.gz, .zst), .json or .parquet file with FlashRAG's fields (id, question, golden_answers,
            metadata; `answers` and `answer` are read too), or a name in `KNOWN`. Further columns join `metadata`.
        split: of a known data set; None takes the first one in `KNOWN`.
        limit: at most so many questions, a random sample; None takes all.
        seed: of the sample. The same seed, limit and file give the same questions.

    Raises:
        DataError: nothing of that name, the Hub out of reach, or rows that cannot be used (all are named).
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; a sample needs at least one question")
    path = Path(dataset)
    problems = RowProblems(dataset)
    if path.is_file() or dataset.lower().endswith(SUFFIXES):
        if split is not None:
            raise DataError(f"{dataset}: a file has no splits; leave out split {split!r}")
        name, rows = _file_name(path), read_rows(path, problems)
    else:
        name, rows = dataset, _hub_rows(dataset, split)
    return sample_questions(_parse(rows, name, problems), limit, seed=seed)


def sample_questions(questions: list[Question], limit: int | None, *, seed: int = 0) -> list[Question]:
    """A random sample of at most `limit` questions, in their order; all of them if None."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), limit))]


def _file_name(path: Path) -> str:
    """The data set's name: FlashRAG keeps `hotpotqa/dev.jsonl` and `nq/dev.jsonl`, whose ids are equal."""
    stem = Path(path.name.removesuffix(".gz").removesuffix(".zst")).stem
    parent = path.resolve().parent.name
    return valid_unicode(parent if stem in ("train", "dev", "test", "validation") and parent else stem)


def _hub_rows(name: str, split: str | None) -> Iterator[Row]:
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"data set {quoted(name)} is neither a file nor a known name; {hint}Known: {', '.join(KNOWN)}, "
            f"or a path that ends in {', '.join(SUFFIXES)}"
        )
    split = split or KNOWN[name][0]
    if split not in KNOWN[name]:
        raise DataError(f"data set {name!r} has no split {quoted(split)}; it has {', '.join(KNOWN[name])}")
    import datasets
    import huggingface_hub

    try:
        if not huggingface_hub.is_offline_mode():
            # `load_dataset` tries a dead Hub for half a minute, and talks about it.
            huggingface_hub.HfApi().dataset_info(HUB_REPOSITORY, timeout=_HUB_TIMEOUT_S)
        rows = datasets.load_dataset(HUB_REPOSITORY, name, split=split)
    # Offline mode, sockets, HTTP statuses and damaged caches each raise a type of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data set {name!r} has to be fetched from the Hub, which cannot be used ({type(error).__name__}); "
            "download it and pass a JSONL or Parquet file, or set HF_HUB_OFFLINE=1 to read a cached copy"
        ) from error
    return iter(enumerate(rows, 1))


def _parse(rows: Iterable[Row], dataset: str, problems: RowProblems) -> list[Question]:
    questions: list[Question] = []
    seen: set[str] = set()
    id_column = False
    for number, row in rows:
        id_column = id_column or "id" in row
        row_id, text = text_id(row.get("id")), row.get("question")
        answers = _answers(next((row[key] for key in _ANSWERS if row.get(key) is not None), None))
        if row_id is None:
            problems.add("id missing or empty", number)
        elif row_id in seen:
            problems.add("duplicate id", number, row_id)
        else:
            seen.add(row_id)
        if not isinstance(text, str) or not text.strip():
            problems.add("question missing or empty", number)
        elif not answers:
            problems.add("golden_answers missing or empty", number)
        elif row_id is not None:
            questions.append(Question(row_id, valid_unicode(text), answers, dataset, _metadata(row)))
    problems.check(
        "Repair or remove these rows; ids have to differ as text (1 and '1' are the same)."
        if id_column
        else "There is no id column: add one, a text that differs from row to row."
    )
    if not questions:
        raise DataError(f"{dataset}: no questions in it")
    return questions


def _answers(value: object) -> tuple[str, ...]:
    """Golden answers from a list, an array, a single value or a JSON list written as text; empty ones left out."""
    value = _plain(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = _plain(json.loads(value))
        except (ValueError, RecursionError):  # an answer that starts with a bracket
            value = [value]
    items = value if isinstance(value, list) else [value]
    texts = (str(item) for item in items if isinstance(item, str | int | float) and not isinstance(item, bool))
    return tuple(valid_unicode(text) for text in texts if text.strip())


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    further = {key: value for key, value in row.items() if key not in ("id", "question", "metadata", *_ANSWERS)}
    given = row.get("metadata")
    plain: dict[str, Any] = _plain({**further, **given} if isinstance(given, Mapping) else further)
    return plain


def _plain(value: Any) -> Any:
    """The value as JSON knows it: arrays become lists, NaN and infinities None, surrogates are replaced."""
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, Mapping):
        return {valid_unicode(str(key)): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


def paragraph_corpus(questions: Iterable[Question]) -> list[Passage]:
    """The paragraphs that HotpotQA, 2WikiMultihopQA and MuSiQue carry with their questions, each once.

    They are read from `metadata["context"]` or `metadata["paragraphs"]`, in the order in which they first come.

    Raises:
        DataError: no question carries any, or the layout is not one of those data sets'.
    """
    corpus: dict[str, Passage] = {}
    for question in questions:
        given = question.metadata.get("context") or question.metadata.get("paragraphs") or []
        try:
            paragraphs = list(_paragraphs(given))
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            raise DataError(
                f"question {quoted(question.id)}: its context is in an unknown layout; give a corpus with --corpus"
            ) from None
        for title, text in paragraphs:
            contents = f"{title}\n{text}"
            corpus.setdefault(contents, Passage(passage_id(contents), contents))
    if not corpus:
        raise DataError("the questions carry no paragraphs to search in; give a corpus with --corpus")
    return list(corpus.values())


def _paragraphs(given: Any) -> Iterator[tuple[str, str]]:
    """Titles and texts from {"title": [...], "sentences": [...]}, [[title, sentences], ...] or [{...}, ...]."""
    if isinstance(given, Mapping):
        given = list(zip(given["title"], _body(given), strict=True))
    for item in given:
        title, body = (item["title"], _body(item)) if isinstance(item, Mapping) else item
        sentences = [body] if isinstance(body, str) else body
        # Some sets start each sentence with a blank, others leave it out.
        text = " ".join(one_line(sentence) for sentence in sentences if sentence.strip())
        if text:
            yield one_line(title), text


def _body(item: Mapping[str, Any]) -> Any:
    return next(item[key] for key in _BODIES if key in item)


def passage_id(contents: str) -> str:
    """The id of a passage that has none: the first 12 hex digits of the SHA-1 of its contents."""
    return hashlib.sha1(contents.encode(), usedforsecurity=False).hexdigest()[:12]


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """16 hex digits that change with any data set's name, id, question or golden answer, and with their order."""
    digest = hashlib.sha256()
    for question in questions:
        known_by = [question.dataset, question.id, question.question, question.golden_answers]
        digest.update(json.dumps(known_by).encode() + b"\n")
    return digest.hexdigest()[:16]
