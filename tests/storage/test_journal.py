from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from contextlib import closing
from dataclasses import fields, replace

import pytest

from reasonrag.core.errors import Interrupted, LLMError, RunError
from reasonrag.core.types import Completion, FinishReason, Message, Prompt, Span
from reasonrag.llm.base import Caller, Sampling, caller
from reasonrag.llm.journaled import JournaledLLM, request_key
from reasonrag.storage.journal import Journal, Usage
from tests.fakes.scripted import ScriptedLLM

PROMPT = Prompt((Message("user", "hello"),), stop=("</x>",))


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


def ask(journal, llm, prompt=PROMPT, **sampling):
    return asyncio.run(JournaledLLM(llm, journal, kind="policy").complete(prompt, Sampling(**sampling)))


def test_a_greedy_policy_is_asked_once_whatever_the_seed_and_a_judge_once_for_each(journal):
    llm = ScriptedLLM(["a"])
    for seed in (1, 2, 1):
        ask(journal, llm, seed=seed, temperature=0.0)
    judge = JournaledLLM(ScriptedLLM(["no", "yes"]), journal, kind="judge")
    for seed, text in ((1, "no"), (2, "yes")):  # a second try
        assert asyncio.run(judge.complete(PROMPT, Sampling(seed=seed, temperature=0.0))).text == text


@pytest.mark.parametrize("wal", [True, False])
def test_a_journal_that_moves_to_a_shared_disk_or_back_goes_on(tmp_path, wal):
    path = tmp_path / "journal.sqlite"
    for mode in (wal, not wal):
        with contextlib.closing(Journal(path, wal=mode)) as journal:
            assert ask(journal, ScriptedLLM(["a"]), seed=1).text == "a"
            ask(journal, ScriptedLLM(["b"]), seed=2 + mode)
            assert (tmp_path / "journal.sqlite-shm").exists() == mode  # the memory that WAL shares
    with contextlib.closing(Journal(path)) as journal:
        assert journal.usage()["policy"].calls == 3


def test_everything_a_backend_reports_of_its_reply_comes_back(journal):
    reply = Completion("t\u2028\x00é", FinishReason.LENGTH, (7, 2**31 - 1), (-0.1, -1e-9), (7,), 3, 2)
    first = ask(journal, ScriptedLLM([reply]), seed=1)
    assert first == ask(journal, ScriptedLLM([]), seed=1)
    assert first.logprobs == pytest.approx(reply.logprobs, rel=1e-7)
    assert first == replace(reply, prompt_token_ids=None, logprobs=first.logprobs)


KEY = "sk-" + "aB3dE5fG7h" * 5


def test_a_secret_in_a_reply_is_neither_used_nor_kept(journal):
    reply = Completion(f"<query>{KEY}</query>", FinishReason.STOP, (1, 2), (-0.5, -1.5), (7,), 3, 2)
    clean = Completion("<query>***</query>", FinishReason.STOP, None, None, None, 3, 2)
    assert ask(journal, ScriptedLLM([reply]), seed=1) == ask(journal, ScriptedLLM([]), seed=1) == clean
    assert not any(KEY.encode() in file.read_bytes() for file in journal.path.parent.iterdir())


def test_a_plug_in_that_cancels_itself_is_a_failure_of_its_own(journal):
    with pytest.raises(LLMError, match="raised CancelledError") as caught:
        ask(journal, ScriptedLLM([asyncio.CancelledError()]))
    assert caught.value.cause == "bug:CancelledError"


def test_a_failure_is_noted_without_secrets(journal):
    asyncio.run(journal.put_failure("d", "q", "refused", f"{'so' * 141} who is Bearer {KEY}?"))
    assert list(journal.failures()) == [("d", "q", "refused", f"{'so' * 141} who is Bearer ***")]


def test_a_draining_run_replays_but_begins_nothing(journal):
    ask(journal, ScriptedLLM(["a"]), seed=1)
    journal.drain()
    assert ask(journal, ScriptedLLM([]), seed=1).text == "a"
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
    assert ask(second, ScriptedLLM([]), seed=1).text == "a"
    second.close()


def test_a_finished_tree_forgets_the_failure_before_it(journal):
    asyncio.run(journal.put_failure("d", "1", "timeout", "x"))
    assert list(journal.failures()) == [("d", "1", "timeout", "x")]
    asyncio.run(journal.put_tree("d", "1", b""))
    assert list(journal.failures()) == []


def test_requests_differ_by_model_kind_and_every_field_and_by_where_a_text_ends():
    message, span = Message("user", "ab"), Span("cd", (1, 2), by_policy=True)
    others = {"role": "system", "content": "a", "text": "c", "token_ids": (12,), "by_policy": False, "stop": ("x",)}

    def variants(value):
        return [replace(value, **{f.name: others.get(f.name, 7)}) for f in fields(value)]

    prompts = [Prompt((message,), (span,)), *(Prompt((m,), (span,)) for m in variants(message))]
    prompts += [Prompt((message,), (s,)) for s in variants(span)]
    prompts += [
        Prompt((message, message), (span,)),
        Prompt((message,), (span, span)),
        Prompt((message,), (span,), ("x",)),
    ]
    prompts += [Prompt((Message("user", "a"), Message("user", "b")), (span,)), Prompt((message,), (Span("cd", (1,)),))]
    requests = [(prompt, Sampling()) for prompt in prompts] + [(prompts[0], s) for s in variants(Sampling())]
    keys = {request_key("m", "policy", *request) for request in requests}
    assert len(keys) == len(requests) == 15
    keys |= {request_key("other", "policy", *requests[0]), request_key("m", "judge", *requests[0])}
    assert len(keys) == 17


