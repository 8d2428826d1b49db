"""From trajectories to training rows: sampled tokens, masks, weights and advantages.

A format with one growing turn gives one row per trajectory. A format that asks with a fresh prompt at
each step gives a row per step, as Agent Lightning (arXiv:2508.03680) and verl-agent (arXiv:2505.10978)
train on transitions. GRPO compares trajectories; the rows of a trajectory share the result.

Nothing is decoded and encoded again. The policy's ids are the sampled ones; each inserted text is encoded
by itself, as it was when the policy read it. So a trainer's log-probabilities are for exactly the tokens
that were sampled, after exactly the tokens that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from statistics import fmean, stdev
from typing import Any, Literal

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Question, Span, Step, Trajectory
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.rewards.base import NO_REWARD, Score

Baseline = Literal["group", "others"]
Credit = Literal["trajectory", "step"]

# A column of the rollouts, one value per trajectory, which
# TRL passes on to its reward function `episode_reward`.
REWARD = "episode_reward"


@dataclass(frozen=True, slots=True)
class Transcript:
    """Steps of a trajectory whose prompts extend each other, as one sequence of tokens.

    `completion_ids`, `mask` and `logprobs` are `[T]`: the mask is 1 for sampled and 0
    for inserted tokens; logprobs are natural logarithms at the sampling temperature,
    0.0 where the mask is 0. `prompt_ids` are `[P]`: the chat, and the text inserted
    before the policy's first token. `truncated` means that the policy reached a token
    limit. `steps` is the number of the trajectory's steps up to the end of this row.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    truncated: bool
    steps: int = 1

    def ended(self, end_id: int) -> Transcript:
        """Append a masked end token, unless the transcript is truncated or ends with that token already.

        An episode ends with a stop string, not with the end token: a trainer would count it as truncated.
        """
        if self.truncated or (self.completion_ids and self.completion_ids[-1] == end_id):
            return self
        logprobs = None if self.logprobs is None else (*self.logprobs, 0.0)
        completion_ids, mask = (*self.completion_ids, end_id), (*self.mask, 0)
        return replace(self, completion_ids=completion_ids, mask=mask, logprobs=logprobs)


def transcripts(trajectory: Trajectory, chat: ChatTemplate) -> tuple[Transcript, ...]:
    """Return the tokens of a trajectory: one transcript for each run of steps whose prompts extend each other.

    Each sampled token stands in exactly one row, after exactly the
    tokens that the policy read. Rows without sampled tokens are left
    out. Raise LLMError (`no_token_ids`) if a backend did not report them.
    """
    runs: list[list[Step]] = []
    open_turn: tuple[Span, ...] = ()  # up to the end of the last step
    for step in trajectory.steps:
        turn = step.prompt.turn
        # The prompt extends the last one if the chat is the
        # same, and its turn begins with the text so far.
        if runs and step.prompt.messages == runs[-1][0].prompt.messages and turn[: len(open_turn)] == open_turn:
            runs[-1].append(step)
        else:
            runs.append([step])
        sampled = _sampled(step)
        open_turn = (*turn, sampled) if sampled.text or sampled.token_ids else turn
    steps = accumulate(map(len, runs))  # up to the end of each row
    rows = [_transcript(run, chat, until) for run, until in zip(runs, steps, strict=True)]
    return tuple(row for row in rows if row.completion_ids)


def _sampled(step: Step) -> Span:
    return Span(step.completion.text, step.completion.token_ids, by_policy=True)


def _transcript(run: Sequence[Step], chat: ChatTemplate, steps: int) -> Transcript:
    last = run[-1]
    prompt_ids = list(chat.chat_ids(last.prompt))
    completion_ids: list[int] = []
    mask: list[int] = []
    for span in (*last.prompt.turn, _sampled(last)):
        if span.by_policy and span.token_ids is None:
            problem = "the policy's backend reports no token ids, and its text must not be encoded again"
            raise LLMError(problem, cause="no_token_ids")
        ids = chat.span_ids(span)
        if mask or span.by_policy:
            completion_ids += ids
            mask += [int(span.by_policy)] * len(ids)
        else:  # inserted before the policy's first token
            prompt_ids += ids
    reported = [logprob for step in run for logprob in step.completion.logprobs or ()]
    # Without one for each sampled token they cannot be used.
    logprobs = _at_mask(reported, mask) if len(reported) == sum(mask) else None
    is_truncated = last.completion.is_cut
    return Transcript(tuple(prompt_ids), tuple(completion_ids), tuple(mask), logprobs, is_truncated, steps)


