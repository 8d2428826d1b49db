from __future__ import annotations

import asyncio
import math
from importlib.util import find_spec

import pytest

from reasonrag.core.errors import ConfigError, JudgeError, RunError
from reasonrag.core.settings import validate
from reasonrag.core.types import Completion, Prompt, Search, Step, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.rewards import RewardSettings, open_reward
from reasonrag.rewards.base import BatchReward
from reasonrag.rewards.outcome import search_confidence
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.rewards.toys import parts, score, trajectory, values
from tests.toys import QUESTION, ToyRetriever

SEARCH_R1 = {"format_weight": 0.2, "answer_present": 0.1}


def said(answer: str, *, stray: str = "") -> Trajectory:
    search = f"{stray}<think>a film</think><search>director of Jaws</search>"
    return trajectory("search_r1", search, f"<think>found</think><answer>{answer}</answer>")


def reward(**outcome):
    return open_reward(validate(RewardSettings, {"outcome": outcome}), parts("search_r1"))


def test_search_r1_v03_values():
    """Right in form, right out of form, form alone, an answer alone, nothing."""
    right, wrong = "Steven Spielberg", "George Lucas"
    nothing = trajectory("search_r1", "<think>I give up</think>")
    batch = [said(right), said(right, stray="so"), said(wrong), said(wrong, stray="so"), nothing]
    assert values(score(reward(**SEARCH_R1), *batch)) == [1.0, 0.8, 0.2, 0.1, 0.0]


def test_spre_of_a_finished_trajectory():
    """Right in three steps, half right in three, right at once, wrong, and none at all (arXiv:2505.14069, eq. 1)."""
    spre = open_reward(validate(RewardSettings, {"name": "spre", "spre": {"alpha": 0.5}}), parts("reasonrag"))
    found = ("<query>who?</query>", "<evidence>He did.</evidence>")
    batch = [
        trajectory("reasonrag", *found, "<answer>Steven Spielberg</answer>"),
        trajectory("reasonrag", *found, "<answer>Spielberg</answer>"),
        trajectory("reasonrag", "<answer>Steven Spielberg</answer>"),
        trajectory("reasonrag", "<answer>George Lucas</answer>"),
        trajectory("reasonrag", "Steven Spielberg", max_steps=1),
    ]
    assert values(score(spre, *batch)) == [0.125, round(0.125 * 2 / 3, 9), 0.5, 0.0, 0.0]
    assert score(spre, batch[1])[0].parts["path"] == 0.125


# beta-GRPO (arXiv:2505.17281). A token is a character here, so the span of a search can be seen.


