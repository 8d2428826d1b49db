"""Whether the ids that DPO, SFT and GRPO score are those that a policy sampled, after those that it read.

    python -m benchmarks token_ids [--model FOLDER --chat-template gemma] [--tokenizer tokenizer.json] [--questions 8]

A policy builds trees (`build-tree`), pairs of steps and of trajectories are derived from their tables, written and read
again, and turned into the rows of each trainer; for GRPO the same policy makes attempts on the engine of `rl train`.
Each scored step is then looked up among what the model itself was given and what it sampled. A model that was never
trained for a format writes no tags, so the format here parses anything. `--tokenizer` takes a random model with that
tokenizer, which samples ids that no text is encoded to; without options it is the demo world's tokenizer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.table import Table, options
from reasonrag.core.config import ModelConfig, load_config
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Action, Answer, Completion, Note, Prompt, Question, Search, Step, Trajectory
from reasonrag.dpo.demonstrations import FORCED, read_demonstrations
from reasonrag.dpo.preferences import Preferences, read_preferences
from reasonrag.dpo.token_rows import TokenPairs, tokenise
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.formats.base import Format, Stage
from reasonrag.formats.stream import SearchR1Format
from reasonrag.formats.tool_calls import ToolCallsFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.local import TransformersLLM, load_model
from reasonrag.online_rl.rows import Transcript, transcripts
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import Parts
from reasonrag.pipeline.tables import export_pairs, link_trees
from reasonrag.rollout import Engine
from reasonrag.training.settings import DPOSettings, PairSettings, SFTSettings
from tests.llm.tiny import save_random_model
from tests.toys import ToyRetriever

_GROUP = 4  # attempts of GRPO at a question

Ids = tuple[int, ...]
Scored = set[tuple[Ids, Ids]]  # what was read, and what is scored after it


class _AnythingGoes:
    """Parses every text; an answer is right or wrong by its letters, and so is whether a step answers."""

    stops: tuple[str, ...] = ("</query>", "</evidence>", "</search>", "</answer>", "e>", ".\n")

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        prompt: Prompt = super().prompt(question, steps, final=final)  # type: ignore[misc]
        return replace(prompt, stop=self.stops)

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        if self.stage(steps) is Stage.GROUNDING and not final:  # type: ignore[attr-defined]
            return Note(completion)
        letters = sum(map(ord, completion))
        if final or letters % 3 == 0:
            return Answer("right" if letters % 2 else "wrong", forced=final)
        return Search(f"Jaws {letters}")


class AnyReasonRAG(_AnythingGoes, ReasonRAGFormat):
    """Each step in a prompt of its own."""


class AnySearchR1(_AnythingGoes, SearchR1Format):
    """Steps of one growing turn."""


class AnyToolCalls(_AnythingGoes, ToolCallsFormat):
    """Messages of one chat, whose calls the chat template writes anew."""


class Recorded(TransformersLLM):
    """A policy that keeps what its model read and sampled."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        chat = ChatTemplate.load(str(folder), template=chat_template)
        super().__init__(chat, name=folder.name, model=load_model(str(folder), ModelConfig(device="cpu")))
        self.seen: Scored = set()

    async def aclose(self) -> None:
        """Stay open: `build_trees` closes its parts, and this policy is used again."""

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        completion = await super().complete(prompt, sampling)
        assert completion.prompt_token_ids is not None and completion.token_ids is not None
        self.seen.add((completion.prompt_token_ids, completion.token_ids))
        return completion


@dataclass(frozen=True, slots=True)
class Found:
    """What was sampled, what each trainer scores, and the pairs of steps that were read from their table."""

    sampled: Scored
    scored: dict[str, Scored]
    examples: TokenPairs

    def exact(self, trainer: str) -> float:
        """Return the share of a trainer's steps whose ids, and those read before, are those of the policy."""
        steps = self.scored[trainer]
        return len(steps & self.sampled) / max(len(steps), 1)


def score(policy: Recorded, format: Format, run: Path, *, questions: int, sampling: Sampling, steps: int = 4) -> Found:
    """Build trees in `run`, and the rows of all trainers from them and from attempts at the same questions."""
    asked = [Question(str(n), f"Who directed Jaws {n}?", ("right",), dataset="toy") for n in range(questions)]
    overrides = {"search.iterations": 8, "format.max_steps": steps, "retrieval.top_k": 1, "pairs.test_share": 0.0}
    # Every two siblings, as nothing is known of the order of random steps.
    siblings = {
        "pairs.rule": "siblings",
        "pairs.confirm": 0,
        "pairs.path_share": 1.0,
        "pairs.min_confidence": 0.0,
        "pairs.per_question": 0,
    }
    sampled_with = {"policy.max_tokens": sampling.max_tokens, "policy.temperature": sampling.temperature}
    config = load_config(overrides={**overrides, **siblings, **sampled_with})
    content = {"policy": policy.name}
    build_trees(config, run, parts=Parts(asked, ToyRetriever(), format, policy, None, content))
    whole = config.model_copy(update={"pairs": config.pairs.model_copy(update={"level": "trajectory"})})
    link_trees(run / "whole", [run])
    export_pairs(run / "whole", whole, policy=policy.name, config_hash="")
    engine = Engine(policy, ToyRetriever(), format, max_steps=steps, top_k=1, sampling=sampling)
    begun = [Trajectory(question) for question in asked for _ in range(_GROUP)]
    attempts = asyncio.run(engine.run(begun, seeds=list(range(len(begun)))))
    of_steps, of_trajectories = (_pairs(folder, policy) for folder in (run, run / "whole" / "pairs"))
    demonstrations = _tokenised(_demonstrations(str(run)), SFTSettings(data=str(run)), policy)
    rows = [row for attempt in attempts for row in transcripts(attempt, policy.chat)]
    return Found(
        policy.seen,
        {
            "DPO, pairs of steps": set(_scored_in_pairs(of_steps)),
            "DPO, pairs of trajectories": set(_scored_in_pairs(of_trajectories)),
            "SFT, chosen steps": {
                step for examples in (of_steps, of_trajectories) for step in _scored_by_label(examples)
            },
            "SFT, trajectories": set(_scored_by_label(demonstrations)),
            "GRPO": {step for row in rows for step in _scored_in_rollout(row)},
        },
        of_steps,
    )


