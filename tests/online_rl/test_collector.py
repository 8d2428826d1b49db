"""Groups of scored trajectories: which questions come, which groups are refilled, and rewards that are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.types import Completion, Question, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.collector import Batch, BatchPlan, Collector
from reasonrag.online_rl.settings import RLSettings
from reasonrag.rewards import Score
from reasonrag.rollout import Engine
from tests.online_rl.toys import OwnReward, Words
from tests.toys import ToyRetriever

QUESTIONS = [Question(str(n), f"What is {n}?", (str(n),), dataset="toy") for n in range(40)]
END = 1


class Chat(ChatTemplate):
    """Words to numbers; a chat of few tokens."""

    end_of_turn = END

    def __init__(self) -> None:
        pass

    def chat_ids(self, prompt):
        return (2, 3)

    def encode(self, text):
        return tuple(sum(map(ord, word)) % 97 + 5 for word in text.split())


class Says(OwnReward):
    """The reward that a function of question, what was said and how often it was asked for tells."""

    def __init__(self, tell) -> None:
        self.tell, self.seen = tell, []
        self.calls: dict[tuple[str, str], int] = {}

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        found = []
        for trajectory in trajectories:
            key = (trajectory.question.id, trajectory.steps[-1].completion.text)
            self.calls[key] = self.calls.get(key, 0) + 1
            told = self.tell(int(trajectory.question.id), key[1], self.calls[key])
            found.append(told if isinstance(told, Score) else Score(told))
        return found


def answered(prompt, seed):
    return f"<think>t</think><answer>{seed % 1000}</answer>"


def collector(tell, *, say=answered, questions=QUESTIONS, per_step=4, group=4, dynamic=False, rounds=10, **more):
    process, processes = more.pop("process", 0), more.pop("processes", 1)
    engine = Engine(Words(say), ToyRetriever(), FORMATS["search_r1"](), max_steps=3)
    plan = BatchPlan(questions, group, per_step, 7, process, processes)
    settings = RLSettings(sampling={"dynamic": dynamic}, outage=more.pop("outage", {}), rollout=more)
    made = Collector(engine, Says(tell), Chat(), plan, settings)
    made.most_draws = rounds
    return made


def batch(made: Collector, number: int = 0) -> Batch:
    return asyncio.run(made.batch(number))


def ids(made: Batch) -> list[str]:
    return [group.question.id for group in made.groups]


def differs(question: int, said: str, call: int) -> float:
    return float(hash_of(said) % 5)


def hash_of(text: str) -> int:
    return sum(ord(char) * place for place, char in enumerate(text, 1))


def test_every_question_comes_once_an_epoch_in_an_order_of_that_epoch():
    plan = BatchPlan(QUESTIONS, 4, 4, 7)
    first = [q.id for number in range(10) for q in plan.questions_of(number)]
    second = [q.id for number in range(10, 20) for q in plan.questions_of(number)]
    assert sorted(first) == sorted(second) == sorted(q.id for q in QUESTIONS)
    assert first != second
    assert first == [q.id for number in range(10) for q in BatchPlan(QUESTIONS, 4, 4, 7).questions_of(number)]
    assert first != [q.id for number in range(10) for q in BatchPlan(QUESTIONS, 4, 4, 8).questions_of(number)]


def test_processes_share_a_batch_and_make_the_rollouts_that_one_would_make():
    alone = batch(collector(differs), 3)
    shared = [batch(collector(differs, process=p, processes=2), 3) for p in range(2)]
    assert ids(shared[0]) + ids(shared[1]) == ids(alone)
    texts = [[s.trajectory.steps[0].completion.text for s in made.samples] for made in (*shared, alone)]
    assert texts[0] + texts[1] == texts[2]


def test_a_question_that_comes_twice_in_a_batch_is_attempted_anew():
    made = batch(collector(differs, questions=QUESTIONS[:1], per_step=3))
    said = [sample.trajectory.steps[0].completion.text for sample in made.samples]
    assert ids(made) == ["0", "0", "0"]
    assert len(set(said)) == len(said) == 12


def flat_for(*names: str):
    """Groups of these questions earn the same whatever they say."""
    return lambda question, said, call: 0.5 if str(question) in names else float(hash_of(said) % 7)


def test_groups_without_variance_are_refilled_with_other_questions():
    plain = batch(collector(flat_for()))
    flat = ids(plain)[1:3]
    made = batch(collector(flat_for(*flat), dynamic=True))
    assert (made.dropped, made.flat, made.rounds) == (2, 0, 1)
    assert not set(ids(made)) & set(flat)
    assert len(set(ids(made))) == 4
    kept = [(plain.groups[n], made.groups[n]) for n in (0, 3)]
    assert all([s.transcripts for s in a.samples] == [s.transcripts for s in b.samples] for a, b in kept)


def test_a_batch_is_filled_however_many_rounds_it_takes():
    """DAPO draws until the batch is full (sec. 3.2): here 4 of 40 questions differ, the guard is out of the way."""
    made = batch(collector(flat_for(*map(str, range(36))), dynamic=True, rounds=50))
    assert (made.flat, len(made.groups)) == (0, 4)
    assert made.rounds > 3 and made.dropped >= made.rounds
    assert all(sample.score.value is not None for sample in made.samples)


def test_a_batch_that_cannot_be_filled_ends_the_training():
    made = collector(lambda q, said, call: 0.0, questions=QUESTIONS[:1], per_step=1, dynamic=True, rounds=2)
    with pytest.raises(RunError, match="replaced 2 groups for step 1, and the rewards of 1 of 1 are still all equal"):
        batch(made)
    assert len({seed for _, seed in made.engine.llm.asked}) == 12, "one question: new attempts at it"


def test_dynamic_sampling_is_deterministic_and_the_same_on_any_number_of_processes():
    flat = flat_for(*map(str, range(0, 40, 2)))
    alone, again = (batch(collector(flat, dynamic=True)) for _ in range(2))
    assert [s.transcripts for s in alone.samples] == [s.transcripts for s in again.samples]
    assert alone.dropped == again.dropped > 0
    shared = [batch(collector(flat, dynamic=True, process=p, processes=2)) for p in range(2)]
    assert [s.transcripts for made in shared for s in made.samples] == [s.transcripts for s in alone.samples]


def test_an_attempt_that_gets_no_reward_on_purpose_is_neither_an_outage_nor_asked_for_again():
    def tell(question, said, call):
        return Score(None, cause="no_reward") if question % 2 else differs(question, said, call)

    made = collector(tell, outage={"max_unscored": 0.0})
    done = batch(made)
    odd = sum(int(name) % 2 for name in ids(done))
    assert 0 < odd < 4
    assert done.unscored == {"no_reward": 4 * odd}
    assert set(made.reward.calls.values()) == {1}
    refilled = batch(collector(tell, dynamic=True, rounds=8))
    assert all(int(name) % 2 == 0 for name in ids(refilled)), "a group without any reward teaches nothing"


def test_a_judge_that_stays_away_ends_the_training_and_says_how_to_go_on():
    away = collector(lambda q, said, call: Score(None, cause="unreachable"))
    with pytest.raises(RunError, match=r"16 of 16 trajectories of step 4 have no reward \(\{'unreachable': 16\}\)"):
        batch(away, 3)


def test_a_reply_without_its_token_ids_sets_its_trajectory_aside():
    def say(prompt, seed):
        return Completion(answered(prompt, seed)) if seed % 8 == 0 else answered(prompt, seed)

    assert batch(collector(differs, say=say)).unscored == {"no_token_ids": 3}


@pytest.mark.fault("24", "rewards that are NaN or infinite, in online RL", "none, and counted")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_none(value, figure):
    made = batch(
        collector(lambda q, said, call: value if hash_of(said) % 4 == 0 else 1.0, outage={"max_unscored": 1.0})
    )
    figure(f"{value}: {made.unscored.get('not_finite')} of {len(made.samples)} set aside")
    assert set(made.unscored) == {"not_finite"}
    assert {s.score.value for s in made.samples} == {1.0, None}


def test_a_reward_that_gives_too_few_scores_is_refused():
    class Short(Says):
        async def score(self, trajectories, *, step):
            return (await super().score(trajectories, step=step))[:-1]

    made = collector(differs)
    made.reward = Short(differs)
    with pytest.raises(RunError, match="3 scores for 4 trajectories"):
        batch(made)


def test_a_trajectory_that_does_not_fit_is_set_aside_and_never_scored():
    full = LLMError("too long", cause="context_overflow")
    made = batch(
        collector(
            differs,
            say=lambda prompt, seed: full if seed % 5 == 0 else answered(prompt, seed),
            outage={"max_unscored": 1.0},
        )
    )
    gone = [s for s in made.samples if s.trajectory is None]
    assert gone and {(s.score.value, s.score.cause) for s in gone} == {(None, "context_overflow")}
    assert all([(row.completion_ids, row.mask) for row in s.transcripts] == [((END,), (0,))] for s in gone)


def test_a_batch_in_which_nothing_could_be_rolled_out_ends_the_training():
    full = LLMError("too long", cause="context_overflow")
    with pytest.raises(RunError, match=r"16 of 16 trajectories .*context_overflow.*larger context"):
        batch(collector(differs, say=lambda prompt, seed: full))


def test_a_policy_that_says_nothing_is_set_aside():
    made = batch(
        collector(
            differs,
            say=lambda prompt, seed: Completion("", token_ids=(), logprobs=()) if seed % 3 else answered(prompt, seed),
            outage={"max_unscored": 1.0},
        )
    )
    assert set(made.unscored) == {"empty"}
    assert all(row.completion_ids for s in made.samples for row in s.transcripts), (
        "TRL cannot take a row without tokens"
    )


def test_what_is_over_the_budget_counts_as_truncated_whatever_it_ends_with():
    made = batch(
        collector(
            differs, say=lambda p, s: f"<think>{'so ' * (s % 9)}</think><answer>x</answer>", max_trajectory_tokens=8
        )
    )
    lengths = [len(s.transcripts[0].prompt_ids) + s.policy_tokens for s in made.samples]
    assert [s.truncated for s in made.samples] == [length > 8 for length in lengths]
    assert len({s.truncated for s in made.samples}) == 2
