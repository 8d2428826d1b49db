import asyncio
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from reasonrag.core.errors import RunError
from reasonrag.core.text import exact_match
from reasonrag.core.types import Trajectory
from reasonrag.demo.world import (
    KINDS,
    SPLITS,
    demo_corpus,
    demo_questions,
    famous_names,
    famous_part,
    make_world,
    names,
    write_world,
)
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.rewards.answers import list_f1

SEEDS = (0, 7)
ORDER = ["tiny", "small", "large", "huge", "poor", "modest", "solid", "rich"]


def subjects(question):
    return {hop["query"].rpartition(" ")[0] for hop in question.metadata["path"]}


def test_no_name_belongs_to_two_splits_or_is_famous():
    pools = [names(kind, split) for kind in KINDS for split in SPLITS] + [famous_names(kind) for kind in KINDS]
    every = [name for pool in pools for name in pool]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", SPLITS)
def test_questions_touch_entities_of_their_own_split_or_famous_ones(seed, split):
    own, famous = set(make_world(seed).parts[split].facts), set(famous_part().facts)
    for question in demo_questions(split, seed=seed):
        assert subjects(question) <= (famous if question.metadata["known"] else own)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_pages_of_the_gold_path_lead_to_the_answer(seed, split):
    pages = {page.title: page.text.split("; ") for page in demo_corpus(seed)}
    for question in demo_questions(split, seed=seed):
        path = question.metadata["path"]
        assert len(path) == question.metadata["hops"]
        for hop in path:
            assert hop["evidence"] in pages[hop["query"].rpartition(" ")[0]]
        values = [hop["evidence"].removeprefix(hop["query"]).strip() for hop in path]
        match question.metadata["kind"]:
            case "yes_no":
                assert question.golden_answers == ("yes" if values[0] == values[1] else "no",)
            case "comparison":
                best = max(path, key=lambda hop: ORDER.index(hop["evidence"].rpartition(" ")[2]))
                assert values[0] != values[1]
                assert question.golden_answers == (best["query"].rpartition(" ")[0],)
            case _:
                assert question.golden_answers == (values[-1],)
                assert [hop["query"].rpartition(" ")[0] for hop in path[1:]] == values[:-1]


def test_questions_are_many_and_all_different_over_splits_and_ids_name_world_and_split():
    questions = [question for split in SPLITS for question in demo_questions(split)]
    assert len(questions) == len({question.question for question in questions}) == 2100
    ids = [question.id for question in questions] + [page.id for page in demo_corpus()]
    assert len(ids) == len(set(ids)) and ids[-1].startswith("demo-page-")
    assert demo_questions("dev", seed=7, limit=124)[123].id == "demo-7-dev-000123"


def test_a_short_list_is_the_beginning_of_a_long_one_and_mixes_the_kinds():
    short = demo_questions("dev", limit=40)
    assert short == demo_questions("dev")[:40]
    assert {q.metadata["kind"] for q in short} == {"one_hop", "bridge", "three_hop", "comparison", "yes_no"}
    assert sum(q.metadata["known"] for q in short) == 4


def test_famous_facts_are_the_same_in_every_world_and_others_are_not():
    assert make_world(0).famous == make_world(7).famous
    assert make_world(0).parts != make_world(7).parts


def test_the_world_does_not_depend_on_the_hash_seed():
    code = (
        "import hashlib; from reasonrag.demo.world import demo_corpus, demo_questions; "
        "rows = [(q.id, q.question, q.golden_answers, q.metadata) for s in ('train', 'dev', 'test') "
        "for q in demo_questions(s, seed=3)]; "
        "print(hashlib.sha256(repr((rows, demo_corpus(3))).encode()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "42")
    ]
    assert len(set(runs)) == 1


async def found_share(retriever):
    hops = [hop for split in SPLITS for q in demo_questions(split) for hop in q.metadata["path"]]
    rankings = await retriever.search([hop["query"] for hop in hops], 1)
    return sum(
        exact_match(ranking[0].title, [hop["query"].rpartition(" ")[0]])
        for hop, ranking in zip(hops, rankings, strict=True)
    ) / len(hops)


def test_the_world_is_not_written_over_a_corpus_of_somebody_else(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("mine")
    with pytest.raises(RunError, match="holds other files"):
        write_world(Path("demo"), tmp_path)
    assert (tmp_path / "corpus.jsonl").read_text() == "mine"
    write_world(Path("demo"), tmp_path / "world")
    (tmp_path / "world/corpus.jsonl").unlink()  # a kill before the last file
    write_world(Path("demo"), tmp_path / "world")
    assert (tmp_path / "world/corpus.jsonl").exists()


def test_gold_queries_find_the_entity_s_own_page_first(tmp_path):
    async def share():
        async with aclosing(BM25Retriever.open(demo_corpus(), cache=tmp_path)) as retriever:
            return await found_share(retriever)

    assert asyncio.run(share()) > 0.98


@pytest.mark.parametrize("split", SPLITS)
def test_a_list_question_asks_for_exactly_the_values_that_two_pages_state(split):
    texts = "\n".join(passage.text for passage in demo_corpus())
    asked = demo_questions(f"{split}-list")
    assert len(asked) == len({question.question for question in asked}) == len(demo_questions(split))
    for question in asked:
        evidence = [hop["evidence"] for hop in question.metadata["path"]]
        items = [value for (value,) in question.items]
        assert all(fact.endswith(f" {item}") and fact in texts for fact, item in zip(evidence, items, strict=True))
        assert len(set(items)) == 2 and question.golden_answers[0] == " and ".join(items)
        assert list_f1([Trajectory(question)]) == [(0.0, "0 of 2 items, 0 wrong")]
