"""From scored trajectories to training rows: which tokens count, how much, and with whose advantage.

A trajectory is one row in a format with a growing turn, and one row per step in a format that asks with a fresh prompt
at each step (`transcript.transcripts`). GRPO compares trajectories; the rows of a trajectory share the result, as the
transitions of Agent Lightning do (arXiv:2508.03680).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reasonrag.online_rl.advantages import group_advantages
from reasonrag.online_rl.collector import Group, Sample
from reasonrag.online_rl.transcript import Transcript

Credit = Literal["trajectory", "step"]

# A column of the rollouts, one value per trajectory, which TRL passes on to its reward function `episode_reward`.
REWARD = "episode_reward"


@dataclass(frozen=True, slots=True)
class Row:
    """One training row.

    Attributes:
        tokens: what was read and written.
        mask: `[T]` 1 for the tokens that are trained on.
        weight: 1 / K in a trajectory with K rows that are trained on, so that their sum is 1; else 0.
        owners: numbers of the trajectories, in the batch, whose mean advantage the row gets.
        extra: `[T]` what the rewards of its steps add to that, at the tokens of each step; () if they have none. Where
            each token has an advantage, the rewards of the tokens instead.
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

    A trajectory without a reward has masks of zeros, so it counts in no mean and no loss. So has a truncated row if
    `mask_truncated`: TRL itself would miss one that is over its budget and ends with an end token.

    Args:
        groups: of a batch.
        mask_truncated: leave rows out of the loss that a token limit cut off.
        credit: whose advantage a row gets (`owners`).
        by_token: let `extra` be the rewards of tokens (`token_rewards`).

    Raises:
        ValueError: the columns of a row differ in length; TRL would silently fill a short mask with ones.
    """
    rows: list[Row] = []
    first = 0  # number of the group's first trajectory
    for group in groups:
        of_steps = step_advantages(group)
        for sample in group.samples:
            scored = sample.score.value is not None
            trained = [scored and any(t.mask) and not (t.truncated and mask_truncated) for t in sample.transcripts]
            spread = [over_tokens(sample, tokens, of_steps[sample.index]) for tokens in sample.transcripts]
            extras = token_rewards(sample, trained) if by_token else spread
            for tokens, is_trained, extra in zip(sample.transcripts, trained, extras, strict=True):
                _check_lengths(sample, tokens)
                rows.append(
                    Row(
                        tokens,
                        tokens.mask if is_trained else (0,) * len(tokens.mask),
                        1.0 / sum(trained) if is_trained else 0.0,
                        tuple(first + owner for owner in owners(group, sample, tokens, credit)),
                        extra,
                    )
                )
        first += len(group.samples)
    return rows


def owners(group: Group, sample: Sample, row: Transcript, credit: Credit) -> list[int]:
    """Return the numbers, in the group, of the trajectories whose mean advantage a row gets.

    With credit `step`, these are the trajectories that take the sample's steps up to the end of the row, word for
    word, itself included. The mean of their rewards is SPRE of the last of these steps (arXiv:2505.14069, eq. 1): the
    siblings that reach the same state are its k rollouts, so a value costs no call. GiGPO (arXiv:2505.10978)
    also groups repeated states, and compares the steps of such a group with each other; here every step is compared
    with the whole group of the question, so a step that no sibling takes has its trajectory's advantage, and not 0.
    Trajectories without a reward are left out.
    """
    words = _words(sample, row.steps)
    if credit == "trajectory" or words is None:
        return [sample.index]
    same = [other for other in group.samples if other.score.value is not None and _words(other, row.steps) == words]
    return [other.index for other in same] or [sample.index]


def step_advantages(group: Group) -> list[list[float]]:
    """Return the advantages of the steps of each sample: their own rewards less the mean at the same place, 0 without
    one. They are not divided by their deviation, so that the weight of the reward remains.
    """
    advantages: list[list[float]] = [[] for _ in group.samples]
    for place in range(max(len(sample.score.steps) for sample in group.samples)):
        rewards = [next(iter(sample.score.steps[place : place + 1]), None) for sample in group.samples]
        for of_sample, advantage in zip(advantages, group_advantages(rewards, scale="none"), strict=True):
            of_sample.append(advantage)
    return advantages


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
        tokens = len(step.completion.token_ids or ())
        written += [0.0 if at_end and token < tokens - 1 else number for token in range(tokens)]
    values = iter(written[len(written) - sum(row.mask) :])  # a row ends with its last step
    return tuple(next(values) if own else 0.0 for own in row.mask)


def token_rewards(sample: Sample, trained: Sequence[bool]) -> list[tuple[float, ...]]:
    """Return `[T]` of each row: a step's reward at its last token, the trajectory's at the last one that is trained on.

    Search-R1 and verl place them there (`apply_kl_penalty` and the reward managers of verl, on which HiPRAG's script
    runs). Rows that are not trained on have ().
    """
    steps = [reward or 0.0 for reward in sample.score.steps]
    rewards: list[tuple[float, ...]] = [()] * len(trained)
    outcome = sample.score.value
    for number in reversed([number for number, is_trained in enumerate(trained) if is_trained]):
        row = sample.transcripts[number]
        of_row = list(over_tokens(sample, row, steps, at_end=True) or (0.0,) * len(row.mask))
        if outcome is not None:
            of_row[max(place for place, own in enumerate(row.mask) if own)] += outcome
            outcome = None
        rewards[number] = tuple(of_row)
    return rewards


def columns(rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, list[Any] | None]:
    """Return the columns of TRL's `rollout_func`: token columns with one entry per row, rewards one per trajectory."""
    exact = all(row.tokens.logprobs is not None for row in rows)
    return {
        "prompt_ids": [list(row.tokens.prompt_ids) for row in rows],
        "completion_ids": [list(row.tokens.completion_ids) for row in rows],
        "logprobs": [list(row.tokens.logprobs or ()) for row in rows] if exact else None,
        "env_mask": [list(row.mask) for row in rows],
        REWARD: [sample.score.value for sample in samples],
    }


def _check_lengths(sample: Sample, tokens: Transcript) -> None:
    lengths = {len(tokens.completion_ids), len(tokens.mask), len(tokens.logprobs or tokens.mask)}
    if len(lengths) > 1 or not tokens.completion_ids:
        raise ValueError(f"a row of question {sample.question.id!r} has columns of lengths {sorted(lengths)}")


def _words(sample: Sample, steps: int) -> tuple[str, ...] | None:
    """Return what the policy wrote in the first steps; None if there are not as many."""
    if sample.trajectory is None or len(sample.trajectory.steps) < steps:
        return None
    return tuple(step.completion.text for step in sample.trajectory.steps[:steps])
