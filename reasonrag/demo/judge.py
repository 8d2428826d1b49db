"""An exact judge of the demo world: `--value judge` without a judge model, and with errors on demand.

It reads only the requests that `rewards.judge` writes, recognises them
by the labels of their lines in any prompt set, and replies in their
contracts. It uses only what a request shows and the facts of the world.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import chain
from random import Random
from typing import Any

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.models import DEMO_FORMATS, ModelAddress
from reasonrag.core.text import exact_match, normalize_answer, token_f1
from reasonrag.core.types import Action, Answer, Completion, Malformed, Note, Prompt, Question, Search, Step
from reasonrag.demo.world import DEMO_SPLITS, RELATIONS, demo_questions, make_world, words
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.formats.base import Reading
from reasonrag.llm.base import Sampling
from reasonrag.rewards.judge import ACCURACY_SCORES, PLANNER_SCORES, REASONING_SCORES, PathScores

_CLASSES = {relation.key: relation.target for relation in RELATIONS if isinstance(relation.target, tuple)}
_MORE = {relation.more: relation.key for relation in RELATIONS if relation.more}
# Both read normalised text: lower case, without punctuation and articles.
_COMPARES = re.compile(rf"(\w+ \w+) (?:is )?({'|'.join(_MORE)}) than (\w+ \w+)")
_SAME = re.compile(r"(\w+ \w+) and (\w+ \w+) (do not have|have)(?: same| (different)) (\w+)")
_CLAUSE = re.compile(r"\b\d+[.)]|[;.,:!?\n]")  # the number of a plan's item is not part of a clause


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact as a text states it: `query` and `value`, normalised, and whether the claim is true."""

    query: str
    value: str
    true: bool


@dataclass(frozen=True)
class Knowledge:
    """All facts of one world: every split and the famous part."""

    facts: dict[str, str]  # query ("NAME KEY") to value, both normalised
    names: frozenset[str]  # of all entities, normalised
    questions: dict[tuple[str, tuple[str, ...]], Question]  # of all splits, by text and golden answers

    def claims(self, text: str) -> Iterator[Claim]:
        """Yield each fact that the text states, at most one per clause: "NAME KEY" and the words that follow."""
        for clause in _CLAUSE.split(text):
            words = normalize_answer(clause).split()
            # A query has three words, the two of a name and a key; the value follows it.
            for start in range(len(words) - 3):
                query, value = " ".join(words[start : start + 3]), " ".join(words[start + 3 :])
                if query in self.facts:
                    yield Claim(query, value, value == self.facts[query])
                    break

    def compares(self, text: str) -> bool | None:
        """Return whether "A is larger than B" or "A and B have the same KEY" is true; None for any other text."""
        normalised = normalize_answer(text)
        if match := _COMPARES.fullmatch(normalised):
            key = _MORE[match[2]]
            first, second = (self.facts.get(f"{name} {key}") for name in (match[1], match[3]))
            classes = _CLASSES[key]
            return None if first is None or second is None else classes.index(first) > classes.index(second)
        if match := _SAME.fullmatch(normalised):
            first, second = (self.facts.get(f"{name} {match[5]}") for name in (match[1], match[2]))
            apart = (match[4] is not None) != (match[3] != "have")
            return None if first is None or second is None else (first != second) is apart
        return None


# Parts of names, and values; names of relations, such as "capital", are words of the real world as well.
_WORDS = frozenset(map(normalize_answer, words())) - {relation.key for relation in RELATIONS}


@lru_cache(maxsize=4)
def knowledge_of(world_seed: int) -> Knowledge:
    """Return the facts of the world with that seed."""
    parts = make_world(world_seed).all_parts
    facts = {
        normalize_answer(f"{name} {key}"): normalize_answer(value)
        for part in parts
        for name, known in part.facts.items()
        for key, value in known.items()
    }
    names = frozenset(normalize_answer(name) for part in parts for name in part.facts)
    asked = (question for split in DEMO_SPLITS for question in demo_questions(split, seed=world_seed))
    questions = {(question.question, question.golden_answers): question for question in asked}
    return Knowledge(facts, names, questions)


Fields = Mapping[str, str | list[str]]

_TAGS = "think|step|reasoning|search|context|conclusion|information|reflect|tool_call|tool_response|answer"
_SHOWN_TAG = re.compile(rf"‹(?=/?(?:{_TAGS})>)")
_ITEM = re.compile(r"(?:(?<=\s)|^)\d+[.)]\s+([^;\n]*?)(?=\s\d+[.)]\s|[;\n]|$)")


