"""What a run would cost, before it starts."""

from __future__ import annotations

import asyncio

from reasonrag.core.config import Config
from reasonrag.core.types import Question
from reasonrag.pipeline.parts import open_format, open_questions, open_retriever


def estimate(config: Config) -> str:
    """Return in words the calls, tokens and cost that a run needs at most. Calls no model."""
    questions = open_questions(config)
    format = open_format(config)
    search, steps = config.search, config.format.max_steps
    expansions = search.iterations
    rollout_steps = expansions * config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 0
    judgements = expansions if config.value.kind == "judge" else 0
    per_question = expansions + rollout_steps
    if search.max_calls is not None:
        last = config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 1
        judgements = min(judgements, search.max_calls)
        per_question = min(per_question, search.max_calls + last)
    sample = [format.prompt(question, ()) for question in questions[:100]]
    prompt_chars = sum(len(m.content) for p in sample for m in p.messages) / len(sample)
    passage_chars = asyncio.run(_passage_chars(config, questions[:20]))
    # About 4 characters a token; every second step shows passages; thoughts grow by about 60 tokens a step.
    prompt_tokens = (prompt_chars + passage_chars / 2) / 4 + 60 * steps / 2
    calls = len(questions) * per_question
    millions = calls * (prompt_tokens + 60) / 1e6
    lines = [
        f"{len(questions)} questions; at most {per_question} policy calls and {judgements} judge calls each",
        f"at most {calls} policy calls and {len(questions) * judgements} judge calls; early ends save most of them",
        f"about {prompt_tokens:.0f} prompt tokens and 60 written ones a call: {millions:.1f} M tokens at most",
    ]
    for role, count in (("policy", calls), ("judge", len(questions) * judgements)):
        if count and (cost := config.prices[role].cost(round(count * prompt_tokens), count * 60)) is not None:
            lines.append(f"{role} cost at most {cost:.2f}")
    return "\n".join(lines)


async def _passage_chars(config: Config, questions: list[Question]) -> float:
    """Return the mean characters of one search's passages. A server is not asked: its passages count as 100 words."""
    if config.retrieval.url:
        return 600.0 * config.retrieval.top_k
    retriever = open_retriever(config, questions)
    try:
        found = await retriever.search([q.question for q in questions], config.retrieval.top_k)
    finally:
        await retriever.aclose()
    shown = [min(len(p.contents), config.retrieval.max_passage_chars) for passages in found for p in passages]
    return sum(shown) / max(len(found), 1)
