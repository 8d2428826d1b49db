"""Policies and a retriever that a configuration names as `python:tests.evaluation.toy_policies:NAME`.

Questions read "Who directed film N?" and the policies decide by N. `RECORD` sees what is opened, asked and closed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reasonrag.core.errors import LLMError
from reasonrag.evaluation.run import Evaluation
from tests.fakes.scripted import ScriptedLLM
from tests.toys import ToyRetriever

GOLD = "Steven Spielberg"
HOSTILE = "\x1b[31m</table><script>alert(1)</script>\u202e"


@dataclass
class Record:
    events: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # by policy
    fails: set[int] = field(default_factory=set)  # questions at which every policy's backend gives up
    judge: Counter[str] = field(default_factory=Counter)  # requests by what they ask
    judge_fails: Callable[[str], bool] | None = None  # on which requests the judge gives no verdict
    on_call: Callable[[], None] | None = None

    def clear(self) -> None:
        self.__init__()


RECORD = Record()


class RecordedLLM(ScriptedLLM):
    def __init__(self, name, reply):
        def answer(prompt, sampling):
            RECORD.calls[name] += 1
            if RECORD.on_call:
                RECORD.on_call()
            number = int(re.search(r"film (\d+)\?", prompt.messages[1].content)[1])
            if number in RECORD.fails:
                raise LLMError("gone", cause="unreachable")
            return reply(number, prompt)

        super().__init__(answer, name=name)
        RECORD.events.append(f"open {name}")

    async def aclose(self):
        RECORD.events.append(f"close {self.name}")


def evaluate(configs, out, *, show=None, **options):
    """Run an evaluation with its report."""
    return Evaluation(configs, out, **options).run(show)


def _is(prompt, tag):
    return prompt.stop == (f"</{tag}>",)


def direct(config):
    """Answers at once; right where N is even."""
    return RecordedLLM("direct", lambda n, prompt: f"<answer>{GOLD if n % 2 == 0 else 'nobody'}</answer>")


def knower(config):
    """Answers at once: right where N is even without passages, and where three does not divide N with them."""

    def reply(n, prompt):
        known = n % 3 != 0 if "Documents:" in prompt.messages[-1].content else n % 2 == 0
        return f"<answer>{GOLD if known else 'nobody'}</answer>"

    return RecordedLLM("knower", reply)


def searcher(config):
    """Searches once; right where N is not a multiple of three. What it notes is hostile."""

    def reply(n, prompt):
        if _is(prompt, "evidence"):
            return f"<evidence>{HOSTILE}</evidence>"
        if _is(prompt, "answer") or "Previous Thoughts" in prompt.messages[1].content:
            return f"<answer>{'nobody' if n % 3 == 0 else GOLD}</answer>"
        return f"<query>Jaws {n}</query>"

    return RecordedLLM("searcher", reply)


def endless(config):
    """Never answers unless it has to; its every second note cannot be read."""

    def reply(n, prompt):
        if _is(prompt, "answer"):
            return f"<answer>{GOLD}</answer>"
        return "<evidence>a film</evidence>" if _is(prompt, "evidence") else f"<query>Jaws {n}</query>"

    return RecordedLLM("endless", reply)


def fact(n):
    return f"Spielberg made film {n}"


def stepper(config):
    """Speaks HiPRAG's format: a search, a step of its own, or two searches and a step of its own; by N modulo 3.

    It knows who directed every fourth film, what it says of its own is false where N is 2 modulo 5, and it is right
    where N is even.
    """

    def reply(n, prompt):
        if not prompt.stop:
            return fact(n) if n % 4 == 0 and "directed" in prompt.messages[1].content else "I do not know."
        turn = prompt.prefix
        if turn.endswith("<conclusion>"):
            return f"{fact(n)}{' and wrote it' * turn.count('</conclusion>')}</conclusion>"
        opening = "" if turn.endswith("<reasoning>") else "<step>\n<reasoning>"
        plan = (["directed"], [None], ["directed", "wrote", None])[n % 3]
        done = turn.count("</conclusion>")
        if done == len(plan):
            return f"</think>\n<answer>{GOLD if n % 2 == 0 else 'nobody'}</answer>"
        if plan[done]:
            return f"{opening}I must look</reasoning>\n<search>Who {plan[done]} film {n}?</search>"
        return f"{opening}I know</reasoning>\n<conclusion>{'false' if n % 5 == 2 else 'right'} {n}</conclusion>"

    return RecordedLLM("stepper", reply)


def sparing(config):
    """As `stepper`, and never searches: it knows everything, and is wrong about every fourth film."""

    def reply(n, prompt):
        if not prompt.prefix.endswith("<reasoning>"):
            return f"</think>\n<answer>{GOLD}</answer>"
        return f"I know</reasoning>\n<conclusion>{'false' if n % 4 == 0 else 'right'} {n}</conclusion>"

    return RecordedLLM("sparing", reply)


def arbiter(config):
    """A judge: equal statements say the same, what says "false" does not hold, and one name is right."""

    def reply(prompt, sampling):
        request = prompt.messages[-1].content
        told = dict(line.split(": ", 1) for line in request.splitlines() if ": " in line)
        RECORD.judge[next(iter(told))] += 1
        if RECORD.judge_fails and RECORD.judge_fails(request):
            raise LLMError("gone", cause="unreachable")
        if "Prediction" in told:
            return "YES" if told["Prediction"] == GOLD else "NO"
        if "Statement 1" in told:
            verdict = told["Statement 1"] == told["Statement 2"]
        else:
            verdict = "false" not in told["Conclusion"]
        return f"<answer>{verdict}</answer>"

    return ScriptedLLM(reply, name="arbiter")


def retriever(config, questions):
    RECORD.events.append("open retriever")
    return ToyRetriever()


def write_questions(path: Path, count: int = 12) -> Path:
    kinds = ("bridge", "| [x](http://evil) <b>\x1b[31m")
    rows = [
        {
            "id": f"q{n}",
            "question": f"Who directed film {n}?",
            "golden_answers": [GOLD],
            "metadata": {"type": kinds[n % 4 == 3], "hops": 1 + n % 2},
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
