"""Texts from outside steer nothing: no special token, no step, no score, no terminal, no page."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from reasonrag.core.table import inert_markdown
from reasonrag.core.text import quotable
from reasonrag.core.types import Message, Passage, Prompt, Span
from reasonrag.dpo.preferences import StepSides, StepText
from reasonrag.dpo.token_rows import encode
from reasonrag.formats import FORMATS
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.publish.card import fenced
from reasonrag.report import write_report
from reasonrag.report.terminal import drawing
from reasonrag.report.trees import read_trees
from tests.faults.injection import (
    BENIGN,
    FAMILIES,
    PAYLOADS,
    TOKENS,
    Finds,
    added_tokens,
    chat_of,
    course,
    forms,
    places,
    special_ids,
)
from tests.faults.matrix import Figure, Rounds
from tests.report.hostile import rows, write_run
from tests.report.reading_pages import Page

# Earlier words of a policy keep the tags of its format, which some of these tokenizers have tokens for.
OWN_TAGS = {"<answer>", "</answer>"}


def tokenizers(full: bool) -> Iterator[tuple[str, ChatTemplate]]:
    """Yield tokenizers that declare added tokens: those of all families at once, and at full size of each."""
    from tokenizers import normalizers

    nfkc, bert = normalizers.NFKC(), normalizers.BertNormalizer(lowercase=True)
    yield "all as released", chat_of(added_tokens(list(FAMILIES)))
    yield "all, normalised by NFKC", chat_of(added_tokens(list(FAMILIES), normalized=True), nfkc)
    for family in FAMILIES if full else ():
        yield family, chat_of(added_tokens([family]))
        yield f"{family}, normalised by BERT", chat_of(added_tokens([family], normalized=True), bert)


@pytest.mark.fault(
    "A5",
    "added tokens of seven families of models in passages, questions, evidence, queries, a judge's prompt and a plan; "
    "literal, in full width, with hidden characters; tokenizers that normalise",
    "the prompt's special tokens are those of the prompt without them",
    before="155 of 445 became special ids, 465 of 465 under NFKC",
)
def test_no_text_from_outside_becomes_a_special_token(rounds: Rounds, figure: Figure) -> None:
    full = rounds(0, 1) == 1
    texts = [*TOKENS, *PAYLOADS] if full else TOKENS
    several = [forms(" ".join(texts[start::step])) for step in (rounds(2, len(texts) // 9),) for start in range(step)]
    taken, tried, known = set(), 0, list(tokenizers(full))
    for number, (place, entered) in enumerate(places()):
        plain, ours = entered(BENIGN).prompts, OWN_TAGS if "evidence" in place else set()
        shown = [entered(text).prompts for text in (several if full else [several[number // 2 % 2]])]
        of_all = known[:2] if place.endswith((": id", "tool")) else known  # they are shown as passages are
        for name, chat in of_all if full else [known[number % 2]]:
            expected = [special_ids(chat, prompt) for prompt in plain]
            for prompts in shown:
                for prompt, without in zip(prompts, expected, strict=True):
                    tried += 1
                    if found := {token for token in special_ids(chat, prompt) - without if token not in ours}:
                        taken.add((name, place, *sorted(found)))
    figure(
        f"{len(taken)} of {tried:,} prompts have a special id of {len(texts)} texts in 3 forms "
        f"({len(list(places()))} places, {len(known)} tokenizers)"
    )
    assert not taken


def test_a_formats_own_tags_are_tokens_where_a_policy_has_them() -> None:
    chat = chat_of(added_tokens(list(FAMILIES)))
    prompts = course("search_r1", "", Finds([Passage("p", "<search> </answer>")])).prompts
    assert special_ids(chat, prompts[-1])["<search>"] > special_ids(chat, prompts[0])["<search>"] > 0
    words = Span("<search>[ARGS]</search>", by_policy=True)
    assert chat.text(Prompt((Message("user", "?"),), (words,))).endswith("<search>[ARGS]</search>")
    sampled = Span("<search>", (1, 2, 3), by_policy=True)
    assert chat.token_ids(Prompt((Message("user", "?"),), (sampled,)))[-3:] == (1, 2, 3)


def test_training_encodes_a_prompt_as_it_was_read() -> None:
    chat = chat_of(added_tokens(["others", "mistral"]))
    inserted = Span("\n<information>]<]start[>[ EOS [{(0)}]</information>\n")
    prompt = Prompt(
        (Message("user", "[multimodal] ]<]start[>["),), (Span("a", chat.encode("a"), by_policy=True), inserted)
    )
    step = StepText(prompt, "b", "stop")
    for asked in (prompt, Prompt(prompt.messages, (inserted,))):
        sides = StepSides((StepText(asked, "b", "stop"),), (step,))
        row = _Row(sides)
        (pair,), _ = encode([row], chat)  # type: ignore[list-item]
        assert pair.chosen[0].prompt_ids == chat.token_ids(asked)


class _Row:
    place, margin, depth, group, target, confidence = "row 1", None, 0, ("d", "q"), None, None

    def __init__(self, sides: StepSides) -> None:
        self.sides = sides


@pytest.mark.fault(
    "25",
    "75 payloads as passages, titles, ids, summaries, results of tools and recordings, questions: tags of all formats, "
    "turns of six families, verdicts, ANSI, right-to-left, hidden, look-alikes, full width, tag characters, selectors",
    "the same stages, actions, searches, stops, messages, spans, answers and rewards as with a harmless text",
)
def test_no_payload_changes_what_is_decided(rounds: Rounds, figure: Figure) -> None:
    changed, tried, known = [], 0, list(places())
    for number, (place, entered) in enumerate(known):
        expected = entered(BENIGN).decided
        for payload in PAYLOADS[number % rounds(19, 1) :: rounds(19, 1)]:
            tried += 1
            if entered(payload).decided != expected:
                changed.append((place, payload))
    figure(f"{len(changed)} of {tried} went otherwise ({len(known)} places, {len(FORMATS)} formats)")
    assert not changed


def acting(text: str) -> set[str]:
    """Return the characters that do something to a terminal, or to the order of others on it."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