Verdict = tuple[str, Callable[[Random], str]]  # the correct reply, and a function that draws a wrong one


def same_meaning(world: Knowledge, fields: Fields) -> Verdict | None:
    """Judge two statements as equal if they state the same fact with the same value, or one is the bare value."""
    first, second = _text(fields, "Statement 1"), _text(fields, "Statement 2")
    queries, values = set(), set()
    for text in (first, second):
        claims = list(world.claims(text))
        if len(claims) == 1:
            queries.add(claims[0].query)
            values.add(claims[0].value)
        else:  # a bare value, or more than one fact
            values.add(normalize_answer(text))
    same = len(values) == 1 and len(queries) <= 1
    return _boolean(same or normalize_answer(first) == normalize_answer(second))


def step_holds(world: Knowledge, fields: Fields) -> Verdict | None:
    """Judge a step as true if all stated facts are true and its conclusion states a fact or follows from one.

    A conclusion follows if it is a correct comparison, or the value of a fact
    that the reasoning states. Any other conclusion in the words of this world
    ("yes", a bare name, "None") is False; one in other words cannot be judged.
    """
    reasoning, conclusion = _text(fields, "Reasoning"), _text(fields, "Conclusion")
    stated, concluded = list(world.claims(reasoning)), list(world.claims(conclusion))
    if not all(claim.true for claim in (*stated, *concluded)):
        return _boolean(False)
    compared = world.compares(conclusion)
    if concluded or compared is not None:
        return _boolean(compared is not False)
    normalised = normalize_answer(conclusion)
    if normalised in {claim.value for claim in stated}:
        return _boolean(True)
    # A policy that guesses combines words of this world into entities, which are then known not to exist.
    can_be_judged = normalised in ("", "none", "yes", "no") or not _WORDS.isdisjoint(normalised.split())
    return _boolean(False) if can_be_judged else None


def answer(world: Knowledge, fields: Fields) -> Verdict | None:
    """Reply YES if the prediction equals one of the answers (exact match)."""
    match = exact_match(_text(fields, "Prediction"), _text(fields, "Reference answers").split(" | ")) > 0
    return ("YES", lambda generator: "NO") if match else ("NO", lambda generator: "YES")


def path(world: Knowledge, fields: Fields, question: Question) -> Verdict:
    """Reply with the six scores of `score_path`."""
    text = "\n".join(_SHOWN_TAG.sub("<", piece) for piece in fields["Trajectory"])
    reference = tuple(fields["Reference path"])
    scores = score_path(world, question, reference, read(text))

    def wrong(generator: Random) -> str:
        while True:
            planned, planner = generator.randint(0, 4), generator.choice(PLANNER_SCORES)
            steps = planned, generator.randint(0, planned), generator.randint(0, len(reference))
            drawn = PathScores(planner, *steps, generator.choice(ACCURACY_SCORES), generator.choice(REASONING_SCORES))
            if drawn != scores:
                return json.dumps(asdict(drawn))

    return json.dumps(asdict(scores)), wrong


def plan(world: Knowledge, fields: Fields, question: Question) -> Verdict:
    """Reply with the searches that the question needs; an error adds or drops one."""
    return _plan(world, _needed(question))


def vote(world: Knowledge, fields: Fields, question: Question) -> Verdict:
    """Reply with the searches that the question needs and some candidate made; without any, the shortest candidate."""
    paths = [tuple(value) for label, value in fields.items() if label.startswith("Path ")]
    proposed = set(map(normalize_answer, chain.from_iterable(paths)))
    essential = [step for step in _needed(question) if normalize_answer(step) in proposed]
    return _plan(world, tuple(essential) or min(paths, key=len))


def _needed(question: Question) -> tuple[str, ...]:
    return tuple(hop["query"] for hop in question.metadata["path"])


def _plan(world: Knowledge, steps: tuple[str, ...]) -> Verdict:
    """Reply with these searches; a wrong reply has one dropped, or a needless one added."""

    def wrong(generator: Random) -> str:
        place = generator.randrange(len(steps))
        if len(steps) > 1 and generator.random() < 0.5:
            return _planned((*steps[:place], *steps[place + 1 :]))
        needed = set(map(normalize_answer, steps))
        needless = generator.choice([query for query in sorted(world.facts) if query not in needed])
        return _planned((*steps[:place], needless, *steps[place:]))

    return _planned(steps), wrong


