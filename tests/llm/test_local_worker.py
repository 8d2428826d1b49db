"""The thread of the engine in this process: batches, errors, cancelled requests, its end, and clocks that jump."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import torch

from reasonrag.core.errors import LLMError
from reasonrag.llm.base import Sampling
from tests.llm.asking import PROMPT, SAMPLING, ask, ask_together
from tests.llm.tiny import loaded


def test_many_waiting_requests_are_run_in_full_batches(tiny_model):
    llm = loaded(tiny_model, batch_size=8, device="cpu")
    widths: list[int] = []
    llm.model.register_forward_pre_hook(lambda m, a, k: widths.append(len(k["input_ids"])), with_kwargs=True)
    ask_together(llm, [(PROMPT, Sampling(max_tokens=1, seed=i)) for i in range(32)])
    asyncio.run(llm.aclose())
    assert len(widths) <= 12


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("broken")])
def test_errors_of_the_model_reach_every_caller_and_the_worker_lives_on(tiny_model, error):
    llm = loaded(tiny_model, batch_size=4, device="cpu")

    def fail(module, args):
        raise error

    hook = llm.model.register_forward_pre_hook(fail)

    async def run():
        return await asyncio.gather(*(llm.complete(PROMPT, SAMPLING) for _ in range(3)), return_exceptions=True)

    failures = asyncio.run(run())
    assert [failure.cause for failure in failures] == ["engine"] * 3 and str(error) in str(failures[0])
    hook.remove()
    assert len(ask(llm).token_ids) == 24
    asyncio.run(llm.aclose())


def test_cancelled_callers_do_not_harm_the_others(tiny_llm):
    async def run():
        calls = [asyncio.create_task(tiny_llm.complete(PROMPT, Sampling(max_tokens=40, seed=i))) for i in range(20)]
        await asyncio.sleep(0.02)
        for call in calls[::2]:
            call.cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(run())
    assert all(len(result.token_ids) == 40 for result in results[1::2])
    assert len(ask(tiny_llm).token_ids) == 24


def test_closing_ends_what_is_running_and_fails_what_waits(tiny_model):
    llm = loaded(tiny_model, batch_size=1, device="cpu")
    threads = threading.active_count()

    async def run():
        calls = [asyncio.create_task(llm.complete(PROMPT, Sampling(max_tokens=400, seed=i))) for i in range(20)]
        await asyncio.sleep(0.05)
        calls[10].cancel()
        await asyncio.sleep(0)
        await llm.aclose()
        await llm.aclose()
        late = llm.complete(PROMPT, SAMPLING)
        return await asyncio.wait_for(asyncio.gather(*calls, late, return_exceptions=True), 60)

    results = asyncio.run(run())
    assert {result.cause for result in results if isinstance(result, LLMError)} == {"closed"}
    assert isinstance(results[-1], LLMError)
    assert threading.active_count() < threads + 1
    assert llm.model is None


JUMPING_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static long long jumped;
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (id == CLOCK_MONOTONIC) {
        long long ns = now->tv_nsec + __sync_add_and_fetch(&jumped, 1000000);
        now->tv_sec += ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return result;
}
"""
UNDER_IT = """
import asyncio, queue, threading
from types import SimpleNamespace
import torch
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM

waits = queue.SimpleQueue()
waits.put(None)
waits.get()  # leaves its lock free
waiter = threading.Thread(target=lambda: waits.get(timeout=0.0005), daemon=True)
waiter.start()

class Model:  # without transformers, whose import takes most of the time
    training, device = False, "cpu"
    eval = train = lambda self, mode=False: None
    config = generation_config = SimpleNamespace(eos_token_id=None)

    def __call__(self, input_ids, **rest):
        cache = SimpleNamespace(reorder_cache=lambda rows: None)
        return SimpleNamespace(logits=torch.zeros(len(input_ids), 1, 8), past_key_values=cache)

ends = SimpleNamespace(eos_token_id=None)
chat = SimpleNamespace(token_ids=lambda prompt: (1, 2), decode=lambda ids: "x", end_of_turn=None, tokenizer=ends)
llm = TransformersLLM(chat, name="stub", batch_size=4)

async def calls():
    prompt = Prompt((Message("user", "Who directed Jaws?"),))
    for turn in range(20):
        await asyncio.gather(*(llm.complete(prompt, Sampling(max_tokens=2)) for _ in range(turn % 5 + 1)))

with llm.lent(Model()):
    asyncio.run(calls())
print("waits for ever" if waiter.is_alive() else "over")
"""


@pytest.mark.fault(
    "A1",
    "a clock that jumps makes CPython 3.11's `SimpleQueue.get(timeout)` endless",
    "the thread of the model has no such wait",
    before="hung: 1 of 7 runs, its requests waited for ever",
)
@pytest.mark.slow
def test_the_wait_that_a_jump_of_the_clock_makes_endless_is_not_in_the_engine(tmp_path, figure):
    (tmp_path / "jump.c").write_text(JUMPING_CLOCK)
    library = tmp_path / "jump.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "jump.c", "-ldl"], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_IT], env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    figure(f"60 requests answered under such a clock; a bare wait in the same process {ran.stdout.strip()}")
    if sys.version_info < (3, 13):  # which computes the time left in another way
        assert ran.stdout.strip() == "waits for ever"