def _pairs(data: Path, policy: Recorded) -> TokenPairs:
    return _tokenised(read_preferences(str(data)), DPOSettings(data=str(data)), policy)


def _tokenised(preferences: Preferences, settings: PairSettings, policy: Recorded) -> TokenPairs:
    return tokenise(preferences, settings, policy.chat, context=None, log=lambda line: None)


def _demonstrations(data: str) -> Preferences:
    """Return the steps of complete trajectories without the answers, which also stand after another prompt."""
    settings = SFTSettings(examples="trajectories", per_question=1000, min_reward=0.0, test_share=0.0)
    found = read_demonstrations(data, settings)
    return replace(found, train=[row for row in found.train if row.types[0] not in ("answer", FORCED)])


def _scored_in_pairs(examples: TokenPairs) -> Iterator[tuple[Ids, Ids]]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from reasonrag.dpo.train import collate_segments, pair_rows

    for row in pair_rows(examples)["train"]:
        is_step = "prompt_ids" in row
        batch = DataCollatorForPreference(0)([row]) if is_step else collate_segments([row], pad_token_id=0)
        for ids, real, scored in zip(
            batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
        ):
            yield tuple(ids[(real > 0) & (scored == 0)].tolist()), tuple(ids[scored > 0].tolist())


def _scored_by_label(examples: TokenPairs) -> Iterator[tuple[Ids, Ids]]:
    from reasonrag.dpo.train import step_rows

    for row in step_rows(examples)["train"]:
        border = row["labels"].count(-100)
        yield tuple(row["input_ids"][:border]), tuple(row["labels"][border:])


def _scored_in_rollout(row: Transcript) -> Iterator[tuple[Ids, Ids]]:
    """Yield the steps of a row: what stands before each run of sampled tokens, and the run."""
    end = 0
    while 1 in row.mask[end:]:
        start = row.mask.index(1, end)
        end = row.mask.index(0, start) if 0 in row.mask[start:] else len(row.mask)
        yield row.prompt_ids + row.completion_ids[:start], row.completion_ids[start:end]


def _policies(models: Sequence[str], tokenizers: Sequence[str], folder: Path) -> Iterator[tuple[str, Path]]:
    from tokenizers import Tokenizer

    for model in models:
        yield Path(model).name, Path(model).expanduser()
    for number, path in enumerate(tokenizers):
        tokenizer: Any = Tokenizer.from_file(path)
        tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
        kind = type(tokenizer.model).__name__
        name = f"{kind} of {tokenizer.get_vocab_size():,} tokens"
        yield name, save_random_model(folder / f"tokenizer-{number}", tokenizer, context=4096)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", action="append", default=[], help="folder of a model")
    parser.add_argument("--chat-template", help="of a base model: gemma, chatml, llama3, or a file")
    parser.add_argument("--tokenizer", action="append", default=[], help="a tokenizer.json, for a random model")
    parser.add_argument("--questions", type=int, default=8, help="questions in each of two formats")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of a step")
    given = parser.parse_args()
    tokenizers = given.tokenizer or ([] if given.model else [str(demo_folder("reasonrag") / "tokenizer.json")])
    table = Table(__doc__)
    sampling = Sampling(temperature=1.0, max_tokens=given.max_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in _policies(given.model, tokenizers, Path(temporary)):
            for shape in (AnyReasonRAG, AnySearchR1):
                policy = Recorded(folder, given.chat_template)
                format = shape(PromptSet.find("brief"))
                found = score(
                    policy, format, Path(temporary, name, shape.__name__), questions=given.questions, sampling=sampling
                )
                asyncio.run(TransformersLLM.aclose(policy))
                title = f"{name}, {format.name}"
                table.row(f"{title}: steps sampled", len(found.sampled))
                ended = sum(
                    policy.chat.tokenizer.decode(ids[-1:], skip_special_tokens=True) == "" for _, ids in found.sampled
                )
                table.row(f"{title}: steps sampled that ended their turn", ended)
                encoded = found.examples.encoded
                share = encoded["encoded_differently"] / max(encoded["steps"], 1)
                table.row(f"{title}: steps of pairs whose text is encoded to other ids", share)
                for trainer, steps in found.scored.items():
                    what = f"{title}: {trainer}, {len(steps)} steps with the ids of the policy"
                    table.row(what, found.exact(trainer), limit="== 1")
    table.show(given.json)


if __name__ == "__main__":
    main()
