"""Group advantages, next to those of published logs."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from reasonrag.online_rl.rows import group_advantages, has_variance

LOGS = Path(__file__).parents[3] / "shared" / "data" / "rollouts" / "grpo_groups.jsonl.gz"


@pytest.mark.data
@pytest.mark.skipif(not LOGS.exists(), reason="the data is not here")
@pytest.mark.parametrize(("logs", "baseline", "groups"), [("smoke_", "others", 80), ("exp_", "group", 3)])
def test_advantages_of_published_logs_are_found_again(logs, baseline, groups):
    """Their deviation is that of the sample plus 1e-6. They agree to 5.6e-6 of the largest.

    The logs were computed in float32, which has 6e-8: the deviation of rewards that lie close together, as a
    difference of rounded squares, keeps fewer digits than that.
    """
    rewards, advantages = defaultdict(list), defaultdict(list)
    with gzip.open(LOGS, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            rewards[row["group"]].append(row["reward"])
            advantages[row["group"]].append(row["advantage"])
    chosen = [group for group in rewards if group.startswith(logs)]
    assert len(chosen) == groups
    assert sum(has_variance(rewards[group]) for group in chosen) > groups / 4
    for group in chosen:
        found = group_advantages(rewards[group], baseline=baseline, epsilon=1e-6)
        assert found == pytest.approx(advantages[group], rel=1e-5, abs=2e-6)


def test_members_without_a_reward_are_in_no_mean_and_no_deviation():
    with_holes = group_advantages([1.0, None, 0.0, 0.5])
    assert [with_holes[n] for n in (0, 2, 3)] == group_advantages([1.0, 0.0, 0.5])
    assert with_holes[1] == 0.0


@pytest.mark.parametrize("rewards", [[None, None], [1.0, None, None], [0.3, 0.3, 0.3]])
def test_groups_that_teach_nothing_have_no_advantage(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)
    assert not has_variance(rewards)
