from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import pytest

from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.types import Completion, FinishReason, Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.journaled import JournaledLLM, request_key
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.storage.journal import Journal

PROMPT = Prompt((Message("user", "hello"),), stop=("</x>",))


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


def ask(journal, llm, prompt=PROMPT, **sampling):
    return asyncio.run(JournaledLLM(llm, journal, kind="policy").complete(prompt, Sampling(**sampling)))


def test_a_reply_is_paid_for_once(journal):
    llm = ScriptedLLM(["a", "b"])
    assert ask(journal, llm, seed=1) == ask(journal, llm, seed=1)
    assert len(llm.prompts) == 1


@pytest.mark.parametrize("wal", [True, False])
def test_a_journal_that_moves_to_a_shared_disk_or_back_goes_on(tmp_path, wal):
    path = tmp_path / "journal.sqlite"
    for mode in (wal, not wal):
        with contextlib.closing(Journal(path, wal=mode)) as journal:
            assert ask(journal, ScriptedLLM(["a"]), seed=1)[0].text == "a"
            ask(journal, ScriptedLLM(["b"]), seed=2 + mode)
            assert (tmp_path / "journal.sqlite-shm").exists() == mode  # the memory that WAL shares
    with contextlib.closing(Journal(path)) as journal:
        assert journal.usage()["policy"].calls == 3


def test_two_samples_of_one_prompt_stay_two(journal):
    llm = ScriptedLLM(["a", "b"])
    assert [ask(journal, llm, seed=seed)[0].text for seed in (1, 2, 1)] == ["a", "b", "a"]


def test_everything_a_backend_reports_comes_back(journal):
    reply = Completion("t\u2028\x00é", FinishReason.LENGTH, (1, 2), (-0.5, -1.5), (7,), 3, 2)
    first = ask(journal, ScriptedLLM([reply]), seed=1)
    assert first == ask(journal, ScriptedLLM([]), seed=1) == (reply,)


KEY = "sk-" + "aB3dE5fG7h" * 5


def test_a_secret_in_a_reply_is_neither_used_nor_kept(journal):
    reply = Completion(f"<query>{KEY}</query>", FinishReason.STOP, (1, 2), (-0.5, -1.5), (7,), 3, 2)
    clean = Completion("<query>***</query>", FinishReason.STOP, None, None, (7,), 3, 2)
    assert ask(journal, ScriptedLLM([reply]), seed=1) == ask(journal, ScriptedLLM([]), seed=1) == (clean,)
    assert not any(KEY.encode() in file.read_bytes() for file in journal.path.parent.iterdir())


def test_a_failure_is_noted_without_secrets(journal):
    asyncio.run(journal.put_failure("d", "q", "refused", f"{'so' * 141} who is Bearer {KEY}?"))
    assert list(journal.failures()) == [("d", "q", "refused", f"{'so' * 141} who is Bearer ***")]


def test_a_failed_call_is_not_kept(journal):
    llm = ScriptedLLM([RuntimeError("down"), "a"])
    with pytest.raises(RuntimeError):
        ask(journal, llm, seed=1)
    assert ask(journal, llm, seed=1)[0].text == "a"


def test_a_draining_run_replays_but_begins_nothing(journal):
    ask(journal, ScriptedLLM(["a"]), seed=1)
    journal.drain()
    assert ask(journal, ScriptedLLM([]), seed=1)[0].text == "a"
    with pytest.raises(Interrupted):
        ask(journal, ScriptedLLM(["b"]), seed=2)


def test_usage_adds_up_by_kind(journal):
    ask(journal, ScriptedLLM([Completion("a", prompt_tokens=5, completion_tokens=2)]), seed=1)
    ask(journal, ScriptedLLM([Completion("b")]), seed=2)
    usage = journal.usage()["policy"]
    assert (usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.unknown_tokens) == (2, 5, 2, 1)


def test_what_was_kept_is_there_for_the_next_process(tmp_path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    ask(first, ScriptedLLM(["a"]), seed=1)
    asyncio.run(first.put_tree("d", "1", b"rows"))
    first.close()
    second = Journal(path)
    assert second.finished() == {("d", "1")} and second.tree("d", "1") == b"rows"
    assert ask(second, ScriptedLLM([]), seed=1)[0].text == "a"
    second.close()


def test_many_writers_share_a_commit_and_all_are_on_disk(journal):
    async def write():
        await asyncio.gather(*(journal.put_call(str(i), "policy", [i]) for i in range(500)))

    asyncio.run(write())
    other = sqlite3.connect(journal.path)
    assert other.execute("SELECT COUNT(*) FROM calls").fetchone() == (500,)


def test_a_finished_tree_forgets_the_failure_before_it(journal):
    asyncio.run(journal.put_failure("d", "1", "timeout", "x"))
    assert list(journal.failures()) == [("d", "1", "timeout", "x")]
    asyncio.run(journal.put_tree("d", "1", b""))
    assert list(journal.failures()) == []


def test_nan_is_refused(journal):
    with pytest.raises(ValueError, match="JSON"):
        asyncio.run(journal.put_call("k", "policy", float("nan")))


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to be read as one" * 10)
    with pytest.raises(RunError, match="damaged"):
        Journal(path)


def test_requests_differ_by_model_kind_prompt_and_sampling():
    keys = {
        request_key(model, kind, prompt, Sampling(seed=seed))
        for model in ("a", "b")
        for kind in ("policy", "judge")
        for prompt in (PROMPT, Prompt(PROMPT.messages))
        for seed in (1, 2, None)
    }
    assert len(keys) == 24


def test_a_value_that_sqlite_refuses_fails_alone_and_the_journal_goes_on(journal):
    async def write():
        good = [journal.put_call(str(i), "policy", [i]) for i in range(5)]
        bad = journal.put_call("bad", "policy", [], prompt_tokens=10**19)
        return await asyncio.gather(*good[:3], bad, *good[3:], return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(write(), 10))
    assert [type(result).__name__ for result in results] == ["NoneType"] * 3 + ["OverflowError"] + ["NoneType"] * 2
    assert journal.usage()["policy"].calls == 5
    asyncio.run(asyncio.wait_for(journal.put_failure("d", "1", "refused", "lone \ud83d surrogate"), 10))
    assert len(list(journal.failures())) == 1
