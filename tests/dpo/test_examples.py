from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reasonrag.core.config import PolicyCard, load_config
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.settings import dump
from reasonrag.dpo.preferences import read_row
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.pipeline.tables import export_pairs
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import RunFolder
from reasonrag.storage.parquet import ShardWriter, write_parquet
from reasonrag.storage.tables import pair_schema, tree_schema
from reasonrag.training.settings import PairSettings
from tests.publish.toys import proguide_row
from tests.training.toys import token_pairs

DEMO = Path(__file__).parents[2] / "reasonrag/demo/policy"
QUESTIONS = 40


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate.load(str(DEMO))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run: two siblings a question, its pairs derived and written as build-tree does."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def make_run(path, rewards=(0.9, 0.1)):
    config = load_config(preset="demo")
    with RunFolder(path, config, {"questions": "toy"}).open() as folder:
        writer = ShardWriter(path / "trees", "nodes", tree_schema(), shard_rows=1000, keep_empty=True)
        for number in range(QUESTIONS):
            for row in tree(number, rewards):
                writer.add(row)
        writer.close()
        counts = export_pairs(path, config, policy="toy", config_hash=folder.config_hash)
        write_json(folder.path / "run.json", {"pairs": counts})
    return path


def tree(number, rewards):
    asked = [{"role": "system", "content": "Reason."}, {"role": "user", "content": f"Question: Who is {number}?"}]
    common = {"dataset": "toy", "question_id": str(number), "visits": 1, "valued": 1}
    yield common | {
        "node_id": 0,
        "parent_id": -1,
        "f1": None,
        "depth": 0,
        "action": "",
        "text": "",
        "stop": [],
        "content": "",
    }
    for place, reward in enumerate(rewards):
        text = f"So the answer is <answer>{'Port' if place else 'Kelda'}</answer>"
        content = "Port" if place else "Kelda"
        yield common | {
            **{"node_id": place + 1, "parent_id": 0, "depth": 1, "action": "answer", "content": content},
            **{"prompt": asked, "text": text, "stop": ["</answer>"], "finish_reason": "stop", "f1": reward},
        }


def opened(data, chat, *, context=None, **settings):
    return token_pairs(PairSettings(data=None if data is None else str(data), **settings), chat, context=context)


def says(text):
    return [{"role": "assistant", "content": text}]


def plain(number=0, **more):
    return {
        "prompt": [{"role": "user", "content": f"Who is {number}?"}],
        "chosen": says("Kelda"),
        "rejected": says("Port"),
    } | more


def step(number=0, **more):
    ends = {"chosen_end": "stop", "rejected_end": "turn", "margin": 0.5, "depth": 1}
    return plain(number, dataset="toy", question_id=str(number)) | ends | more


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def foreign(path, *rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def questions(pairs):
    return [pair.group[1] for pair in pairs]


# Where data may lie


def test_a_run_brings_its_split_and_how_its_policy_was_asked(run, chat):
    found = opened(run, chat)
    counted = json.loads((run / "run.json").read_text())["pairs"]
    assert (len(found.train), len(found.test)) == (counted["train"], counted["test"])
    assert found.test
    assert not set(questions(found.train)) & set(questions(found.test))
    assert found.card == PolicyCard.of(load_config(preset="demo").model_dump(mode="json"))
    assert (found.train[0].margin, found.train[0].depth) == (pytest.approx(0.8 * 0.9), 0)
    assert chat.decode(found.train[0].chosen[0].completion_ids) == "So the answer is <answer>Kelda</answer>"


def test_a_folder_of_pairs_is_read_with_its_configuration(tmp_path, chat):
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [step(1)], pair_schema())
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [step(2)], pair_schema())
    assert opened(tmp_path, chat).card is None
    (tmp_path / "config.yaml").write_text(dump(load_config(preset="demo")))
    found = opened(tmp_path, chat)
    assert (questions(found.train), questions(found.test)) == (["1"], ["2"])
    assert found.card == PolicyCard.of(load_config(preset="demo").model_dump(mode="json"))


@pytest.mark.parametrize("held_out", ["test", "dev"])
def test_files_that_are_named_as_held_out_are(held_out, tmp_path, chat):
    (tmp_path / "data").mkdir()
    foreign(tmp_path / "data/part-1.parquet", plain(1))
    foreign(tmp_path / f"data/{held_out}.parquet", plain(2))
    found = opened(tmp_path, chat)
    assert (len(found.train), len(found.test)) == (1, 1)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_is_all_for_training_even_with_question_ids(kind, tmp_path, chat):
    path = tmp_path / f"test.{kind}"
    rows = [step(n) for n in range(5)]
    if kind == "parquet":
        foreign(path, *[row | {"note": "x"} for row in rows])
    elif kind == "jsonl":
        jsonl(path, *rows)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    found = opened(path, chat)
    assert (questions(found.train), found.test, found.card) == (["0", "1", "2", "3", "4"], [], None)
    assert (found.train[0].depth, found.train[0].margin, found.train[0].group) == (1, 0.5, ("toy", "0"))