def test_calls_of_a_question_are_found_while_it_is_in_work_and_counted_for_ever(tmp_path):
    async def work(journal, llm):
        caller.set(Caller("d/1"))
        return await JournaledLLM(llm, journal, kind="policy").complete(PROMPT, Sampling(seed=1))

    def reopened():
        return contextlib.closing(Journal(tmp_path / "journal.sqlite"))

    with reopened() as journal:
        first = asyncio.run(work(journal, ScriptedLLM(["a"])))
    with reopened() as journal:
        assert first == asyncio.run(work(journal, ScriptedLLM([])))
        assert ask(journal, ScriptedLLM(["b"]), seed=1).text == "b"  # nobody's call is another one
        asyncio.run(journal.put_tree("d", "1", b""))
        assert not journal._known, "the keys of a finished tree stay in memory"
        assert journal.usage()["policy"].calls == 2
        assert first == asyncio.run(work(journal, ScriptedLLM([])))


def test_a_journal_of_another_version_is_refused_by_its_layout_and_stays_as_it_is(tmp_path):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 4")
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"begun by a version with layout 4, and this version .* reads layout 7"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["endless view", "trigger", "number"])
def test_a_journal_of_a_stranger_is_refused_or_its_rows_are_not_used(tmp_path, kind):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    with closing(sqlite3.connect(path)) as db:
        if kind == "endless view":
            db.execute("DROP TABLE trees")
            endless = "WITH RECURSIVE x(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM x)"
            db.execute(f"CREATE VIEW trees AS {endless} SELECT i AS dataset, i AS question_id, i AS rows FROM x")
        elif kind == "trigger":
            db.execute("CREATE TRIGGER t AFTER INSERT ON calls BEGIN DELETE FROM trees; END")
        else:
            db.execute("INSERT INTO trees VALUES ('d', 'q', 5, 5)")
            db.commit()
    if kind != "number":
        with pytest.raises(RunError, match="views or triggers"):
            Journal(path)
    else:
        with closing(Journal(path)) as journal:
            assert not list(journal.finished())


def test_a_value_that_sqlite_refuses_fails_alone_and_the_journal_goes_on(journal):
    async def write():
        good = [journal.put_call(str(i), "policy", [i]) for i in range(5)]
        bad = journal.put_call("bad", "policy", [], tokens=(10**19, None))
        return await asyncio.gather(*good[:3], bad, *good[3:], return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(write(), 10))
    assert [type(result).__name__ for result in results] == ["NoneType"] * 3 + ["OverflowError"] + ["NoneType"] * 2
    assert journal.usage()["policy"].calls == 5
    asyncio.run(asyncio.wait_for(journal.put_failure("d", "1", "refused", "lone \ud83d surrogate"), 10))
    assert len(list(journal.failures())) == 1


def test_a_journal_that_another_process_holds_ends_a_run_that_is_stopped_soon(journal):
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    journal.drain()
    with pytest.raises(RunError, match=r"is locked by another process \(database is locked\).*; close it, then run"):
        asyncio.run(asyncio.wait_for(journal.put_call("00", "policy", "paid for"), 30))
    other.close()
    asyncio.run(journal.put_call("00", "policy", "paid for"))
    assert journal.usage()["policy"].calls == 1


def test_damaged_calls_are_noticed_before_one_is_paid_for_and_finished_trees_need_none(tmp_path):
    path = tmp_path / "journal.sqlite"

    async def fill(journal):
        await asyncio.gather(*(journal.put_call(f"{n:032x}", "policy", "x" * 200) for n in range(200)))
        await journal.put_tree("d", "1", b"rows")

    with contextlib.closing(Journal(path)) as journal:
        asyncio.run(fill(journal))
    raw = path.read_bytes()
    at = raw.index(b"x" * 200) // 4096 * 4096  # a page of replies, not the last one, which tells their number
    path.write_bytes(raw[:at] + bytes(4096) + raw[at + 4096 :])
    with contextlib.closing(Journal(path)) as journal:
        assert journal.finished() == {("d", "1")}
        with pytest.raises(RunError, match="damaged"):
            ask(journal, ScriptedLLM([]), seed=1)


def test_a_slot_is_free_again_once_the_reply_is_on_disk(journal):
    """Else a slow disk would let more calls be lost, and paid for again, than are in flight."""
    llm = ScriptedLLM(lambda prompt, sampling: "a")
    unstored = []

    async def work():
        policy = JournaledLLM(llm, journal, kind="policy", concurrency=2)
        calls = [asyncio.create_task(policy.complete(PROMPT, Sampling(seed=seed))) for seed in range(20)]
        while not all(call.done() for call in calls):
            stored = sum(usage.calls for usage in journal.usage().values())
            unstored.append(len(llm.prompts) - stored)
            await asyncio.sleep(0)

    asyncio.run(work())
    assert len(llm.prompts) == 20 and max(unstored) == 2


def test_a_reply_that_two_tasks_store_at_a_time_is_counted_once(journal):
    async def write():
        keys = [f"{number:032x}" for number in (*range(20), *range(10))]
        await asyncio.gather(*(journal.put_call(key, "judge", key, tokens=(None, 1)) for key in keys))

    asyncio.run(write())
    assert journal.usage() == {"judge": Usage(20, 0, 20, 0)} and journal.call(f"{3:032x}") == f"{3:032x}"


def test_a_damaged_reply_is_replaced_and_not_counted_again(journal):
    assert ask(journal, ScriptedLLM(["a"]), seed=1).text == "a"
    with contextlib.closing(sqlite3.connect(journal.path)) as other:
        other.execute("UPDATE calls SET reply = 'b'")
        other.commit()
    assert ask(journal, ScriptedLLM(["a"]), seed=1) == ask(journal, ScriptedLLM([]), seed=1)
    assert journal.usage()["policy"].calls == 1
