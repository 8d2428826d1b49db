"""Steps of trajectories on a transformers model in this process, with and without reuse of what prompts share.

    python -m benchmarks.kv_reuse [--questions 4] [--steps 2]

A model of 42 M random weights with a vocabulary of 32,000 writes two rollouts of each question, step by step, in one
batch a step. Prompts are laid out as those of ReasonRAG: a system text of 300 tokens, the question, the thoughts so
far, and at every second step documents of 200 tokens; a text has 8 to 48 tokens. Both ways write the same steps, in
turns. Takes about 30 s of CPU.
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.table import Table, options
from reasonrag.llm.prefix_cache import PrefixCache
from reasonrag.llm.row_sampling import Row, generate_rows

VOCABULARY = 32_000


class NoText:
    """Stands in for a tokenizer: the benchmark needs none."""

    def decode(self, token_ids: Any) -> str:
        return ""


def model() -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    ).eval()
    made.generation_config = GenerationConfig()
    return made


def batches(questions: int, steps: int) -> list[list[Row]]:
    """Return the rows of each step; half of the questions are shown documents at even steps, half at odd ones."""
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(count))

    system = ids(300)
    prompts = [question for question in (ids(25) for _ in range(questions)) for _ in range(2)]
    made = []
    for step in range(steps):
        rows = []
        for number, prompt in enumerate(prompts):
            documents = ids(200) if (step + number // 2) % 2 else ()
            written = int(min(max(draw.lognormvariate(3, 0.6), 8), 48))
            rows.append(Row(system + prompt + documents + ids(5), number, 1.0, 1.0, written, ()))
            prompts[number] = prompt + ids(written)
        made.append(rows)
    return made


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    table = Table(__doc__)
    policy, chat, prefixes = model(), NoText(), PrefixCache()
    steps = batches(given.questions, given.steps)
    seconds, same = {"whole": 0.0, "reused": 0.0}, 0
    for rows in steps:
        texts = []
        for way, cache in (("whole", None), ("reused", prefixes)):
            began = time.process_time()
            made = generate_rows(policy, chat, rows, end_ids=(), prefixes=cache)  # type: ignore[arg-type]
            seconds[way] += time.process_time() - began
            texts.append([completion.token_ids for completion in made])
        same += sum(one == other for one, other in zip(*texts, strict=True))
    calls = sum(map(len, steps))
    table.row("each prompt computed as a whole", seconds["whole"] / calls, "CPU s a call")
    table.row("shared prefixes computed once", seconds["reused"] / calls, "CPU s a call")
    table.row("ratio", seconds["reused"] / seconds["whole"], limit="<= 0.7")
    table.row("texts that are the same, sampled at temperature 1", same / calls, "of all", limit=">= 0.95")
    read = sum(len(row.prompt_ids) for rows in steps for row in rows) / calls
    written = sum(row.max_tokens for rows in steps for row in rows) / calls
    table.note(
        f"{calls} calls in {given.steps} batches; {read:.0f} prompt tokens and {written:.0f} written ones a call"
    )
    table.show(given.json)


if __name__ == "__main__":
    main()