def test_a_prompt_may_begin_both_sides_and_rag_proguide_brings_its_own_fields(tmp_path, chat):
    whole = plain()
    implicit = {side: whole["prompt"] + whole[side] for side in ("chosen", "rejected")}
    (pair,) = opened(jsonl(tmp_path / "a.jsonl", implicit), chat).train
    (explicit,) = opened(jsonl(tmp_path / "b.jsonl", whole), chat).train
    assert (pair.chosen, pair.rejected) == (explicit.chosen, explicit.rejected)
    published = read_row("row 1", proguide_row(6))
    assert published.sides.prompt[1]["content"] == "Question: Who made film 6?"
    assert (published.types, published.depth) == (("query", "answer"), 2)


def test_pro_step_brings_its_question_depth_types_and_the_margin_of_its_f1():
    texts = {"prompt": "Question: Who made Jaws?\n", "chosen": "<search>Jaws</search>", "rejected": "Let me think."}
    kinds = {"chosen_action_type": "Search", "rejected_action_type": "Reason", "source": "mcts", "chosen_critic": 1}
    row = read_row(
        "row 1", {**texts, **kinds, "question_id": "q7", "step_level": 3, "chosen_f1": 0.8, "rejected_f1": 0.5}
    )
    assert (row.sides.prompt, row.sides.chosen) == (texts["prompt"], texts["chosen"])
    assert (row.depth, row.types, row.group) == (3, ("query", ""), ("", "q7"))
    assert row.margin == pytest.approx(0.3)


