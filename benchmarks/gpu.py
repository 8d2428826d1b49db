"""What only a GPU can show: how full the search keeps a real engine, prefix hits, and training steps next to TRL's.

    python -m benchmarks gpu [--questions 100] [--iterations 16] [--turns 5]
    python -m benchmarks.gpu --tiny    # all of it at a tiny size on a CPU, which says nothing but that it works

The policy is `--model`, or has about 250 M random weights and a byte-level tokenizer of 8,192 tokens; it runs in vLLM
where that is installed, else in transformers. It is not asked to write what can be parsed: the engine gets the real
prompts, writes as many tokens as a policy would (lognormal, median 60), and the search reads a stub's words instead.
Prompts that differ have to differ as tokens, too. Then the same requests are sent again, all at once, to an engine with
an empty prefix cache: the search cannot be quicker than that. Both take turns. Training steps are those of
`benchmarks/training.py`, with a model of about 470 M weights and a vocabulary of 262,144 tokens. Below 9 minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, ClassVar

from benchmarks import stub, training
from benchmarks.table import Table, options
from reasonrag.core.config import ModelConfig, load_config
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import Completion, Prompt, Question
from reasonrag.formats import ReasonRAGFormat
from reasonrag.formats.base import PromptSet
from reasonrag.llm.base import LLM, Sampling
from reasonrag.mcts.search import TreeSearch
from reasonrag.pipeline.work import Count, Progress, work_through
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import RolloutEvaluator

Asked = tuple[Prompt, Sampling]


class Played:
    """An engine's time and a stub's words. Keeps what was asked, and counts the tokens that a prefix cache served."""

    name = "played"

    def __init__(self, inner: Any) -> None:
        self.slots = inner.slots
        self.asked: list[Asked] = []
        self.cached_tokens = self.cached_of = self.written_tokens = 0
        self._inner = inner

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        length = round(60 * math.exp(Random(sampling.seed).gauss(0, 0.6)))
        asked = replace(prompt, stop=()), replace(sampling, max_tokens=min(max(length, 8), 512))
        self.asked.append(asked)
        completion = await self._inner.complete(*asked)
        self.written_tokens += completion.completion_tokens or 0
        if completion.cached_tokens is not None:
            self.cached_tokens += completion.cached_tokens
            self.cached_of += completion.prompt_tokens or 0
        return Completion(stub.reply(prompt.stop, sampling.seed or 0))

    async def aclose(self) -> None:
        pass


class OnGPU(training.Bench):
    """Steps in seconds until the GPU has done them, in bfloat16, and the GPU's memory."""

    device: ClassVar[dict[str, bool]] = {"bf16": True, "use_cpu": False}
    unit = "s"

    @staticmethod
    def clock() -> float:
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    @staticmethod
    def peak_bytes(run: training.Step) -> float:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)