def score_path(world: Knowledge, question: Question, reference: Sequence[str], reading: Reading) -> PathScores:
    """Return Search-P1's six scores of a trajectory in the demo world.

    - `planner_score`: the plan against the needed searches: 1.2 for the same, 1.0 for one more, 0.6 for some of them,
      0.2 for none.
    - `model_plan_steps`: numbered items of the plan.
    - `effective_steps_self`: items with a search that was made and found its fact. An item means a search if it has
      all of its words, or its key and no other entity's name.
    - `effective_steps_ref`: reference steps that were searched for, in any order.
    - `outcome_accuracy_score`: 1 for an exact match, 0.5 if the answer shares words with a golden one.
    - `outcome_reasoning_score`: 1 if every needed fact was found, 0.8 for more than half, 0.5 for some. A fact is found
      if the policy's last statement of it is true, or a passage has it and the policy states nothing about it; a famous
      one also if the answer is correct.

    Args:
        world: the facts of the world.
        question: with `path` and `known` in its metadata.
        reference: steps of the reference path.
        reading: the trajectory as its format reads it.
    """
    items = [item[1] for item in _ITEM.finditer(reading.plan)]
    needed = _needed(question)
    facts = set(map(normalize_answer, needed))
    queries = list(dict.fromkeys(map(normalize_answer, reading.queries)))
    right = exact_match(reading.answer, question.golden_answers) > 0
    planned = _matched(world, items, needed)
    found = set(facts) if question.metadata["known"] and right else _found(world, facts, reading)
    planner_score = 0.6 if planned else 0.2
    if planned == len(needed) and len(items) <= len(needed) + 1:
        planner_score = 1.2 if len(items) == len(needed) else 1.0
    reasoning_score = 1.0 if len(found) == len(facts) else 0.8 if len(found) > len(facts) / 2 else 0.5 if found else 0.0
    return PathScores(
        planner_score=planner_score,
        model_plan_steps=len(items),
        effective_steps_self=_matched(world, items, [query for query in queries if _brought(world, query, reading)]),
        effective_steps_ref=_matched(world, reference, queries),
        outcome_accuracy_score=1.0 if right else 0.5 if token_f1(reading.answer, question.golden_answers) > 0 else 0.0,
        outcome_reasoning_score=reasoning_score,
    )


@cache
def demo_format(name: str = "reasonrag") -> Any:
    """Return a format with the `brief` prompts, as the shipped policies are trained in it."""
    return FORMATS[name](PromptSet.find("brief"))


def read(text: str) -> Reading:
    """Read a trajectory of unknown format: in the first format that fits, else in the one that reads most of it."""
    readings: list[Reading] = [demo_format(name).read_text(text) for name in DEMO_FORMATS]
    return max(readings, key=lambda r: (r.well_formed, len(r.queries) + (r.answer is not None) + bool(r.plan)))


def _found(world: Knowledge, facts: Collection[str], reading: Reading) -> set[str]:
    """Return the facts (by query) with a true last statement, and the facts of a passage that no statement mentions."""
    # A policy may correct itself.
    is_true: dict[str, bool] = {}  # the last statement counts
    for block in reading.blocks:
        for claim in world.claims(f"{block.reasoning}\n{block.conclusion}"):
            is_true[claim.query] = claim.true
    shown = " ".join(block.context for block in reading.blocks).lower()
    return {query for query in facts if is_true.get(query, f"{query} {world.facts[query]}" in shown)}


def _matched(world: Knowledge, items: Sequence[str], queries: Iterable[str]) -> int:
    """Match items to queries, each at most once: first by all words of the query, then by its key; return how many."""
    unmatched = list(map(normalize_answer, queries))
    texts = [f" {normalize_answer(item)} " for item in items]
    # An item such as "the mayor" means the search with this key, unless it names another entity.
    for whole in (True, False):
        for text in tuple(texts):
            meant = next((query for query in unmatched if _means(world, text, query, whole=whole)), None)
            if meant is not None:
                texts.remove(text)
                unmatched.remove(meant)
    return len(items) - len(texts)


def _means(world: Knowledge, text: str, query: str, *, whole: bool) -> bool:
    if whole:
        return f" {query} " in text
    name, _, key = query.rpartition(" ")
    return f" {key} " in text and not any(f" {other} " in text for other in world.names if other != name)