def test_plain_rows_have_no_margin_and_end_as_the_template_does(tmp_path, chat):
    (pair,) = opened(jsonl(tmp_path / "a.jsonl", plain()), chat).train
    assert (pair.margin, pair.depth) == (None, 0)
    assert chat.tokenizer.convert_ids_to_tokens(pair.chosen[0].completion_ids) == ["Kelda", "<|end|>"]


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts a Hub data set into the cache that the clients read offline."""
    commit, repository = "c" * 40, tmp_path / "hub/datasets--someone--pairs"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def put(**splits):
        folder = repository / "snapshots" / commit / "data"
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            foreign(folder / f"{split}.parquet", *rows)
        files = "".join(f"  - split: {split}\n    path: data/{split}.parquet\n" for split in splits)
        (folder.parent / "README.md").write_text(f"---\nconfigs:\n- config_name: all\n  data_files:\n{files}---\n")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs/v1.0.0").write_text(commit)
        return folder.parent

    return put


def test_a_hub_data_set_that_was_fetched_before_brings_its_splits_offline(cached, chat):
    folder = cached(train=[plain(1), plain(2)], validation=[plain(3)])
    (folder / "reasonrag.yaml").write_text("format: {name: reasonrag}\n")
    found = opened("someone/pairs@v1.0.0:all", chat)
    assert (len(found.train), len(found.test), found.facts["source"]) == (2, 1, "someone/pairs@v1.0.0:all")
    assert found.card == PolicyCard("format: {name: reasonrag}\n")
    for other in ("someone/pairs", "someone/pairs@v2.0.0", "someone/pairs@v1.0.0:other"):
        refused(other, chat, "cannot be fetched from the Hub")


@pytest.mark.parametrize("card", ["format: {name: 'python:os:system'}", "format: {prompts: ../../x}", "["])
def test_a_hub_data_set_cannot_say_what_is_not_a_policys_to_say(card, cached, chat):
    (cached(train=[plain(1)]) / "reasonrag.yaml").write_text(card)
    refused("someone/pairs@v1.0.0", chat, r"reasonrag\.yaml", ConfigError)


def test_a_hub_data_set_that_cannot_be_used_is_refused(cached, chat):
    cached(train_prefs=[plain()], test=[plain()])
    refused("someone/pairs@v1.0.0", chat, "no pairs to train on: the split train has none, 'test' has")
    cached(train=[plain(1)], test=[plain(2), plain(rejected=[])])
    refused("someone/pairs@v1.0.0", chat, r"split test: rejected: List should have .* in 1 row \(2\)")


# What is kept, and what it is known by


def test_a_limit_samples_questions_of_both_splits(run, chat):
    whole, some = opened(run, chat), opened(run, chat, limit=10, seed=3)
    assert len(set(questions(some.train))) == 10
    assert set(questions(some.train)) < set(questions(whole.train))
    one = opened(run, chat, limit=1)
    assert len(set(questions(one.test))) == 1 < len(set(questions(whole.test)))
    assert one.facts["lengths"]["pairs"]["test"] == len(one.test), "what is left out is not evaluated either"
    assert some.checksum == whole.checksum
    assert opened(run, chat, limit=10, seed=3).train == some.train
    assert opened(run, chat, limit=10, seed=4).train != some.train


@pytest.mark.parametrize(
    "change", [{"chosen": says("kelda")}, {"margin": 0.6}, {"rejected_end": "stop"}, {"question_id": "2"}]
)
def test_the_content_changes_with_a_row_and_not_with_the_files_name(change, tmp_path, chat):
    first = opened(jsonl(tmp_path / "a.jsonl", step()), chat).checksum
    assert opened(jsonl(tmp_path / "b.jsonl", step(note="x")), chat).checksum == first
    assert opened(jsonl(tmp_path / "c.jsonl", step(**change)), chat).checksum != first


# What is refused


def refused(data, chat, match, error=DataError, **settings):
    with pytest.raises(error, match=match) as caught:
        opened(data, chat, **settings)
    assert "\n" not in str(caught.value)


def test_no_data_is_refused(chat):
    refused(None, chat, "add --data", ConfigError)


def test_a_run_that_is_not_finished_is_refused(tmp_path, chat):
    (tmp_path / "journal.sqlite").touch()
    refused(tmp_path, chat, "its command has not finished", RunError)


def test_a_run_without_pairs_is_refused(tmp_path, chat):
    refused(make_run(tmp_path / "run", rewards=(0.5, 0.5)), chat, "no pairs to train on; build trees")


def test_a_run_whose_pairs_are_not_all_there_is_refused(tmp_path, chat):
    path = make_run(tmp_path / "run")
    next((path / "pairs").glob("test-*")).unlink()
    refused(path, chat, "0 test pairs found and [1-9]+ in run.json; write them again with `reasonrag pairs")


def test_a_missing_shard_is_refused(tmp_path, chat):
    write_parquet(tmp_path / "train-00000-of-00002.parquet", [step()], pair_schema())
    refused(tmp_path, chat, r"1 of 2 files of train-\*.parquet are there")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no/such/place/at all", "no such file or folder; give a run's folder, a file, or a Hub id"),
        ("missing.jsonl", "file not found"),
        ("no-one/no-such-data-set", "is no folder or file, and cannot be fetched from the Hub"),
    ],
)
def test_data_that_is_nowhere_is_refused(name, match, chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(name, chat, match)


def test_a_folder_without_pairs_is_refused(tmp_path, chat):
    refused(tmp_path, chat, "no run and no Parquet file in this folder")
    foreign(tmp_path / "test-1.parquet", plain())
    refused(tmp_path, chat, "no pairs to train on: the split train has none, 'test' has")


def test_pairs_that_do_not_say_how_steps_ended_are_refused_where_they_are_ours(tmp_path, chat):
    path = foreign(
        tmp_path / "a.parquet",
        plain(config_hash="0123", **{"question_id": "1", "dataset": "toy", "depth": 0, "margin": 0.5}),
    )
    refused(path, chat, "of another version of reasonrag, without chosen_end")


def test_an_empty_file_is_refused(tmp_path, chat):
    refused(jsonl(tmp_path / "a.jsonl"), chat, "no pairs in it")
    write_parquet(tmp_path / "a.parquet", [], pair_schema())
    refused(tmp_path / "a.parquet", chat, "no pairs in it")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected missing"),
        (plain(chosen=None), "chosen missing"),
        (plain(chosen="Kelda"), "prompt, chosen and rejected are not three texts"),
        (plain(rejected=[]), "rejected: List should have at least 1 item"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "prompt, chosen and rejected are not three texts"),
        (plain(prompt=[{"role": "user", "content": [{"type": "image"}]}]), "prompt: a message needs a role"),
        (step(chosen_end="eos"), "chosen.end: Input should be 'stop', 'turn' or 'length'"),
        (step(chosen=says("a") * 2), "chosen is not one message of the assistant"),
        (step(rejected=says("")), None),  # the policy ended its turn at once: its end token is scored
        (step(chosen=says("")), "no token of its chosen side can be scored"),
        (step(chosen_token_ids=[1, -1]), "chosen.token_ids: Input should be greater"),
        (
            step(prompt=[*plain()["prompt"], *says("a")], turn=[{"text": "b"}]),
            "the spans of an open turn differ from its text",
        ),
        (step(prompt=says("a")), "prompt is an open turn and nothing else"),
        (step(margin=float("nan")), "margin: Input should be a finite number"),
        (step(depth=-1), "depth: Input should be greater"),
        (step(question_id=""), "question_id is empty"),
        (plain(tools="[{}]"), "tools and chat_template_kwargs are not supported"),
        ({"chosen_steps": [], "rejected_steps": []}, "chosen: List should have at least 1 item"),
        ({"chosen_steps": [{"text": "a"}], "rejected_steps": ["b"]}, "chosen.prompt: Field required"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_number(row, match, tmp_path, chat):
    path = jsonl(tmp_path / "a.jsonl", plain(1), row, plain(2))
    if match is None:
        assert len(opened(path, chat).train) == 3
    elif match.startswith("no token"):
        refused(path, chat, f"a.jsonl row 2: {match}")
    else:
        refused(path, chat, rf"a.jsonl: .*{match}.* in 1 row \(2\)\. Needed are prompt, chosen and rejected")


def test_a_question_in_both_splits_is_refused_with_its_id(tmp_path, chat):
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [step(1), step(2), step(3)], pair_schema())
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [step(3), step(2)], pair_schema())
    refused(tmp_path, chat, "2 questions are in both splits, the first is '2' of 'toy'")
