"""Its pipelines, parsers and metrics on the replies and passages of our baselines: answers, queries, EM and F1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections import Counter
from pathlib import Path

from flashrag.dataset.dataset import Dataset
from flashrag.pipeline import FLAREPipeline, IRCOTPipeline, IterativePipeline, SelfAskPipeline, SequentialPipeline
from flashrag.utils import ircot_pred_parse, selfask_pred_parse

from papers.baselines import BASELINES, _pile
from papers.reader import DemoReader
from reasonrag.core.text import exact_match, normalize_answer, token_f1
from reasonrag.core.types import Search, StopReason, Trajectory
from reasonrag.demo.world import demo_corpus, demo_questions
from reasonrag.llm.base import Sampling
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.rollout import Engine

CONFIG = {
    "device": "cpu",
    "dataset_name": "demo",
    "metrics": ["em", "f1"],
    "save_dir": ".",
    "save_metric_score": False,
    "save_intermediate_data": False,
    "save_retrieval_cache": False,
    "use_fid": False,
    "refiner_name": None,
}


class Question:
    """Its prompt template: our prompts differ, and a reply is found by its question and its number alone."""

    def get_string(self, question, **_):
        return question


class Replies:
    """Its generator: what our policy wrote to a question, reply after reply, and nothing once it has ended."""

    def __init__(self, trajectories, tokenizer, *, stop=""):
        self.tokenizer, self.stop = tokenizer, stop
        self.replies = {
            trajectory.question.question: iter([step.completion for step in trajectory.steps if step.asked])
            for trajectory in trajectories
        }

    def generate(self, prompts, *, return_scores=False, **_):
        texts, scores = [], []
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            question = next(name for name in self.replies if prompt == name or f"Question: {name}\n" in prompt)
            reply = next(self.replies[question], None)
            # A text ends before its stop string there.
            text = reply.text.strip().partition("Intermediate answer:\n")[0] if reply else ""
            text = text.removesuffix("Intermediate answer:")
            texts.append(text.partition(self.stop)[0] if self.stop else text)
            scores.append([math.exp(logprob) for logprob in (reply and reply.logprobs) or ()])
        return (texts, scores) if return_scores else texts


class Found:
    """Its retriever: the passages that our engine got for the same query, and a note of the queries it did not make."""

    def __init__(self, trajectories):
        self.passages, self.unknown, self.made = {}, Counter(), 0
        for trajectory in trajectories:
            for step in trajectory.steps:
                if isinstance(step.action, Search):
                    self.passages[normalize_answer(step.action.query)] = step.passages

    def search(self, query, return_score=False):
        (found,), (scores,) = self.batch_search([query], return_score=True)
        return (found, scores) if return_score else found

    def batch_search(self, queries, return_score=False):
        self.made += len(queries)
        self.unknown.update(query for query in queries if normalize_answer(query) not in self.passages)
        found = [self.passages.get(normalize_answer(query), ()) for query in queries]
        rows = [[{"id": passage.id, "contents": passage.contents} for passage in passages] for passages in found]
        scores = [[passage.score for passage in passages] for passages in found]
        return (rows, scores) if return_score else rows


class Characters:
    """The tokenizer of our script."""

    def encode(self, text, **_):
        return list(map(ord, text))

    decode = staticmethod(DemoReader.decode)


def replay(name, trajectories, tokenizer):
    """Run its pipeline of a method on our replies; return its items and its retriever."""
    found = Found(trajectories)
    parts = {
        "prompt_template": Question(),
        "retriever": found,
        "generator": Replies(trajectories, tokenizer, stop="." if name == "ircot" else ""),
    }
    questions = [trajectory.question for trajectory in trajectories]
    rows = [{"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers)} for q in questions]
    data = Dataset(CONFIG, data=rows)
    if name == "direct":
        SequentialPipeline(CONFIG, **parts).naive_run(data)
    elif name == "rag":
        SequentialPipeline(CONFIG, **parts).run(data)
    elif name == "iter_retgen":
        IterativePipeline(CONFIG, iter_num=3, **parts).run(data)
    elif name == "ircot":
        IRCOTPipeline(CONFIG, max_iter=5, **parts).run(data, pred_process_fun=ircot_pred_parse)
    elif name == "self_ask":
        SelfAskPipeline(CONFIG, max_iter=5, single_hop=False, **parts).run(data, pred_process_fun=selfask_pred_parse)
    elif name == "flare":  # takes the whole text for the answer, as its prompt asks for nothing else; ours does not
        FLAREPipeline(CONFIG, **parts).run(data, pred_process_fun=ircot_pred_parse)
    return data, found


def compare(name, trajectories, tokenizer):
    """Count the attempts in which it finds the same answer, EM, F1 and queries; those that we asked once more apart."""
    data, found = replay(name, trajectories, tokenizer)
    counts, differing = Counter(), []
    for item, ours in zip(data, trajectories, strict=True):
        golden = ours.question.golden_answers
        # Who has not answered by the last call is asked for it by us, and not by it.
        is_asked = name in ("ircot", "self_ask", "flare") and ours.stop_reason is not StopReason.ANSWERED
        score = item.output["metric_score"]
        same = (
            normalize_answer(item.pred) == normalize_answer(ours.answer or ""),
            score["em"] == exact_match(ours.answer, golden),
            score["f1"] == token_f1(ours.answer, golden, rules="flashrag"),
        )
        counts["asked once more" if is_asked else "compared"] += 1
        if not is_asked:
            counts.update(dict(zip(("answer", "em", "f1"), map(int, same), strict=True)))
            if not all(same):
                differing.append((item.question, item.pred, ours.answer))
            if name == "ircot":
                shown = [passage.id for passage in _pile(ours.steps)]
                counts["pile"] += [row["id"] for row in item.retrieval_result][-15:] == shown
        counts["their em"] += score["em"]
        counts["our em"] += exact_match(ours.answer, golden)
        counts["their f1"] += score["f1"]
        counts["our f1"] += token_f1(ours.answer, golden, rules="flashrag")
    counts["searches"], counts["other queries"] = found.made, found.unknown.total()
    return counts, differing, found.unknown


class Plain(DemoReader):
    """The script in the contract of FlashRAG's prompt: the answer alone, at times without its first word."""

    async def complete(self, prompt, sampling):
        reply = await super().complete(prompt, sampling)
        if prompt.stop != ("</answer>",):
            return reply
        answer = reply.text.partition("<answer>")[2].removesuffix("</answer>")
        first, _, rest = answer.partition(" ")
        text = rest if rest and len(first) % 2 else answer
        return type(reply)(text, prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)


def main() -> dict[str, object]:
    corpus = BM25Retriever.open(demo_corpus(0), cache=Path.cwd() / "bm25")
    questions = demo_questions("test", limit=120)
    figures: Counter[str] = Counter()
    scores = {}
    for name in ("direct", "rag", "iter_retgen", "ircot", "self_ask", "flare"):
        engine = Engine(Plain(), corpus, BASELINES[name](), max_steps=12, sampling=Sampling(temperature=0))
        ended = asyncio.run(engine.run([Trajectory(question) for question in questions], seeds=[0] * len(questions)))
        counts, differing, unknown = compare(name, ended, Characters())
        assert not differing and not unknown, (name, differing[:3], list(unknown)[:3])
        assert counts["compared"] == counts["em"] == counts["f1"] == counts["answer"] > 60
        assert name != "ircot" or counts["pile"] == counts["compared"]
        figures["attempts with equal answer, EM and F1"] += counts["compared"]
        figures["not compared, as we ask once more"] += counts["asked once more"]
        figures["equal searches"] += counts["searches"]
        scores[f"{name}: its F1, ours"] = f"{counts['their f1'] / 120:.3f}, {counts['our f1'] / 120:.3f}"
    return {**figures, **scores}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
