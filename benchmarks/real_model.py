"""A real model in this process next to plain `transformers.generate`: CPU seconds a token, memory, one thread.

    python -m benchmarks real_model --model FOLDER [--calls 24] [--dtype bfloat16] [--vllm VENV/bin/python]

The requests are those of a tree search over invented questions, in the order in which it sends them: siblings, next
steps and rollouts, brief prompts, two passages of 300 characters. A stub's words go on in the tree; the model writes as
many tokens as a policy would (lognormal, median 40), whatever it writes. `generate` gets them one by one, and in
batches of eight in the same order; it needs the longest of a batch, and only what was asked for is counted. With
`--vllm`, vLLM's CPU build gets all requests at once over HTTP, and so does the engine in this process.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks import stub, vllm_replay
from benchmarks.process import memory_bytes
from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.core.types import Completion, Prompt
from reasonrag.formats import ReasonRAGFormat
from reasonrag.formats.base import PromptSet
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.local import TransformersLLM
from reasonrag.llm.server import ServerLLM
from reasonrag.mcts import TreeSearch
from reasonrag.rollout import Engine
from reasonrag.spre import RolloutEvaluator

# A base model has none; what it says does not matter here.
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model\n"
)
_AT_ONCE = 32
Asked = list[tuple[Prompt, Sampling]]


class Written:
    """Keeps what is asked and answers with a stub's words."""

    name = "written"

    def __init__(self) -> None:
        self.asked: Asked = []

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        length = round(40 * math.exp(random.Random(sampling.seed).gauss(0, 0.6)))
        written = replace(sampling, max_tokens=min(max(length, 8), 128))
        self.asked.append((replace(prompt, stop=()), written))
        return (Completion(stub.reply(prompt.stop, sampling.seed or 0)),)

    async def aclose(self) -> None:
        pass


def requests(calls: int) -> Asked:
    """Return requests from the middle of two trees that grow side by side."""
    written = Written()
    config = load_config(overrides={"search.iterations": 8})
    format = ReasonRAGFormat(PromptSet.find("brief"), max_passage_chars=300)
    engine = Engine(written, stub.StubRetriever(), format, max_steps=6, top_k=2)
    search = TreeSearch(engine, RolloutEvaluator(engine, k=2, alpha=config.value.alpha), config.search, seed=0)

    async def trees() -> None:
        await asyncio.gather(*(search.run(question) for question in stub.questions(2)))

    asyncio.run(trees())
    middle = len(written.asked) // 3
    return written.asked[middle : middle + calls]


class Model:
    """A model in a folder, and the ways to sample from it. Each returns prompt tokens and written ones."""

    def __init__(self, folder: str, dtype: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = tokenizer.chat_template or _TEMPLATE
        self.chat = ChatTemplate(tokenizer)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()

    def generate(self, asked: Asked, batch: int) -> tuple[int, int]:
        import torch

        pad, read, written = self.chat.tokenizer.pad_token_id or 0, 0, 0
        for start in range(0, len(asked), batch):
            group = asked[start : start + batch]
            prompts = [self.chat.token_ids(prompt) for prompt, _ in group]
            width = max(map(len, prompts))
            ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            length = max(sampling.max_tokens for _, sampling in group)
            self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=length,
                min_new_tokens=length, pad_token_id=pad,
            )  # fmt: skip
            read += sum(map(len, prompts))
            written += sum(sampling.max_tokens for _, sampling in group)
        return read, written

    def ours(self, asked: Asked, batch: int) -> tuple[int, int]:
        engine = TransformersLLM.borrowing(self.chat, name="model", batch_size=batch)

        async def all_at_once() -> list[tuple[Completion, ...]]:
            made = await asyncio.gather(*(engine.complete(*request) for request in asked))
            await engine.aclose()
            return made

        with engine.lent(self.model):
            return counted(asyncio.run(all_at_once()))


