"""What is learned from whole trajectories: which ones, every stage once, and the answer at the last step."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.settings import gather, validate
from reasonrag.core.types import Answer, Trajectory
from reasonrag.dpo.demonstrations import FORCED, answer_asked, read_demonstrations
from reasonrag.formats import FORMATS
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.rollout import Engine
from reasonrag.training.settings import SFTSettings
from tests.e2e import product
from tests.fakes.scripted import ScriptedLLM
from tests.llm.tiny import save_base_model
from tests.toys import QUESTION, ToyRetriever

STEPS = {
    "reasonrag": ("<query>Jaws</query>", "<evidence>by Spielberg</evidence>", "So <answer>Spielberg</answer>"),
    "search_r1": ("<think>Who?</think>\n<search>Jaws</search>", "<think>Him.</think>\n<answer>Spielberg</answer>"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "extractive"
    flags = ("--preset", "demo", "--policy", "extractive", "--limit", "12", "--iterations", "4", "--max-turns", "6")
    product.build(*flags, "--out", out)
    return out


def demonstrations(data, **settings):
    asked = {"examples": "trajectories", "test_share": 0.0} | settings
    return read_demonstrations(str(data), validate(SFTSettings, gather({}, overrides=asked)))


def texts(rows):
    return [row.sides.chosen[0].text for row in rows]


def test_the_best_trajectory_that_notes_its_answer_is_learned_in_all_its_steps_and_the_shortest_of_those(run):
    wanted: dict[str, tuple[float, bool, int, list[str]]] = {}
    nodes = product.tree_rows(run)
    trees: dict[str, list] = {}
    for node in nodes:
        trees.setdefault(node["question_id"], []).append(node)
    for question, tree in trees.items():
        for node in tree:
            path = []
            end = node
            while end["parent_id"] >= 0:
                path.insert(0, end)
                end = tree[end["parent_id"]]
            if (node["f1"] or 0) >= 0.8 and all(step["action"] != "malformed" for step in path):
                notes = {step["content"].lower() for step in path if step["action"] == "evidence"}
                answer = node["content"].lower()
                held = any(answer in note for note in notes)
                if answer in ("yes", "no"):
                    held = len(notes - {"none"}) > 1
                found = (-node["f1"], not held, len(path), [step["text"] for step in path])
                wanted[question] = min(wanted.get(question, found), found, key=lambda one: one[:3])
    found = demonstrations(run, per_question=1)
    assert found.trajectories["trajectories"] == len(wanted) > 2
    for question, (_, _, _, path) in wanted.items():
        own = [row for row in found.train if row.group[1] == question and row.types[0] != FORCED]
        assert [len(texts(own)), texts(own)[-1].startswith("So the answer")] == [len(path), True]


def test_every_stage_occurs_and_equal_steps_of_a_question_once(run):
    rows = demonstrations(run, per_question=4).train
    kinds = Counter(row.types[0] for row in rows)
    assert set(kinds) == {"query", "evidence", "answer", FORCED}
    keys = [(row.group, row.sides.chosen[0].prompt.messages, row.sides.chosen[0].text) for row in rows]
    assert len(keys) == len(set(keys))
    asked = [row.sides.chosen[0].prompt.messages[0].content for row in rows if row.types[0] == FORCED]
    assert set(asked) == {"Answer."}


@pytest.mark.parametrize("format", STEPS)
def test_the_forced_answer_is_asked_as_the_engine_asks_at_the_last_step(format):
    script, own = STEPS[format], FORMATS[format]()

    def attempt(max_steps, texts):
        llm = ScriptedLLM(texts)
        engine = Engine(llm, ToyRetriever(), own, max_steps=max_steps)
        (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
        return trajectory, llm.prompts[-1]

    free, _ = attempt(9, script)
    step = answer_asked(QUESTION, free.steps, own, final=True)
    assert step.end == "turn"
    forced, prompt = attempt(len(script), (*script[:-1], step.text))
    assert (step.prompt.messages, step.prompt.prefix, step.prompt.stop) == (prompt.messages, prompt.prefix, prompt.stop)
    assert forced.steps[-1].action == Answer("Spielberg", forced=True)
    back = answer_asked(QUESTION, forced.steps, own, final=False)
    if format == "reasonrag":
        assert (back.prompt, back.text) == (free.steps[-1].prompt, script[-1])
    else:  # the tag was opened for the policy, so there is no thought before it
        assert (step.text, back) == ("Spielberg</answer>", None)


def test_questions_are_held_out_whole(run):
    found = demonstrations(run, test_share=0.5)
    train, test = ({row.group for row in rows} for rows in (found.train, found.test))
    assert train and test and not train & test


def test_what_cannot_be_learned_from_is_refused(run, tmp_path):
    with pytest.raises(DataError, match=r"none of 12 questions has a complete trajectory .* --min-reward"):
        demonstrations(run, min_reward=1.0, test_share=0.999)
    with pytest.raises(RunError):
        demonstrations(tmp_path)


def test_a_base_model_learns_whole_trajectories_and_keeps_its_template(run, tmp_path):
    base = save_base_model(tmp_path / "base", context=4096)
    flags = ("--examples", "trajectories", "--data", run, "--model", base, "--batch-size", "4", "--accumulation", "1")
    refused = product.run("sft", "train", *flags, "--out", tmp_path / "sft")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith(f"--out {tmp_path / 'sft'} --chat-template gemma")
    done = product.run(
        *("sft", "train", *flags, "--chat-template", "gemma", "--set", "max_steps=2", "--merge"),
        *("--min-questions", "1", "--min-examples", "1", "--out", tmp_path / "sft"),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "sft" / "training.json").read_text())["data"]
    assert facts["kinds"]["train"][FORCED] > 0 and facts["held_out"]["questions"] > 0
    assert f"{facts['kinds']['train'][FORCED]} {FORCED}" in done.stderr
    for folder in (tmp_path / "sft", tmp_path / "sft" / "merged"):
        chat = ChatTemplate.load(str(folder))
        assert chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn) == "<end_of_turn>"
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [chat.tokenizer.eos_token_id, chat.end_of_turn]
        assert (folder / "reasonrag.yaml").is_file()
