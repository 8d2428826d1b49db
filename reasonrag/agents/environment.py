"""The rollout engine as an environment server: OpenEnv's protocol over a WebSocket, with prompts as observations.

A client resets its session to a question, then answers
each prompt as the policy, and at the end gets the reward:

    {"type": "reset", "data": {"question_id": "q1"}}    {"type": "step", "data": {"text": "<search>..."}}

Each is answered by `{"type": "observation", "data": {"observation": {...},
"reward": null, "done": false}}`. The engine asks the client as it asks any `LLM`,
so prompts, parsing, forced answers and rewards are those of `rl train`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import structlog
from pydantic import BaseModel, Field, ValidationError

from reasonrag.core.errors import ReasonRAGError, readable_error
from reasonrag.core.serving import (
    App,
    ListenSettings,
    Receive,
    Refusal,
    Response,
    Scope,
    Send,
    describe_problems,
    run_app,
)
from reasonrag.core.text import excerpt, valid_unicode
from reasonrag.core.types import Completion, FinishReason, Prompt, Question, Trajectory
from reasonrag.llm.base import Sampling, cut_at_stop, restore_stop
from reasonrag.llm.chat_template import chat_with_tools
from reasonrag.online_rl.settings import RLSettings
from reasonrag.online_rl.task import Task, batched_retrievers, open_task, open_task_reward
from reasonrag.pipeline.parts import open_engine
from reasonrag.rewards import Reward
from reasonrag.rollout import Engine, derive_seed

log = structlog.get_logger()


MOST_SESSIONS = 256  # clients at a time, each with one episode
IDLE_S = 600.0  # without a message, after which a session is dropped


class Message(BaseModel):
    """What a client sends."""

    type: Literal["reset", "step", "state", "close"]
    data: dict[str, Any] = {}


class Reset(BaseModel):
    """The question of an episode: by id, by its text, or with golden answers one of the client's own.

    Without a choice the questions come in turn, or the seed draws one. Other
    fields are ignored, so that a row of a training set can be sent as it is.
    `step` counts optimizer steps, for rewards that change during training.
    """

    question_id: str | None = None
    dataset: str | None = None
    question: str | None = None
    golden_answers: list[str] | None = Field(None, max_length=10_000)
    seed: int | None = None
    episode_id: str | None = None
    step: int = Field(0, ge=0)


class Action(BaseModel):
    """What the policy wrote, with or without the stop string; `finish_reason` is length if a limit cut it off."""

    text: str
    finish_reason: Literal["stop", "length"] = "stop"
    token_ids: list[int] | None = None


class Observation(BaseModel):
    """The policy's next prompt; at the end, what came of the trajectory.

    `messages` and `tools` are a chat as OpenAI's servers take it, `prefix` is the open turn that the
    policy continues. `inserted` is its end that is new since the policy's last words: what a trainer
    appends to the tokens, outside the loss. `trained` is false where a reward asks the policy something,
    which is not a step of the trajectory. `cause` is the reason for a missing reward: leave the episode
    out then; it does not count as 0.
    """

    question_id: str = ""
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    prefix: str = ""
    inserted: str = ""
    stop: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    trained: bool = False
    answer: str | None = None
    stop_reason: str | None = None
    parts: dict[str, float | None] = {}
    cause: str = ""


Reply = dict[str, Any]


class CurrentPolicy:
    """An `LLM` that is another one in each task, such as the client of a session: one engine serves all of them."""

    name = "outside"
    current: ClassVar[ContextVar[Any]] = ContextVar("policy")  # with an `LLM`'s `complete`

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion of the current task's policy."""
        completion: Completion = await self.current.get().complete(prompt, sampling)
        return completion

    async def aclose(self) -> None:
        """Do nothing: a policy is closed where it was set."""