def measure(
    table: Table,
    name: str,
    run: Callable[[Asked, int], tuple[int, int]],
    asked: Asked,
    batch: int,
    clock: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Add the figures of a way; return CPU seconds a prompt token, and a written one."""
    name = f"{name}, batch {batch}"
    print(f"{name} ...", file=sys.stderr)
    gc.collect()
    before = _reset_peak()
    seconds, tokens = [], []
    for requested in ([(prompt, replace(sampling, max_tokens=1)) for prompt, sampling in asked], asked):
        began = clock()
        tokens.append(run(requested, batch))
        seconds.append(clock() - began)
    peak = memory_bytes("VmHWM") - before
    (read, ones), (_, written) = tokens
    reading, writing = seconds[0] / read, (seconds[1] - seconds[0]) / (written - ones)
    table.row(f"{name}: a call", seconds[1] / len(asked), "CPU s")
    table.row("  1,000 prompt tokens", 1000 * reading, "CPU s")
    table.row("  a written token", writing, "CPU s")
    if clock is time.process_time:
        table.row("  memory on top of the weights, at its peak", peak / 1e6, "MB")
    return reading, writing


def _reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_bytes("VmRSS")


def on_vllm(table: Table, python: str, folder: str, dtype: str, chat: ChatTemplate, asked: Asked) -> None:
    """Add the figures of vLLM's CPU build, asked over HTTP for all requests at once."""
    port = 18_327
    with tempfile.TemporaryDirectory() as linked:
        for file in Path(folder).iterdir():
            Path(linked, file.name).symlink_to(file.resolve())
        with vllm_replay.server(python, linked, port, _AT_ONCE, dtype) as pid:

            def run(asked: Asked, batch: int) -> tuple[int, int]:
                vllm_replay.reset(port)

                async def all_at_once() -> list[tuple[Completion, ...]]:
                    shape = {"api": "completions", "encode": chat.token_ids, "vllm": True}
                    engine = ServerLLM(f"http://127.0.0.1:{port}/v1", "tiny", concurrency=batch, **shape)
                    made = await asyncio.gather(*(engine.complete(*request) for request in asked))
                    await engine.aclose()
                    return made

                return counted(asyncio.run(all_at_once()))

            run(asked[:2], _AT_ONCE)
            measure(table, "vLLM", run, asked, _AT_ONCE, lambda: vllm_replay.cpu_s(pid))


def counted(made: Iterable[tuple[Completion, ...]]) -> tuple[int, int]:
    """Return the prompt tokens and the written tokens of calls."""
    completions = [completion for (completion,) in made]
    return sum(c.prompt_tokens or 0 for c in completions), sum(c.completion_tokens or 0 for c in completions)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", required=True, help="a folder of transformers")
    parser.add_argument("--calls", type=int, default=24, help="requests of a batched way; a fourth of them one by one")
    parser.add_argument("--dtype", help="default: that of the files")
    parser.add_argument("--vllm", help="the interpreter of an environment with vLLM's CPU build")
    given = parser.parse_args()
    table = Table(__doc__)
    model, asked = Model(given.model, given.dtype), requests(given.calls)
    model.generate([(asked[0][0], replace(asked[0][1], max_tokens=2))], 1)  # warms up
    for batch, share in ((1, 4), (8, 1)):
        some = asked[: len(asked) // share]
        theirs = measure(table, "generate", model.generate, some, batch)
        ours = measure(table, "this engine", model.ours, some, batch)
        table.row("  ratio of prompt tokens", ours[0] / theirs[0], "of generate's", limit="<= 1")
        table.row("  ratio of written tokens", ours[1] / theirs[1], "of generate's", limit="<= 1")
    measure(table, "this engine", model.ours, asked, _AT_ONCE)
    if given.vllm:
        on_vllm(table, given.vllm, given.model, str(model.model.dtype).removeprefix("torch."), model.chat, asked)
    written = sum(sampling.max_tokens for _, sampling in asked)
    table.note(f"{len(asked)} requests, {written / len(asked):.0f} written tokens a call; {model.model.dtype}")
    table.show(given.json)


if __name__ == "__main__":
    main()