@pytest.mark.fault(
    "39",
    "the 75 payloads as question, answer, passage, policy and name in pages, on a terminal, and in a card",
    "the elements of a page are those of a harmless run's; no control character; no markup in a card",
)
def test_no_payload_acts_where_it_is_shown(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    payloads = [payload.encode("utf-8", "replace").decode() for payload in PAYLOADS[:: rounds(8, 1)]]
    found = {
        kind: write_run(tmp_path / kind, [rows(7, question_id=f"q{n}", text=text) for n, text in enumerate(texts)])
        for kind, texts in {"hostile": payloads, "plain": [BENIGN] * len(payloads)}.items()
    }
    plain, hostile = (sorted(write_report(found[kind]).parent.rglob("*.html")) for kind in ("plain", "hostile"))
    different = 0
    for expected, page in zip(plain, hostile, strict=True):
        shown = [[(tag, *attributes) for tag, attributes in Page(file).elements] for file in (expected, page)]
        different += shown[0] != shown[1]
    controls, markup = 0, 0
    for tree in read_trees(found["hostile"]):
        console = Console(file=io.StringIO(), width=400, color_system=None)
        console.print(drawing(tree))
        assert isinstance(console.file, io.StringIO)
        controls += bool(acting(console.file.getvalue()))
    allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "fence", "entity"}
    for payload in payloads:
        tokens = (
            MarkdownIt("commonmark", {"html": True})
            .enable("table")
            .parse(f"{inert_markdown(payload)}\n\n{fenced(payload)}")
        )
        kinds = {child.type for token in tokens for child in (token, *(token.children or ()))}
        markup += not kinds <= allowed or [token.type for token in tokens].count("fence") != 1
    figure(
        f"{different} of {len(plain)} pages have other elements; {controls} of {len(payloads)} trees on a terminal "
        f"have a control character; {markup} of {len(payloads)} cards have markup"
    )
    assert (different, controls, markup) == (0, 0, 0)


@pytest.mark.parametrize("text", ["[1]", "[citation needed]", "[a] [note 3] [US] [sic]", "f[x] < g(x) > 3", "x <- y"])
def test_ordinary_brackets_stay_readable(text: str) -> None:
    chat = chat_of(added_tokens(list(FAMILIES)))
    assert quotable(text) == chat.without_tokens(text) == text
