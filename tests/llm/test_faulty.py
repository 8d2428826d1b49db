from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.rewards.judge import read_boolean, read_path, read_plan, read_yes_no
from tests.llm.faulty import JUNK, FaultyLLM

CALLS = [(Prompt((Message("user", str(number)),)), Sampling(seed=seed)) for number in range(200) for seed in range(2)]


def fates(**shares: float) -> list[str]:
    """What becomes of each call: `good`, `junk` or `hangs`."""
    llm = FaultyLLM(ScriptedLLM(lambda prompt, sampling: "good"), **shares)

    async def fate(prompt, sampling):
        try:
            (reply,) = await asyncio.wait_for(llm.complete(prompt, sampling), timeout=0.02)
        except TimeoutError:
            return "hangs"
        return "good" if reply.text == "good" else "junk"

    async def all_fates():
        return await asyncio.gather(*(fate(*call) for call in CALLS))

    return asyncio.run(all_fates())


def test_calls_fail_in_their_shares_by_content_alone():
    found = fates(timeout_share=0.2, junk_share=0.1)
    assert 0.15 < found.count("hangs") / len(found) < 0.25
    assert 0.06 < found.count("junk") / len(found) < 0.14
    assert found == fates(timeout_share=0.2, junk_share=0.1) != fates(timeout_share=0.2, junk_share=0.1, seed=1)
    assert found[::2] != found[1::2], "another seed is another call"


def test_without_shares_nothing_fails():
    assert set(fates()) == {"good"}


def test_junk_is_no_verdict_of_any_kind():
    readers = (read_boolean, read_yes_no, read_path, read_plan)
    assert [read(junk) for junk in JUNK for read in readers] == [None] * len(JUNK) * len(readers)


@pytest.mark.parametrize("shares", [(0.6, 0.5), (-0.1, 0), (0, 1.1), (float("nan"), 0)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ConfigError, match="shares"):
        FaultyLLM(ScriptedLLM([]), timeout_share=shares[0], junk_share=shares[1])


def test_it_is_named_by_how_it_fails():
    assert FaultyLLM(ScriptedLLM([]), timeout_share=0.1, seed=3).name == "faulty:0.1:0:3:scripted"