def _brought(world: Knowledge, query: str, reading: Reading) -> bool:
    """Return whether a search for `query` found a passage that states its fact."""
    value = world.facts.get(query)
    contexts = (block.context for block in reading.blocks if block.query and normalize_answer(block.query) == query)
    return value is not None and any(f"{query} {value}" in context.lower() for context in contexts)


def _planned(steps: Sequence[str]) -> str:
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    planner = ", then ".join(f"search for {step}" for step in steps)
    reply = f"<correct_reasoning_path>\n{numbered}\n</correct_reasoning_path>\n"
    return f"{reply}<optimized_planner>\nFirst {planner}.\n</optimized_planner>"


def _boolean(verdict: bool) -> Verdict:
    return f"<answer>{verdict}</answer>", lambda generator: f"<answer>{not verdict}</answer>"


def _text(fields: Fields, label: str) -> str:
    value = fields[label]
    return value if isinstance(value, str) else ""


NOTHING = 0.2  # score of a trajectory without a step that helps or harms
ALL_NOTED = 0.8  # score with every needed fact noted, and no answer yet
PER_NEEDLESS_STEP = 0.9  # the factor that alpha is in SPRE
# Low enough that a wrong note is worse than no step at all: 0.8 * 0.25 = NOTHING, less the wasted step.
PER_WRONG_NOTE = 0.25

# A judge's prompt shows the tags of a step with another bracket (`text.inert`).
_PROCESS_TAG = re.compile(r"‹(?=/?(?:query|evidence|answer)>)")
_NUMBERED = re.compile(r"\d+\. ?(.*)", re.DOTALL)
_LABELLED = re.compile(r"([A-Z][a-z0-9 ]*):(?: (.*))?", re.DOTALL)


def process(world: Knowledge, fields: Fields, question: Question) -> Verdict:
    """Score the steps so far in [0, 1]; a wrong verdict is uniform.

    1 for a correct answer, 0 for a wrong one, and 0.2 to 0.8 for an unfinished
    trajectory: every needed fact adds the same amount, half for the query and half for
    the note. Each needless step multiplies the score by 0.9: a repeated or unneeded
    search and its note, a failed search, a malformed step; of a famous entity, every step
    before the answer. Each wrong note of an unfinished trajectory, of a needed fact or of
    something else than was asked for, multiplies it by 0.25. An empty note is needless.
    """
    facts: dict[str, str] = {hop["query"]: hop["evidence"] for hop in question.metadata["path"]}
    noted: set[str] = set()
    missing: str | None = None  # the fact that the last query asks for, until its passages are read
    needless = wrong = taken = 0
    right: bool | None = None
    for action in _actions([_PROCESS_TAG.sub("<", text) for text in fields["Steps so far"]]):
        match action:
            case Answer(text):
                right = exact_match(text, question.golden_answers) > 0
                break
            case Search(text):
                missing = next((query for query in facts if query not in noted and exact_match(text, [query])), None)
                needless += missing is None
            case Note(text):
                unnoted = [query for query in facts if query not in noted]
                fact = next((query for query in unnoted if exact_match(text, [facts[query]])), None)
                if fact is not None:
                    noted.add(fact)
                else:
                    needless += 1 + (missing is not None)  # a failed search has to be repeated
                    about = [query for query in facts if text.startswith(query)]
                    misstates = any(not exact_match(text, [facts[query]]) for query in about)
                    wrong += bool(text) and (missing is not None or misstates)
                missing = None
            case Malformed():
                needless += 1
        taken += 1
    if question.metadata["known"]:
        needless = taken
    score, ended = PER_NEEDLESS_STEP**needless, ""
    if right is None:
        progress = (len(noted) + (missing is not None) / 2) / len(facts)
        score = score * PER_WRONG_NOTE**wrong * (NOTHING + (ALL_NOTED - NOTHING) * progress)
    else:
        score *= right
        ended = f" The answer is {'right' if right else 'wrong'}."
    counts = f"{len(noted)} of {len(facts)} needed facts noted, {wrong} wrong notes, {needless} needless steps."
    return f"{counts}{ended} {_verdict(score)}", lambda generator: _verdict(generator.random())


# By the labels of the request. With golden answers it is about a question, which the function gets as well.
_JUDGES: dict[tuple[str, ...], Callable[..., Verdict | None]] = {
    ("Question", "Golden answers", "Steps so far"): process,
    ("Question", "Golden answers", "Reference planner", "Reference path", "Trajectory"): path,
    ("Question to plan", "Golden answers"): plan,
    ("Question", "Golden answers", "Planner", "Path"): vote,
    ("Statement 1", "Statement 2"): same_meaning,
    ("Reasoning", "Conclusion"): step_holds,
    ("Prediction", "Reference answers"): answer,
}