def _at_mask(numbers: Sequence[float], mask: Sequence[int]) -> tuple[float, ...]:
    """Return `[T]` the next number where the mask is 1, 0.0 elsewhere."""
    remaining = iter(numbers)
    return tuple(next(remaining) if sampled else 0.0 for sampled in mask)


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt of a group. `trajectory` is None, and so is the score's value, if the policy's backend failed."""

    question: Question
    index: int  # within its group
    trajectory: Trajectory | None
    transcripts: tuple[Transcript, ...]  # at least one
    score: Score

    @property
    def policy_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        return sum(sum(row.mask) for row in self.transcripts)

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut off any of its rows."""
        return any(row.truncated for row in self.transcripts)

    @property
    def awaits_reward(self) -> bool:
        """Whether the reward is missing, but may be known after another request."""
        return self.trajectory is not None and self.score.value is None and self.score.cause != NO_REWARD


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one question by one policy: `samples` are `[G]`."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> list[float | None]:
        """`[G]`, None for a sample without a reward."""
        return [sample.score.value for sample in self.samples]

    @property
    def has_no_signal(self) -> bool:
        """Whether all rewards are equal for good: no missing one can still make the group differ."""
        pending = any(sample.awaits_reward or sample.trajectory is None for sample in self.samples)
        return not pending and not has_variance(self.rewards)


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "group", scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    """Return the `[G]` advantages of one group (arXiv:2402.03300, sec. 4.1; "Learning when to search", eq. 5).

    GRPO's own, in the loss, are TRL's; these are for RLOO and for the rewards of steps.

    Args:
        rewards: `[G]`; a member without a reward is left out of the baseline and gets advantage 0.
        baseline: the mean of the group, or the mean of the
            other members (RLOO, arXiv:2402.14740, sec. 2.3).
        scale: divide by the sample standard deviation of the same rewards; False is Dr. GRPO.
        epsilon: added to the deviation, as in TRL; a group without variance is not divided.

    >>> [round(a, 3) for a in group_advantages([1.0, 0.0, None, 0.5])]
    [1.0, -1.0, 0.0, 0.0]
    >>> group_advantages([1.0, 0.0, 0.0], baseline="others", scale=False)
    [1.0, -0.5, -0.5]
    """
    known = [reward for reward in rewards if reward is not None]
    advantages = []
    for reward in rewards:
        compared = list(known)
        if baseline == "others" and reward is not None:
            compared.remove(reward)
        if reward is None or len(known) < 2:
            advantages.append(0.0)
            continue
        deviation = stdev(compared) if scale and len(compared) > 1 else 0.0
        advantages.append((reward - fmean(compared)) / (deviation + epsilon if deviation else 1.0))
    return advantages


def gae(rewards: Sequence[float], values: Sequence[float], *, lam: float = 1.0) -> list[float]:
    """Return the `[T]` advantages of a trajectory's tokens (arXiv:1506.02438, eq. 16, gamma 1); plus values: returns.

    Inserted text between the policy's tokens is not a step in time, as in verl.

    Args:
        rewards: `[T]`, by token that the policy wrote.
        values: `[T]` the expected return before each token; zeros give the plain returns (REINFORCE).
        lam: in [0, 1]; with 1, an advantage is the return less the value.

    >>> gae([0.0, 1.0], [0.5, 0.25], lam=0.5)
    [0.125, 0.75]
    """
    advantages: list[float] = []
    next_value = next_advantage = 0.0
    # From the last token backwards; after it V and A are 0.
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        # A_t = delta_t + lambda * A_(t+1), with delta_t = r_t + V_(t+1) - V_t.
        next_advantage = reward + next_value - value + lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Return whether any two members differ: a group of equal rewards has no learning signal.

    >>> has_variance([1.0, None, 1.0]), has_variance([1.0, 0.5])
    (False, True)
    """
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) - min(known) > 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """One training row.

    Attributes:
        tokens: read and written by the policy.
        mask: `[T]` 1 for the tokens that are trained on.
        weight: 1 / K in a trajectory with K rows that are trained on, so that their sum is 1; else 0.
        owners: numbers of the trajectories, in the batch, whose mean advantage the row gets.
        extra: `[T]` the advantages of its steps' own rewards, at the tokens of each step; () without such
            rewards. Where each token has an advantage, the rewards of the tokens instead.
    """

    tokens: Transcript
    mask: tuple[int, ...]
    weight: float
    owners: tuple[int, ...]
    extra: tuple[float, ...] = ()

    @classmethod
    def padding(cls, token_id: int) -> Row:
        """Return a row that is not trained on."""
        return cls(Transcript((token_id,), (token_id,), (0,), (0.0,), False), (0,), 0.0, (0,))


def training_rows(
    groups: Sequence[Group], *, mask_truncated: bool, credit: Credit = "trajectory", by_token: bool = False
) -> list[Row]:
    """Return the rows of all trajectories, in order; each trajectory has at least one.

    A trajectory without a reward has masks of zeros, so it counts in no
    mean and no loss. So has a truncated row if `mask_truncated`: TRL itself
    would miss one that is over its budget and ends with an end token.

    Args:
        groups: of a batch.
        mask_truncated: leave rows out of the loss that a token limit cut off.
        credit: which trajectories' advantage a row gets (`owners`).
        by_token: let `extra` be the rewards of tokens (`token_rewards`).
    """
    rows: list[Row] = []
    first = 0  # number of the group's first trajectory
    for group in groups:
        steps_of = step_advantages(group)
        for sample in group.samples:
            trained = []
            for tokens in sample.transcripts:
                is_whole = not (tokens.truncated and mask_truncated)
                trained.append(sample.score.value is not None and any(tokens.mask) and is_whole)
            if by_token:
                extras = token_rewards(sample, trained)
            else:
                extras = [over_tokens(sample, tokens, steps_of[sample.index]) for tokens in sample.transcripts]
            for tokens, is_trained, extra in zip(sample.transcripts, trained, extras, strict=True):
                mask = tokens.mask if is_trained else (0,) * len(tokens.mask)
                weight = 1.0 / sum(trained) if is_trained else 0.0
                numbers = tuple(first + owner for owner in owners(group, sample, tokens, credit))
                rows.append(Row(tokens, mask, weight, numbers, extra))
        first += len(group.samples)
    return rows


def owners(group: Group, sample: Sample, row: Transcript, credit: Credit) -> list[int]:
    """Return the numbers, in the group, of the trajectories whose mean advantage a row gets.

    With credit `step`, these are the trajectories that take the sample's steps up
    to the end of the row, word for word, itself included. The mean of their
    rewards is SPRE of the last of these steps (arXiv:2505.14069, eq. 1): the
    siblings that reach the same state are its k rollouts, so a value costs no
    call. GiGPO (arXiv:2505.10978) also groups repeated states, and compares the
    steps of such a group with each other; here every step is compared with the
    whole group of the question, so a step that no sibling takes has its
    trajectory's advantage, and not 0. Trajectories without a reward are left out.
    """
    words = _words(sample, row.steps)
    if credit == "trajectory" or words is None:
        return [sample.index]
    # Word for word: equal texts can have different tokens, and are the same decision.
    same = [other for other in group.samples if other.score.value is not None and _words(other, row.steps) == words]
    return [other.index for other in same] or [sample.index]


def _words(sample: Sample, steps: int) -> tuple[str, ...] | None:
    """Return the policy's text in the first steps; None if there are not as many."""
    if sample.trajectory is None or len(sample.trajectory.steps) < steps:
        return None
    return tuple(step.completion.text for step in sample.trajectory.steps[:steps])


