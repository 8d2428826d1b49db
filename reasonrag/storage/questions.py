"""Load questions from FlashRAG files and Hub data sets, checked.

Rows that cannot be used are never skipped silently: one `DataError` names all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.settings import named_path
from reasonrag.core.text import common_text, one_line, parse_json, quoted, redact_data, valid_unicode
from reasonrag.core.types import Passage, Question, as_finite
from reasonrag.storage.files import read_json
from reasonrag.storage.folder import read_run
from reasonrag.storage.inputs import SUFFIXES, NumberedRow, RowProblems, lack, read_rows, text_id
from reasonrag.storage.parquet import read_batches, read_shards
from reasonrag.storage.tables import rollout_schema, tree_schema

log = structlog.get_logger()

HUB_REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"

# Data sets known by name, with their splits on the Hub; the first split is the default.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "popqa": ("test",),
    "bamboogle": ("test",),
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
}

_ANSWERS = ("golden_answers", "answers", "answer")
_BODIES = ("sentences", "content", "paragraph_text", "text", "contents")
_HUB_TIMEOUT_S = 10.0


def load_questions(dataset: str, *, split: str | None = None) -> list[Question]:
    """Load and check the questions of a file or of a known data set on the Hub, in file order.

    Args:
        dataset: a file that ends in one of `SUFFIXES`, with FlashRAG's fields
            (id, question, golden_answers, metadata; `answers` and `answer` are
            read too), or a name in `KNOWN`. `rubric`, `reference` and `items` may
            stand beside the golden answers, or for them. Other columns join `metadata`.
        split: split of a known data set; None takes the first one in `KNOWN`.

    Raises:
        DataError: the name is unknown, the Hub cannot be reached, or rows cannot be used (all are named).
    """
    path = named_path(dataset)
    problems = RowProblems(dataset)
    if path.is_file() or dataset.lower().endswith(SUFFIXES):
        if split is not None:
            raise DataError(f"{dataset}: a file has no splits; leave out split {split!r}")
        name, rows = _file_name(path), read_rows(path, problems)
    else:
        name, rows = dataset, _hub_rows(dataset, split)
    return _parse(rows, name, problems)


def sample_questions(questions: list[Question], limit: int | None, *, seed: int = 0) -> list[Question]:
    """Return a random sample of at most `limit` questions of each data set, in their order; all if `limit` is None."""
    if limit is None:
        return questions
    places: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(question.dataset, []).append(place)
    kept: list[int] = []
    for of_dataset in places.values():
        # A generator for each data set: another one in the list does not change its sample.
        kept += random.Random(seed).sample(of_dataset, min(limit, len(of_dataset)))
    return [questions[place] for place in sorted(kept)]


def cut(questions: Sequence[Question], count: int) -> list[list[Question]]:
    """Return the questions of each of `count` shards: one after another they are the same list for any `count`.

    Questions keep their order, but those of equal text (`common_text`) follow the first of them: only
    their pairs can be duplicates, which are then dropped within a shard.
    """
    # The place of the first question of each text, and all of them. Python's dictionaries keep the order.
    alike: dict[str, tuple[int, list[Question]]] = {}
    for position, question in enumerate(questions):
        _, family = alike.setdefault(common_text(question.question), (position, []))
        family.append(question)
    shards: list[list[Question]] = [[] for _ in range(count)]
    for position, family in alike.values():
        # By the place of the first question, so that shards differ by a family at most.
        shards[position * count // len(questions)] += family
    return shards


def named_sets(dataset: str) -> list[tuple[str, str | None]]:
    """Return the name or path of each data set in `--dataset A,B:SPLIT`, with the split if one is named there.

    >>> named_sets("popqa,hotpotqa:dev")
    [('popqa', None), ('hotpotqa', 'dev')]
    """
    if named_path(dataset).is_file():
        return [(dataset, None)]
    sets: list[tuple[str, str | None]] = []
    for part in (part.strip() for part in dataset.split(",")):
        # A path may hold a colon: only behind a known name it stands for a split.
        name, _, split = part.rpartition(":")
        sets.append((name, split) if name in (*KNOWN, "demo") else (part, None))
    return sets


def splits_of_names(dataset: str, split: str | None) -> dict[str, str]:
    """Return the split of each data set that is read by its name, not from a file.

    >>> splits_of_names("popqa,hotpotqa:dev,mine.jsonl", None)
    {'popqa': 'test', 'hotpotqa': 'dev'}
    """
    defaults = {name: splits[0] for name, splits in KNOWN.items()} | {"demo": "train"}
    return {name: own or split or defaults[name] for name, own in named_sets(dataset) if name in defaults}


def merged(sets: Iterable[list[Question]]) -> list[Question]:
    """Return the questions of several data sets in one list.

    Raises:
        DataError: two questions have the same data set and id, so that their records would mix.
    """
    questions = [question for of_set in sets for question in of_set]
    seen: set[tuple[str, str]] = set()
    for question in questions:
        if (question.dataset, question.id) in seen:
            raise DataError(
                f"question {quoted(question.id)} of {question.dataset} comes twice: a data set is named twice, or two "
                "files have one name; name each once, or rename a file"
            )
        seen.add((question.dataset, question.id))
    return questions


def leave_out(questions: list[Question], places: Iterable[str]) -> list[Question]:
    """Return the questions that no place names: the folder of a finished run or an online training, or a file.

    A row of a file names a question by its text (`question`, without regard to case and blanks).

    Raises:
        DataError, RunError: a place cannot be read, a row names nothing, or no question is left.
    """
    for place in places:
        texts = _named_questions(named_path(place))
        kept = [question for question in questions if common_text(question.question) not in texts]
        report = log.info if len(kept) < len(questions) else log.warning
        report("questions left out", named_in=place, count=len(questions) - len(kept), kept=len(kept))
        questions = kept
        if not questions:
            raise DataError(f"{place} names all questions, so none is left; give other questions or another --exclude")
    return questions


def _named_questions(place: Path) -> set[str]:
    """Return the texts of the questions in a run's folder or a file."""
    texts: set[str] = set()
    if not place.exists():
        raise DataError(f"{place} does not exist; name a run, an online training or a file with --exclude")
    problems = RowProblems(str(place))
    for number, row in _rows_of_folder(place) if place.is_dir() else read_rows(place, problems):
        text = row.get("question")
        if isinstance(text, str) and text.strip():
            texts.add(common_text(text))
        else:
            problems.add(lack("question", text), number)
    problems.check("Give each row the text of a question.")
    return texts