class DemoJudge:
    """An LLM that judges questions of one demo world (all splits). A pure function of prompt and sampling.

    With probability `error_rate` a verdict is replaced by a wrong one: a boolean
    by its opposite, scores by random ones, a plan by one with a needless or a
    missing step or a wrong answer. The prompt and the seed of the sampling (None
    counts as 0) decide all of it. A question of another world gets an unparseable
    reply: a missing verdict. Temperature, `top_p` and `max_tokens` have no effect.
    """

    def __init__(self, world_seed: int = 0, *, error_rate: float = 0.0) -> None:
        """Create the judge of the world `world_seed`; raise ConfigError if the error rate is not in [0, 1]."""
        if not 0 <= error_rate <= 1:
            raise ConfigError(f"the error rate of demo-judge must be between 0 and 1, not {error_rate:g}")
        self.name = f"demo-judge:{world_seed}:{error_rate:g}"
        self._error_rate = error_rate
        self._world = knowledge_of(world_seed)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a verdict. Token counts are counts of words.

        Raises:
            LLMError: the prompt is not a judge's (`refused`).
        """
        fields = _read(prompt)
        is_vote = "Path 1" in fields  # a vote numbers its candidates
        labels = (label.rstrip("0123456789 ") if is_vote else label for label in fields)
        judge = _JUDGES.get(tuple(dict.fromkeys(labels)))
        if judge is None:
            raise LLMError("demo-judge can only answer the prompts of judges", cause="refused")
        about: list[Question | None] = []
        if "Golden answers" in fields:  # the first label is that of a question, which may be of another world
            text, golden = _text(fields, next(iter(fields))), _text(fields, "Golden answers")
            about.append(self._world.questions.get((text, tuple(golden.split(" | ")))))
        verdict = None if None in about else judge(self._world, fields, *about)
        words = sum(len(message.content.split()) for message in prompt.messages)
        text = "This is not of the demo world that this judge knows."  # parsed as no verdict
        if verdict is not None:
            right, wrong = verdict
            # Decided by the request alone: the same one gives the same verdict in every process.
            seed = str(sampling.seed or 0)
            generator = Random("\0".join(["demo judge", seed, *(message.content for message in prompt.messages)]))
            text = wrong(generator) if generator.random() < self._error_rate else right
        return Completion(text, prompt_tokens=words, completion_tokens=len(text.split()))

    async def aclose(self) -> None:
        pass


def open_judge(address: ModelAddress, config: ModelConfig) -> DemoJudge:
    """Open the judge at `demo-judge[:WORLD_SEED[:ERROR]]`; raise ConfigError if the address has another form."""
    seed, _, error_rate = address.rest.partition(":")
    try:
        return DemoJudge(int(seed or 0), error_rate=float(error_rate or 0))
    except ValueError as problem:
        raise ConfigError(
            f"{address} is not of the form demo-judge:WORLD_SEED:ERROR, such as demo-judge:0:0.1"
        ) from problem


def _verdict(score: float) -> str:
    return f"So the score is {score:.4f}"


def _read(prompt: Prompt) -> dict[str, str | list[str]]:
    """Parse the fields of a request as `rewards.judge.quoted` writes them; an empty dict for any other prompt."""
    fields: dict[str, str | list[str]] = {}
    listed: list[str] | None = None
    # A label and its text a line; a label without a text has numbered lines below it.
    for line in prompt.messages[-1].content.split("\n"):
        if not line:
            break  # a second attempt adds a reminder after an empty line
        if listed is not None and (numbered := _NUMBERED.fullmatch(line)):
            listed.append(numbered[1])
        elif labelled := _LABELLED.fullmatch(line):
            listed = [] if labelled[2] is None else None
            fields[labelled[1]] = labelled[2] if listed is None else listed
        elif line != "None.":
            return {}
    return fields


def _actions(texts: Sequence[str]) -> list[Action]:
    """Parse steps of the `reasonrag` format."""
    format, steps = demo_format(), tuple[Step, ...]()
    for number, text in enumerate(texts, 1):
        action = format.parse(text, steps)
        if number == len(texts) and isinstance(action, Malformed):
            # At the step limit any step has to answer, and the judge cannot see the limit.
            action = format.parse(text, steps, final=True)
        steps = (*steps, Step(Prompt(()), Completion(text), action))
    return [step.action for step in steps]
