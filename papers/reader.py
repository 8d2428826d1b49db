"""A script that follows the prompts of `reasonrag` and of every baseline in the demo world, to compare the methods.

It understands the questions of the world and knows its famous facts; every other fact it has to read in its prompt. It
asks for the first fact that a question needs and that it neither knows nor sees, answers once there is none, and says
"unknown" if it has to answer earlier. What it guesses has a low log-probability. A configuration names it as
`--policy python:papers.reader:DemoReader`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError
from reasonrag.core.text import normalize_answer, quotable
from reasonrag.core.types import Completion, Prompt, Question
from reasonrag.demo.world import SPLITS, make_world
from reasonrag.formats.base import Stage
from reasonrag.formats.reasonrag import ECHOES, View, read
from reasonrag.llm.base import Sampling

_TAGS = {
    "query": "So the next query is <query>{}</query>",
    "evidence": "Based on the query, the relevant evidence is <evidence>{}</evidence>",
    "answer": "So the answer is <answer>{}</answer>",
}
_SENTENCES = {"evidence": "{}", "answer": "So the answer is: {}."}  # IRCoT, FLARE
_SELF_ASK = {"query": "Follow up: {}", "evidence": "Intermediate answer: {}", "answer": "So the final answer is: {}."}
_SEARCH_O1 = {
    "query": "<|begin_search_query|>{}<|end_search_query|>",
    "evidence": "**Final Information** {}",
    "answer": "\\boxed{{{}}}",
}
# The contract of a prompt, by its stop strings.
_CONTRACTS = {
    ("</query>", "</answer>"): _TAGS,
    ("</evidence>",): _TAGS,
    ("</answer>",): _TAGS,
    ("\n",): _SENTENCES,
    ("Intermediate answer:",): _SELF_ASK,
    ("<|end_search_query|>",): _SEARCH_O1,
    ("<|end_search_result|>",): _SEARCH_O1,
    ("}",): _SEARCH_O1 | {"answer": "{}}}"},
}
_SELF_ASK_OPENING = "Are follow up questions needed here: Yes."
_UNKNOWN = re.compile(r"unknown")
_ANSWERS = re.compile(r"\b(answer is):")


class DemoReader:
    """The script as a policy. A pure function of the prompt."""

    name = "demo-reader:0"

    def __init__(self, config: ModelConfig | None = None) -> None:
        world = make_world()
        self._questions = {question.question: question for split in SPLITS for question in world.questions(split)}

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion with token counts. Its tokens are characters, those of a guess unlikely."""
        try:
            contract = _CONTRACTS[prompt.stop]
            view = read(prompt)
            question = self._questions[view.question]
        except (ValueError, LookupError) as error:
            reason = "demo-reader answers questions of the demo world in the format reasonrag and in baselines"
            raise LLMError(reason, cause="refused") from error
        text = _write(view, question, contract)
        words = len(text.split())
        prompt_words = sum(len(message.content.split()) for message in prompt.messages)
        logprobs = [-0.05] * len(text)
        for guess in _UNKNOWN.finditer(text):
            logprobs[slice(*guess.span())] = [-3.0] * len("unknown")
        return Completion(
            text,
            token_ids=tuple(map(ord, text)),
            logprobs=tuple(logprobs),
            prompt_tokens=prompt_words,
            completion_tokens=words,
        )

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    async def aclose(self) -> None:
        pass


def _write(view: View, question: Question, contract: dict[str, str]) -> str:
    """Return the next step in the words of a contract."""
    if contract is _SENTENCES and _SELF_ASK_OPENING in view.thoughts:
        contract = _SELF_ASK
    noted = normalize_answer("; ".join(view.thoughts))
    shown = normalize_answer("; ".join(text for _, text in view.documents))
    path = [] if question.metadata["known"] else question.metadata["path"]
    missing, fact = "", ""
    for hop in path:
        evidence = normalize_answer(hop["evidence"])
        if not missing and evidence not in noted and evidence not in shown:
            missing = hop["query"]
        if not fact and evidence not in noted and evidence in shown:
            fact = hop["evidence"]
    if contract is _SENTENCES and missing and not fact:
        fact = f"{missing} unknown"  # a guess, which is searched for next
    if view.stage is Stage.GROUNDING or (contract is _SELF_ASK and view.stop == ("\n",)):
        if not fact and contract is _TAGS:
            return "<evidence>None</evidence>"
        return _fill(contract, "evidence", fact or "None")
    if missing and contract is _SENTENCES:
        return _fill(contract, "evidence", _ANSWERS.sub(r"\1", fact))  # a sentence of a passage answers nothing
    if missing and not view.final:
        return _fill(contract, "query", missing)
    return _fill(contract, "answer", "unknown" if missing else question.golden_answers[0])


def _fill(contract: dict[str, str], kind: str, text: str) -> str:
    text = quotable(text) or "unknown"
    return contract[kind].format(f'"{text}"' if text in ECHOES else text)