def sampled(format, *words):
    """A trajectory whose policy gave each character the probability 1/2, but `?` 1/8 and `!` 1/16."""
    chances = {"?": -3.0, "!": -4.0}
    replies = []
    for text in words:
        logprobs = tuple(chances.get(char, -1.0) * math.log(2) for char in text)
        replies.append(Completion(text, token_ids=tuple(map(ord, text)), logprobs=logprobs))
    engine = Engine(ScriptedLLM(replies), ToyRetriever(), FORMATS[format](), max_steps=8)
    (made,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    return made


def spelled(ids):
    return "".join(map(chr, ids))


DOUBTS = {  # a thought and an answer in doubt, a search in doubt, the second of two in doubt
    "search_r1": ("<think>a film{}</think>", "<search>who made {}Jaws</search>", "<answer>{}</answer>"),
    "hiprag": ("a film{}</reasoning>", "<search>who made {}Jaws</search>", "</think><answer>{}</answer>"),
}


@pytest.mark.parametrize("format", DOUBTS)
def test_a_right_answer_after_a_search_in_doubt_counts_as_wrong(format):
    thought, search, answer = DOUBTS[format]
    concluded = ["c</conclusion>"] if format == "hiprag" else []

    def attempt(in_thought, in_searches, answer_text="Steven Spielberg"):
        words = []
        for doubt in in_searches:
            words += [thought.format(in_thought) + search.format(doubt), *concluded]
        return sampled(format, *words, answer.format(answer_text))

    batch = [attempt("!", [""]), attempt("", ["?"]), attempt("", ["", "!"]), attempt("!", ["?"], "George Lucas")]
    lowest = [0.5, 0.125, 0.0625, 0.125]
    for beta in (0.06, 0.1, 0.2, 0.6):
        ours = open_reward(
            validate(RewardSettings, {"outcome": {"search_confidence": beta}}), parts(format, decode=spelled)
        )
        found = score(ours, *batch)
        assert [round(each.parts["confidence"], 9) for each in found] == lowest
        expected = [float(right and sure >= beta) for right, sure in zip((1, 1, 1, 0), lowest, strict=True)]
        assert [each.value for each in found] == expected
    (unsearched,) = score(ours, sampled(format, answer.format("Steven Spielberg")))
    assert (unsearched.value, unsearched.parts["confidence"]) == (1.0, None)


def test_the_tokens_of_a_search_are_those_of_its_text():
    chat = ChatTemplate.load(str(find_spec("reasonrag").submodule_search_locations[0]) + "/demo/stream_policy")
    before, search = "<think>a film, but which one?</think>\n", "<search>director of Crimson Harbor</search>"
    ids = (*chat.encode(before), *chat.encode(search))
    for place in range(len(ids)):
        logprobs = tuple(-9.0 if at == place else -1.0 for at in range(len(ids)))
        step = Step(Prompt(()), Completion(before + search, token_ids=ids, logprobs=logprobs), Search("q"))
        sure = search_confidence(Trajectory(QUESTION, (step,)), "<search>", chat.decode)
        assert sure == math.exp(-9.0 if place >= len(chat.encode(before)) else -1.0)


def test_an_unsure_answer_keeps_what_its_form_earns():
    unsure = sampled(
        "search_r1", "<think>t</think><search>!</search>", "<think>c</think><answer>Steven Spielberg</answer>"
    )
    settings = {"outcome": {**SEARCH_R1, "search_confidence": 0.4}}
    (found,) = score(open_reward(validate(RewardSettings, settings), parts("search_r1", decode=spelled)), unsure)
    assert (found.value, found.parts["em"], found.parts["answer"]) == (0.2, 1.0, 0.0)


@pytest.mark.parametrize(
    ("format", "decode", "message"),
    [("search_r1", None, "which only `rl train` knows"), ("reasonrag", spelled, "'reasonrag' has none")],
)
def test_confidence_that_cannot_be_known_is_refused_at_once(format, decode, message):
    settings = validate(RewardSettings, {"outcome": {"search_confidence": 0.4}})
    with pytest.raises(ConfigError, match=message) as told:
        open_reward(settings, parts(format, decode=decode))
    assert "\n" not in str(told.value)


def test_a_policy_without_log_probabilities_ends_the_run_and_is_never_scored():
    settings = validate(RewardSettings, {"outcome": {"search_confidence": 0.4}})
    with pytest.raises(ConfigError, match="reports none"):
        score(open_reward(settings, parts("search_r1", decode=spelled)), said("Steven Spielberg"))


class Broken(BatchReward):
    """Fails in the way that the answer names."""

    async def _value(self, read, step):
        match read.trajectory.answer:
            case "nan" | "inf" as name:
                return float(name)
            case "part":
                read.parts["bonus"] = float("inf")
            case "judge":
                raise JudgeError("?", cause="timeout")
            case "bug":
                raise KeyError("x")
            case "disk":
                raise RunError("full")
        return 1.0


def test_failures_are_scores_without_a_value_and_touch_no_other():
    ours = open_reward(RewardSettings(name=f"{__name__}:Broken"), parts("search_r1"))
    names = ["fine", "nan", "inf", "part", "judge", "bug"]
    found = score(ours, *(said(name) for name in names))
    assert [s.value for s in found] == [1.0, None, None, None, None, None]
    assert [s.cause for s in found] == ["", "not_finite", "not_finite", "not_finite", "timeout", "bug:KeyError"]
    assert found[3].parts["bonus"] is None
    assert all(s.parts["rc"] == 1.0 for s in found)


def test_what_the_user_has_to_mend_is_raised():
    ours = open_reward(RewardSettings(name=f"{__name__}:Broken"), parts("search_r1"))
    with pytest.raises(RunError, match="full"):
        score(ours, said("disk"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"when_to_search": {"switch_step": -1}}, "switch_step"),
        ({"hiprag": {"lambda_q": 0.4}}, "unknown key 'hiprag.lambda_q'; did you mean 'hiprag.lambda_p'"),
        ({"hiprag": {"lambda_p": -0.1}}, "greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        validate(RewardSettings, given)