def step_advantages(group: Group) -> list[list[float]]:
    """Return the advantages of the steps of each sample: their own rewards less the mean at the same place.

    They are not divided by their deviation, so that the weight
    of the reward remains; 0 for a step without a reward.
    """
    places = zip_longest(*(sample.score.steps for sample in group.samples))
    advantages = [group_advantages(rewards, scale=False) for rewards in places]
    return [[at_place[sample.index] for at_place in advantages] for sample in group.samples]


def over_tokens(
    sample: Sample, row: Transcript, numbers: Sequence[float], *, at_end: bool = False
) -> tuple[float, ...]:
    """Return `[T]` the number of the step that wrote each token of a row, 0 at inserted ones; () without any.

    With `at_end`, only the last token of a step has it.
    """
    if not numbers or sample.trajectory is None:
        return ()
    written: list[float] = []
    for step, number in zip(sample.trajectory.steps[: row.steps], numbers, strict=False):
        of_step = [number] * len(step.completion.token_ids or ())
        if at_end:
            of_step[:-1] = [0.0] * len(of_step[:-1])
        written += of_step
    return _at_mask(written[len(written) - sum(row.mask) :], row.mask)  # a row ends with its last step


def token_rewards(sample: Sample, trained: Sequence[bool]) -> list[tuple[float, ...]]:
    """Return `[T]` of each row: a step's reward at its last token, the trajectory's at the last one that is trained on.

    Search-R1 and verl place them there (`apply_kl_penalty`
    and the reward managers of verl, on which HiPRAG's
    script runs). Rows that are not trained on have ().
    """
    steps = [reward or 0.0 for reward in sample.score.steps]
    rewards: list[tuple[float, ...]] = [()] * len(trained)
    outcome = sample.score.value
    # Backwards: the outcome belongs to the last row that is trained on, and to no other.
    for number in reversed(range(len(trained))):
        if not trained[number]:
            continue
        row = sample.transcripts[number]
        of_row = list(over_tokens(sample, row, steps, at_end=True) or (0.0,) * len(row.mask))
        if outcome is not None:
            of_row[max(place for place, sampled in enumerate(row.mask) if sampled)] += outcome
            outcome = None
        rewards[number] = tuple(of_row)
    return rewards


def columns(rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, list[Any] | None]:
    """Return the columns of TRL's `rollout_func`: token columns with one entry per row, rewards one per trajectory."""
    has_logprobs = all(row.tokens.logprobs is not None for row in rows)
    return {
        "prompt_ids": [list(row.tokens.prompt_ids) for row in rows],
        "completion_ids": [list(row.tokens.completion_ids) for row in rows],
        "logprobs": [list(row.tokens.logprobs or ()) for row in rows] if has_logprobs else None,
        "env_mask": [list(row.mask) for row in rows],
        REWARD: [sample.score.value for sample in samples],
    }
