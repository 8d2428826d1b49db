from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from reasonrag.core.config import ModelConfig
from reasonrag.core.models import ModelAddress, demo_folder
from reasonrag.core.types import Completion, Message, Prompt, Span
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.llm.base import LLM, Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.server import ServerLLM
from reasonrag.llm.vllm_engine import VLLMEngine
from reasonrag.llm.weight_sync import VLLMServerSync, merged_parameters
from tests.llm.tiny import loaded
from tests.toys import QUESTION

pytestmark = pytest.mark.gpu

PROMPT = ReasonRAGFormat(PromptSet.find("brief")).prompt(QUESTION, ())


def ask(device: str, *samplings: Sampling, prompt: Prompt = PROMPT) -> list[Completion]:
    llm = loaded(demo_folder(), device=device)

    async def run() -> list[Completion]:
        async with aclosing(llm):
            return await asyncio.gather(*(llm.complete(prompt, sampling) for sampling in samplings))

    return asyncio.run(run())


def test_greedy_text_on_the_gpu_is_that_of_the_cpu():
    greedy = Sampling(temperature=0.0, max_tokens=32)
    (on_gpu,), (on_cpu,) = ask("cuda", greedy), ask("cpu", greedy)
    assert on_gpu.token_ids == on_cpu.token_ids
    assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-3)


def test_the_same_seed_gives_the_same_text_in_any_batch():
    samplings = [Sampling(seed=seed, max_tokens=32) for seed in range(8)]
    (alone,) = ask("cuda", samplings[3])
    assert ask("cuda", *samplings)[3].token_ids == alone.token_ids


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def open_turn(chat: ChatTemplate) -> Prompt:
    """A turn with a word that was sampled letter by letter: no tokenizer would write it so."""
    letters = tuple(token for letter in "Jaws" for token in chat.encode(letter))
    spans = (Span("<think>"), Span("Jaws", letters, by_policy=True), Span("\n<information>"))
    return Prompt((Message("user", "Who directed Jaws?"),), spans)


def completed(llm: LLM, prompt: Prompt, sampling: Sampling) -> Completion:
    async def run() -> Completion:
        async with aclosing(llm):
            return await llm.complete(prompt, sampling)

    return asyncio.run(run())


def logprobs_by(model, completion: Completion, temperature: float = 1.0) -> list[float]:
    """What transformers gives the sampled tokens."""
    import torch

    assert completion.prompt_token_ids and completion.token_ids
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids], device=model.device)
    with torch.no_grad():
        rows = (model(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1] / temperature).log_softmax(-1)
    return [rows[n, token].item() for n, token in enumerate(completion.token_ids)]


@needs_vllm
def test_vllm_in_this_process_reads_sampled_ids_and_reports_logprobs_at_the_temperature(tiny_model: Path):
    from transformers import AutoModelForCausalLM

    chat = ChatTemplate.load(str(tiny_model))
    prompt = open_turn(chat)
    address, config = ModelAddress("vllm", str(tiny_model)), ModelConfig(dtype="float32")
    engine = VLLMEngine(address, config, enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.2)
    completion = completed(engine, prompt, Sampling(temperature=0.7, max_tokens=12, seed=3))
    assert completion.prompt_token_ids == chat.token_ids(prompt)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert completion.logprobs == pytest.approx(logprobs_by(model, completion, 0.7), abs=1e-2)


@pytest.fixture
def vllm_server(tiny_model: Path) -> Iterator[str]:
    """A vLLM server on the second GPU."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    command += ["--gpu-memory-utilization", "0.2"]
    server = subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            assert server.poll() is None, "the server did not start"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


@needs_vllm
def test_a_vllm_server_writes_with_the_weights_that_were_pushed(vllm_server: str, tiny_model: Path, tmp_path: Path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    chat = ChatTemplate.load(str(tiny_model))
    prompt = open_turn(chat)
    base = AutoModelForCausalLM.from_pretrained(tiny_model).to("cuda:0")
    with closing(VLLMServerSync(vllm_server, tmp_path)) as sync:
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj", "gate_proj"]))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            sync.push(merged_parameters(model))
            llm = ServerLLM(
                f"{vllm_server}/v1", "tiny", encode=chat.token_ids, vllm=True, logprobs=True, processed_logprobs=True
            )
            completion = completed(llm, prompt, Sampling(temperature=0.7, max_tokens=12, seed=3))
            assert completion.logprobs == pytest.approx(logprobs_by(model, completion, 0.7), abs=1e-2)
