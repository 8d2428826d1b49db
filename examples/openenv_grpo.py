"""GRPO with TRL's own trainer on an environment server, through OpenEnv's client.

    reasonrag env serve --preset demo-outcome --port 8010 &
    trainer = GRPOTrainer(model, reward_from_environment, args, dataset, rollout_func=rollouts("http://127.0.0.1:8010"))

The data set's prompt is the question as a user message. For formats that write one growing turn (`search_r1`, `hiprag`,
`search_p1`, `when_to_search`): a trajectory is one row, in which what searches found is outside the loss. Episodes
without a reward get None, which TRL leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Rollouts = Callable[[list[Any], Any], dict[str, Any]]


def reward_from_environment(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that `rollouts` brought along: a reward function for TRL."""
    return environment_reward


def rollouts(url: str) -> Rollouts:
    """Return a `rollout_func` for TRL's GRPOTrainer that plays the episodes of an environment server."""
    from openenv.core import GenericEnvClient

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "environment_reward": []}
        with ThreadPoolExecutor(len(prompts)) as threads:  # each client waits for the server in a thread of its own
            clients = [GenericEnvClient(base_url=url).sync() for _ in prompts]
            questions = [prompt[-1]["content"] for prompt in prompts]
            states = list(threads.map(lambda c, question: c.reset(question=question), clients, questions))
            episodes = [_Episode(trainer.processing_class, state.observation) for state in states]
            while unfinished := [i for i, state in enumerate(states) if not state.done]:
                texts = _generate(trainer, [episodes[i] for i in unfinished])
                actions = [{"text": text, "finish_reason": reason} for text, reason in texts]
                stepped = threads.map(lambda i, action: clients[i].step(action), unfinished, actions)
                for i, state in zip(unfinished, stepped, strict=True):
                    states[i] = state
                    episodes[i].insert(state.observation)
            list(threads.map(lambda client: client.close(), clients))
        for episode, state in zip(episodes, states, strict=True):
            rows["prompt_ids"].append(episode.prompt)
            rows["completion_ids"].append(episode.ids)
            rows["env_mask"].append(episode.mask)
            rows["environment_reward"].append(state.reward)
        return {**rows, "logprobs": None}

    return play


class _Episode:
    """The token ids of an episode: the prompt, and what came after it with a mask of the policy's own."""

    def __init__(self, tokenizer: Any, observation: dict[str, Any]) -> None:
        self.tokenizer, self.stop = tokenizer, observation["stop"]
        self.max_tokens = observation["max_tokens"]
        chat = tokenizer.apply_chat_template(observation["messages"], tokenize=False, add_generation_prompt=True)
        self.prompt = self._encode(chat + observation["prefix"])
        self.ids: list[int] = []
        self.mask: list[int] = []

    def insert(self, observation: dict[str, Any]) -> None:
        self.stop = observation["stop"]
        ids = self._encode(observation["inserted"])
        self.ids += ids
        self.mask += [0] * len(ids)

    def write(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _generate(trainer: Any, episodes: list[_Episode]) -> list[tuple[str, str]]:
    """Let the trainer's model write the next step of each episode; return text and finish reason of each."""
    import torch
    from trl.models.utils import unwrap_model_for_generation

    tokenizer = trainer.processing_class
    stops = sorted({stop for episode in episodes for stop in episode.stop})
    longest = max(len(episode.prompt) + len(episode.ids) for episode in episodes)
    rows = [episode.prompt + episode.ids for episode in episodes]
    padded = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    device = trainer.accelerator.device
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        written = model.generate(
            padded.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=episodes[0].max_tokens,
            do_sample=True,
            temperature=trainer.temperature,
            stop_strings=stops,
            tokenizer=tokenizer,
            pad_token_id=tokenizer.pad_token_id,
        )
    texts = []
    ends = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    for episode, row in zip(episodes, written[:, longest:].tolist(), strict=True):
        length = next((n for n, token in enumerate(row) if token in ends), len(row))
        episode.write(row[:length])
        ended = length < len(row) or any(tokenizer.decode(row[:length]).endswith(stop) for stop in episode.stop)
        texts.append((tokenizer.decode(row[:length]), "stop" if ended else "length"))
    return texts