def write_policy(folder: Path, *, layers: int, width: int) -> str:
    """Write a policy with random weights, a byte-level tokenizer, and the demo world's chat template."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from reasonrag.demo.world import demo_corpus
    from reasonrag.training.model import model_path

    demo = AutoTokenizer.from_pretrained(model_path("demo"))
    pieces = ByteLevelBPETokenizer()
    prompts = (path.read_text(encoding="utf-8") for path in PromptSet.find().folder.rglob("*.txt"))
    texts = [*prompts, *(passage.contents for passage in demo_corpus(0)), stub.reply((), 0)]
    pieces.train_from_iterator(texts, vocab_size=8192, show_progress=False, special_tokens=demo.all_special_tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **demo.special_tokens_map)
    tokenizer.chat_template = demo.chat_template
    torch.manual_seed(0)
    shape = AutoConfig.for_model(
        "qwen2", vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), max_position_embeddings=16_384,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompt_lengths(path: str, asked: list[Asked]) -> list[int]:
    """Return the tokens of each prompt; end if two that differ are the same tokens."""
    from reasonrag.llm.chat_template import ChatTemplate

    chat = ChatTemplate.load(path)
    ids = {repr((prompt.messages, prompt.prefix)): chat.token_ids(prompt) for prompt, _ in asked}
    if len(set(ids.values())) < len(ids):
        sys.exit(f"{path}: {len(ids)} different prompts are {len(set(ids.values()))} as tokens; take another --model")
    return [len(ids[repr((prompt.messages, prompt.prefix))]) for prompt, _ in asked]


def open_engine(path: str) -> tuple[LLM, str]:
    """Return vLLM where it is installed, else transformers, and its name."""
    if importlib.util.find_spec("vllm"):
        from reasonrag.llm.vllm_engine import VLLMEngine

        # What ran before keeps some of the memory.
        address = ModelAddress("vllm", path)
        return VLLMEngine(address, ModelConfig(), gpu_memory_utilization=0.4, max_model_len=8192), "vLLM"
    from reasonrag.llm.local import open_transformers

    return open_transformers(ModelAddress("hf", path), ModelConfig(batch_size=64)), "transformers"


async def reset(engine: Any) -> None:
    """Empty the prefix cache of vLLM."""
    inner = getattr(engine, "_engine", None)
    if inner is not None:
        await inner.reset_prefix_cache()


async def explore(engine: Any, questions: list[Question], iterations: int) -> tuple[float, Played]:
    """Build trees; return the seconds and what was asked."""
    played = Played(engine)
    config = load_config(overrides={"search.iterations": iterations})
    rollouts = Engine(played, stub.StubRetriever(), ReasonRAGFormat())
    evaluator = RolloutEvaluator(rollouts, k=config.value.rollouts, alpha=config.value.alpha)
    search = TreeSearch(rollouts, evaluator, config.search, seed=0)

    async def work(place: int, question: Question, count: Count) -> None:
        await search.run(question)

    started = time.perf_counter()
    await work_through(questions, work, [played.slots], Progress(len(questions)))
    return time.perf_counter() - started, played


async def replay(engine: Any, asked: list[Asked]) -> float:
    """Send requests all at once; return the seconds."""
    started = time.perf_counter()
    await asyncio.gather(*(engine.complete(*request) for request in asked))
    return time.perf_counter() - started


async def engine_figures(
    table: Table, engine: Any, name: str, path: str, questions: int, iterations: int, rounds: int
) -> None:
    asked = stub.questions(questions)
    ratios: list[float] = []
    await explore(engine, asked[: max(questions // 10, 1)], iterations)  # warms up
    for number in range(rounds):
        print(f"{name}, round {number + 1} of {rounds} ...", file=sys.stderr)
        await reset(engine)
        explorer_s, played = await explore(engine, asked, iterations)
        await reset(engine)
        replay_s = await replay(engine, played.asked)
        ratios.append(replay_s / explorer_s)
    table.row(f"{name}: the search, to its requests all at once", median(ratios), "of their rate", limit=">= 0.9")
    table.row(f"{name}: tokens written", played.written_tokens / explorer_s, "a second")
    table.row(f"{name}: requests", len(played.asked) / explorer_s, "a second")
    hits = played.cached_tokens / played.cached_of if played.cached_of else None
    table.row(f"{name}: prompt tokens from the prefix cache", hits, "of all")
    texts = sorted(json.dumps([[m.content for m in p.messages], p.prefix]) for p, _ in played.asked)
    table.row(f"{name}: what a cache that forgets nothing could serve", shared(texts), "of all characters")
    lengths = prompt_lengths(path, played.asked)
    table.note(
        f"{questions} questions, {iterations} iterations: {len(played.asked):,} requests a round, {len(set(texts)):,} "
        f"different prompts, {sum(lengths) / len(lengths):.0f} tokens a prompt; {rounds} rounds"
    )


def shared(texts: list[str]) -> float:
    """Return the share of characters of sorted texts that begin the text before, too."""
    from reasonrag.core.text import common_length

    return sum(common_length(a, b) for a, b in zip(["", *texts], texts, strict=False)) / sum(map(len, texts))


def train_figures(table: Table, folder: str, turns: int, tiny: bool) -> None:
    from transformers import AutoTokenizer

    from reasonrag.training.model import model_path

    bench = (training.Bench if tiny else OnGPU)(table, folder)
    bench.use("", AutoTokenizer.from_pretrained(model_path("demo")), adapter=True)
    sizes: dict[str, Any] = {"layers": 1, "prompt": 20, "completion": 5, "width": 32}
    if not tiny:
        sizes = {"layers": 8, "prompt": 1000, "completion": 60, "width": 1024}
    training.large(bench, turns, **sizes, limit="<= 1.02")


def main() -> None:
    import torch

    parser = options(__doc__)
    parser.add_argument("--questions", type=int, help="trees; 100 in vLLM, else 2")
    parser.add_argument("--iterations", type=int, default=16, help="of a tree")
    parser.add_argument("--rounds", type=int, default=2, help="of the search and of the replay")
    parser.add_argument("--turns", type=int, default=5, help="training steps of each trainer")
    parser.add_argument("--model", help="folder of the policy, instead of random weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny size, on a CPU")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        print("There is no NVIDIA GPU here. --tiny runs everything at a tiny size on the CPU.", file=sys.stderr)
        sys.exit(2)
    table = Table(__doc__)
    folder = tempfile.mkdtemp()
    try:
        if given.tiny:
            given.questions, given.iterations, given.rounds, given.turns = 2, 2, 1, 1
        train_figures(table, folder, given.turns, given.tiny)
        shape = {"layers": 2, "width": 64} if given.tiny else {"layers": 16, "width": 1024}
        path = given.model or write_policy(Path(folder, "policy"), **shape)
        engine, name = open_engine(path)
        questions = given.questions or (100 if name == "vLLM" else 2)

        async def measure() -> None:
            await engine_figures(table, engine, name, path, questions, given.iterations, given.rounds)
            await engine.aclose()

        asyncio.run(measure())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table.show(given.json)


if __name__ == "__main__":
    main()