class Session:
    """One client, with at most one episode at a time: a task of the engine, which waits for the client's words."""

    def __init__(self, engine: Engine, reward: Reward, choose: Callable[[Reset], Question]) -> None:
        self._engine, self._reward, self._choose = engine, reward, choose
        self._episode: asyncio.Task[None] | None = None
        # A reward may ask the policy several questions at once; the client gets one prompt after another.
        self._one_prompt = asyncio.Lock()
        self._begin(None, "")

    def _begin(self, episode_id: str | None, question_id: str) -> None:
        self._state: dict[str, Any] = {"episode_id": episode_id, "step_count": 0, "question_id": question_id}
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._open: tuple[Prompt, asyncio.Future[Completion]] | None = None  # the prompt that waits for the client
        self._written = ""  # the open turn, up to what the client wrote last
        self._scoring = False

    async def answer(self, raw: str | bytes) -> Reply | None:
        """Return the reply to a message; None if the message closes the session."""
        try:
            message = Message.model_validate_json(raw)
            match message.type:
                case "reset":
                    reset = Reset.model_validate(message.data)
                    question = self._choose(reset)  # an unknown question leaves the episode as it was
                    await self.drop()
                    self._begin(reset.episode_id, question.id)
                    CurrentPolicy.current.set(self)
                    self._episode = asyncio.create_task(self._play(question, reset))
                case "step":
                    self._step(Action.model_validate(message.data))
                case "state":
                    return {"type": "state", "data": self._state}
                case "close":
                    return None
        except ValidationError as error:
            return _failure(describe_problems(error), "VALIDATION_ERROR")
        except Refusal as refusal:
            return _failure(str(refusal))
        return await self._replies.get()

    def _step(self, action: Action) -> None:
        if self._open is None:
            raise Refusal(409, "no prompt is open: begin an episode with reset")
        (prompt, waiting), self._open = self._open, None
        completion = completed(action, prompt)
        # The next prompt begins with this text; what follows it was inserted by the engine.
        self._written = prompt.prefix + completion.text
        self._state["step_count"] += 1
        waiting.set_result(completion)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Show the client a prompt, and return its reply."""
        async with self._one_prompt:
            waiting: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._open = prompt, waiting
            observation = Observation(
                question_id=self._state["question_id"],
                **chat_with_tools(prompt.messages, as_sent=True),
                prefix=prompt.prefix,
                inserted=prompt.prefix.removeprefix(self._written),
                stop=list(prompt.stop),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                trained=not self._scoring,
            )
            self._observe(observation, None, done=False)
            return await waiting

    async def _play(self, question: Question, reset: Reset) -> None:
        try:
            (trajectory,) = await self._engine.run([Trajectory(question)], seeds=[reset.seed or 0])
            self._scoring = True
            (score,) = await self._reward.score([trajectory], step=reset.step)
        except ReasonRAGError as error:  # its message is written for people
            self._replies.put_nowait(_failure(str(error)))
        # The message of any other error may quote the question
        # or a passage: the client gets its type alone.
        except Exception as error:
            log.warning("an episode failed", error=excerpt(f"{type(error).__name__}: {readable_error(error)}"))
            self._replies.put_nowait(_failure(f"internal error ({type(error).__name__})"))
        else:
            end = Observation(
                question_id=question.id,
                answer=trajectory.answer,
                stop_reason=trajectory.stop_reason,
                parts=dict(score.parts),
                cause=score.cause,
            )
            self._observe(end, score.value, done=True)

    def _observe(self, observation: Observation, reward: float | None, *, done: bool) -> None:
        data = {"observation": observation.model_dump(), "reward": reward, "done": done}
        self._replies.put_nowait({"type": "observation", "data": data})

    async def drop(self) -> None:
        """End the episode, finished or not."""
        if self._episode is not None:
            self._episode.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._episode


def completed(action: Action, prompt: Prompt) -> Completion:
    """Return the policy's text as a backend returns it: up to and including the stop string that ended it."""
    written = valid_unicode(action.text)
    text = cut_at_stop(written, prompt.stop)
    # The ids of a text that was cut or lengthened would not spell it any more.
    ids = tuple(action.token_ids) if action.token_ids is not None and text in (None, written) else None
    if text is None and action.finish_reason == "length":
        return Completion(written, FinishReason.LENGTH, ids)
    return Completion(text or restore_stop(written, prompt.stop, prompt.prefix), token_ids=ids)


def _failure(message: str, code: str = "EXECUTION_ERROR") -> Reply:
    return {"type": "error", "data": {"message": message, "code": code}}