def _rows_of_folder(folder: Path) -> Iterator[NumberedRow]:
    """Yield a row with each question of a finished run or of an online training."""
    columns, files = ("question",), rollout_files(folder)
    for file in files:
        for batch in read_batches(file, rollout_schema(), columns=columns):
            yield from enumerate(batch.to_pylist(), 1)
    if not files:
        read_run(folder)
        yield from enumerate(read_shards(folder / "trees", "nodes", tree_schema(), columns=columns), 1)


def rollout_files(training: Path) -> list[Path]:
    """Return the files with the rollouts of an online training; raise RunError if those of some steps are missing."""
    files = sorted((training / "rollouts").glob("step-*.parquet"))
    found = {int(file.name[5:11]) for file in files if file.name[5:11].isdecimal()}
    summary = read_json(training / "training.json") or {}
    with contextlib.suppress(LookupError, TypeError, ArithmeticError):  # of another make
        found.add(summary["steps"] // summary["settings"]["rollout"]["minibatches"])
    if files and (missing := set(range(1, max(found) + 1)) - {int(file.name[5:11]) for file in files}):
        raise RunError(f"{training / 'rollouts'} lacks those of {len(missing)} steps; bring them back from a copy")
    return files


def _file_name(path: Path) -> str:
    """Return the data set's name; FlashRAG has `hotpotqa/dev.jsonl` and `nq/dev.jsonl` with equal ids."""
    stem = Path(path.name.removesuffix(".gz")).stem
    parent = path.resolve().parent.name
    return valid_unicode(parent if stem in ("train", "dev", "test", "validation") and parent else stem)


def _hub_rows(name: str, split: str | None) -> Iterator[NumberedRow]:
    if name not in KNOWN:
        known = f"demo, {', '.join(KNOWN)}, or a path that ends in {', '.join(SUFFIXES)}"
        raise DataError(f"data set {quoted(name)} is neither a file nor a known name; known: {known}")
    split = split or KNOWN[name][0]
    if split not in KNOWN[name]:
        raise DataError(f"data set {name!r} has no split {quoted(split)}; it has {', '.join(KNOWN[name])}")
    import datasets
    import huggingface_hub

    try:
        if not huggingface_hub.is_offline_mode():
            # `load_dataset` tries an unreachable Hub for half a minute, and logs every attempt.
            huggingface_hub.HfApi().dataset_info(HUB_REPOSITORY, timeout=_HUB_TIMEOUT_S)
        rows = datasets.load_dataset(HUB_REPOSITORY, name, split=split)
    # Offline mode, sockets, HTTP statuses and damaged caches raise different types, from three libraries.
    except Exception as error:
        raise DataError(
            f"data set {name!r} has to be fetched from the Hub (https://huggingface.co/datasets/{HUB_REPOSITORY}, "
            f"{name}, split {split}), which cannot be used ({type(error).__name__}); download it elsewhere and give "
            f"the file, --dataset {name}.jsonl with rows of id, question and golden_answers (docs/corpus.md), set "
            "HF_HUB_OFFLINE=1 to read a cached copy, or take --dataset demo, which needs no network"
        ) from error
    return iter(enumerate(rows, 1))


def _parse(rows: Iterable[NumberedRow], dataset: str, problems: RowProblems) -> list[Question]:
    questions: list[Question] = []
    seen: set[str] = set()
    for number, row in rows:
        row_id, text = text_id(row.get("id")), row.get("question")
        given = [row[name] for name in _ANSWERS if row.get(name) is not None]
        answers = _answers(given[0]) if given else ()
        rubric, reference = ("\n".join(_answers(row.get(name))) for name in ("rubric", "reference"))
        items = _from_json(row.get("items"))
        ways = tuple(filter(None, map(_answers, items))) if isinstance(items, list) else ()
        graded_by = (rubric, reference, ways)
        for name, grades in zip(("rubric", "reference", "items"), graded_by, strict=True):
            if row.get(name) and not grades:
                problems.add(f"{name} without a text", number)
        if row_id is None:
            problems.add(lack("id", row.get("id")), number)
        elif row_id in seen:
            problems.add("duplicate id", number, row_id)
        else:
            seen.add(row_id)
        if not isinstance(text, str) or not text.strip():
            problems.add(lack("question", text), number)
        elif not (answers or any(graded_by)):
            problems.add("golden_answers missing, empty, not all texts or numbers, or a list that is no JSON", number)
        elif row.get("choices") is not None:
            # Golden answers are numbers or letters then, which no trajectory writes.
            problems.add("choices (write them into the question, and the right one as golden answer)", number)
        elif row_id is not None:
            known = redact_data((row_id, valid_unicode(text), answers), "a question")
            rest = redact_data((_metadata(row), graded_by), "a question")
            questions.append(Question(*known, dataset, rest[0], *rest[1]))
    problems.check(
        "Repair or remove these rows; an id is a text or a whole number, and ids have to differ as text (1 and '1' are "
        "the same)."
    )
    if not questions:
        raise DataError(f"{problems.source}: no questions in it; give rows of id, question and golden_answers")
    return questions


def _answers(value: object) -> tuple[str, ...]:
    """Return the non-empty golden answers in a list, an array, or a single value; none if one is no text or number.

    A text that is a list in JSON is one; a list in Python's or numpy's form is
    no answer. A whole number that is a float, as pandas writes a column with
    gaps, is also an answer without ".0".

    >>> _answers(["Bob", "Rob"]), _answers('["Bob", "Rob"]'), _answers("[sic]"), _answers(1871.0)
    (('Bob', 'Rob'), ('Bob', 'Rob'), ('[sic]',), ('1871', '1871.0'))
    >>> _answers(["Bob", {"text": "Rob"}]), _answers([b"Bob"]), _answers("['Bob' 'Rob']")
    ((), (), ())
    """
    value = _from_json(value)
    if isinstance(value, str) and value.startswith(("['", '["')):
        return ()
    given = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool | bytes | list | tuple | Mapping) for item in given):
        return ()
    items = [item for item in map(_plain, given) if item is not None]
    whole = [int(item) for item in items if isinstance(item, float) and item.is_integer()]
    return tuple(text for text in map(str, (*whole, *items)) if text.strip())