class EnvironmentApp(App):
    """Sessions at `/ws`, and the pages that OpenEnv's tools ask for, with the list of questions."""

    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        questions: Sequence[Question],
        settings: ListenSettings,
        close: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Serve episodes on some questions; `engine.llm` is a `CurrentPolicy`, `close` is awaited at the end."""
        super().__init__(settings)
        self._engine, self._reward, self._questions = engine, reward, questions
        self._close = close
        self._sessions = self._turn = 0
        self._known: dict[object, Question | None] = {}  # by text, by id, and by data set and id; None of several
        listed = []
        for question in questions:
            for key in (question.question, (None, question.id), (question.dataset, question.id)):
                self._known[key] = None if key in self._known else question
            listed.append({"dataset": question.dataset, "question_id": question.id, "question": question.question})
        pages: dict[str, Any] = {
            "/health": {"status": "healthy"},
            "/metadata": {"name": "reasonrag", "description": f"agentic RAG in the format {engine.format.name}"},
            "/schema": {"action": Action.model_json_schema(), "observation": Observation.model_json_schema()},
            "/questions": listed,
        }
        self._pages = {path: json.dumps(value).encode() for path, value in pages.items()}
        self.routes = dict.fromkeys(pages, ("GET", self._page))

    async def aclose(self) -> None:
        if self._close is not None:
            await self._close()

    async def _page(self, scope: Scope, receive: Receive) -> Response:
        return Response(self._pages[scope["path"]])

    async def converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one client until it leaves, closes, or is silent for too long."""
        if scope["path"] != "/ws":
            raise Refusal(404, "sessions are at /ws")
        await receive()  # the request to connect
        await send({"type": "websocket.accept"})
        session = Session(self._engine, self._reward, self._choose)
        self._sessions += 1
        answer: Reply | None = _failure(f"{MOST_SESSIONS} sessions are open", "CAPACITY_REACHED")
        is_open = self._sessions <= MOST_SESSIONS
        try:
            while is_open:
                async with asyncio.timeout(IDLE_S):
                    message = await receive()
                if message["type"] == "websocket.disconnect":
                    return
                answer = await session.answer(message.get("text") or message.get("bytes") or "")
                is_open = answer is not None
                if answer is not None:
                    await _send(send, answer)
        except TimeoutError:
            answer = _failure(f"no message for {IDLE_S:g} s", "SESSION_ERROR")
        finally:
            self._sessions -= 1
            await session.drop()
        # The reason for an end on our side, before the connection is closed.
        if answer is not None:
            await _send(send, answer)
        await send({"type": "websocket.close"})

    def _choose(self, reset: Reset) -> Question:
        """Return the question that a client asks for; raise Refusal if it does not exist."""
        if reset.question is not None and reset.golden_answers is not None:
            if not any(answer.strip() for answer in reset.golden_answers):
                raise Refusal(422, "golden_answers holds none, so no answer could be scored; give one, or leave it out")
            question_id = reset.question_id or reset.question
            return Question(question_id, reset.question, tuple(reset.golden_answers), reset.dataset or "")
        if reset.question_id is None and reset.question is None:
            # Without a seed the questions come in turn; a seed draws the same question on every server.
            turn, self._turn = self._turn, self._turn + (reset.seed is None)
            return self._questions[(turn if reset.seed is None else derive_seed(reset.seed)) % len(self._questions)]
        key: object = reset.question if reset.question_id is None else (reset.dataset, reset.question_id)
        found = self._known.get(key)
        if found is None and key in self._known:
            raise Refusal(409, "several questions have this id or text: give dataset and question_id")
        if found is None or reset.question not in (None, found.question):
            message = "unknown question: GET /questions lists the served ones; one of yours comes with "
            raise Refusal(404, f"{message}golden_answers")
        return found


async def _send(send: Send, reply: Reply) -> None:
    await send({"type": "websocket.send", "text": json.dumps(reply, allow_nan=False)})


def open_environment(settings: RLSettings, journal: Path, opened: AsyncExitStack) -> tuple[Task, Engine, Reward]:
    """Open what `rl train` trains on, for a `CurrentPolicy`; `opened` closes it."""
    task, policy = open_task(settings), CurrentPolicy()
    opened.push_async_callback(task.aclose)
    reward = open_task_reward(settings, task, policy, journal, opened)
    engine = open_engine(task.config, policy, batched_retrievers(task)[0], task.format)
    engine.first_steps = None  # a client that writes nothing readable does not end the others' episodes
    return task, engine, reward


def serve_environment(settings: RLSettings, listening: ListenSettings) -> int:
    """Serve what `rl train` would train on until SIGTERM or Ctrl-C, and return the exit code."""
    opened = AsyncExitStack()
    with TemporaryDirectory(prefix="reasonrag-") as folder:  # a judge's verdicts, for as long as the server runs
        task, engine, reward = open_environment(settings, Path(folder, "journal.sqlite"), opened)
        app = EnvironmentApp(engine, reward, task.questions, listening, opened.aclose)
        about = f"{len(task.questions)} questions, format {task.format.name}, reward {settings.reward.name}"
        return run_app(app, about=about)