def _from_json(value: Any) -> Any:
    """Return what a text holds that is a list or an object in JSON, as CSV files and PopQA have; else the value."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            return parse_json(value)
    return value


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    further = {key: value for key, value in row.items() if key not in ("id", "question", "metadata", *_ANSWERS)}
    metadata = _from_json(row.get("metadata"))
    return dict(_plain({**further, **metadata} if isinstance(metadata, Mapping) else further))


def _plain(value: Any) -> Any:
    """Return the value as JSON holds it: arrays become lists, NaN and infinities None, surrogates are replaced."""
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, Mapping):
        return {valid_unicode(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return as_finite(value)
    return value if value is None or isinstance(value, bool | int) else str(value)


def paragraph_corpus(questions: Iterable[Question]) -> list[Passage]:
    """Return the paragraphs that HotpotQA, 2WikiMultihopQA and MuSiQue carry with their questions, each once.

    They are read from `metadata["context"]` or `metadata["paragraphs"]`, in order of first appearance.

    Raises:
        DataError: no question of a data set carries paragraphs, or their layout is unknown.
    """
    corpus: dict[str, Passage] = {}
    datasets: set[str] = set()
    with_paragraphs: set[str] = set()
    without = 0
    for question in questions:
        datasets.add(question.dataset)
        # HotpotQA and 2WikiMultihopQA have `context`, MuSiQue has `paragraphs`.
        given = question.metadata.get("context") or question.metadata.get("paragraphs") or []
        without += not given
        try:
            for title, text in _paragraphs(given):
                contents = f"{title}\n{text}"
                corpus.setdefault(contents, Passage(passage_id(contents), contents))
                with_paragraphs.add(question.dataset)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            problem = f"question {quoted(question.id)}: its context is in an unknown layout"
            raise DataError(f"{problem}; give a corpus with --corpus") from None
    if not corpus or datasets != with_paragraphs:
        names = ", ".join(sorted(datasets - with_paragraphs)) or "the data set"
        raise DataError(f"the questions of {names} carry no paragraphs to search in; give a corpus with --corpus")
    if without:
        log.warning(f"{without} questions carry no paragraphs, and search those of the others; --corpus names a corpus")
    return list(corpus.values())


def _paragraphs(given: Any) -> Iterator[tuple[str, str]]:
    """Yield titles and texts from {"title": [...], "sentences": [...]}, [[title, sentences], ...] or [{...}, ...]."""
    if isinstance(given, Mapping):
        given = list(zip(given["title"], _body(given), strict=True))
    for item in given:
        title, body = (item["title"], _body(item)) if isinstance(item, Mapping) else item
        sentences = [body] if isinstance(body, str) else body
        # Only some data sets start each sentence with a blank.
        if text := " ".join(one_line(sentence) for sentence in sentences if sentence.strip()):
            yield one_line(title), text


def _body(item: Mapping[str, Any]) -> Any:
    return next(item[name] for name in _BODIES if name in item)


def passage_id(contents: str) -> str:
    """Return an id for a passage without one: the first 12 hex digits of the SHA-1 of its contents."""
    return hashlib.sha1(contents.encode(), usedforsecurity=False).hexdigest()[:12]


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """Return 16 hex digits over the names, ids, texts and golden answers of the questions, in order."""
    # Without metadata, which no policy sees.
    digest = hashlib.sha256()
    for question in questions:
        fields: list[Any] = [question.dataset, question.id, question.question, question.golden_answers]
        graded_by = (question.rubric, question.reference, question.items)
        fields += [graded_by] if any(graded_by) else []
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()[:16]
