"""DPOTrainer on `export --to trl` of growing turns: token ids and one step; and what it makes of RUN/pairs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import world

MODEL = str(world.ROOT / "reasonrag" / "demo" / "stream_policy")


def trainer(data: str):
    """Return the real trainer on the training split of a folder; it tokenises the split when it is made."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    arguments = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    config = DPOConfig("out", max_steps=1, max_length=None, per_device_train_batch_size=4, **arguments)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = load_dataset(data, split="train")
    return DPOTrainer(MODEL, args=config, train_dataset=rows, processing_class=tokenizer)


def main() -> dict[str, object]:
    from reasonrag.dpo.preferences import read_row
    from reasonrag.dpo.token_rows import encode
    from reasonrag.llm.chat_template import ChatTemplate
    from reasonrag.storage.parquet import read_shards
    from reasonrag.storage.tables import pair_schema

    run = world.run("demo:search_r1")
    world.reasonrag("export", run, "--to", "trl", "--out", Path.cwd() / "trl")
    pairs = list(read_shards(run / "pairs", "train", pair_schema()))
    chat = ChatTemplate.load(MODEL)
    # As the policy read and wrote them; and their text, as `dpo train` encodes it where no ids are known.
    sampled, _ = encode([read_row("", pair) for pair in pairs], chat)
    unknown = dict.fromkeys(("turn", "chosen_token_ids", "rejected_token_ids"))
    texts, _ = encode([read_row("", pair | unknown) for pair in pairs], chat)
    dpo = trainer("trl")
    counts = Counter({"pairs": len(pairs)})
    for theirs, of_text, of_ids, pair in zip(dpo.train_dataset, texts, sampled, pairs, strict=True):
        counts["of a growing turn"] += pair["prompt"][-1]["role"] == "assistant"
        for side in ("chosen", "rejected"):
            got = (*theirs["prompt_ids"], *theirs[f"{side}_ids"])
            assert got[-1] == chat.tokenizer.eos_token_id
            (ours,), (exact,) = getattr(of_text, side), getattr(of_ids, side)
            ended = () if pair[f"{side}_end"] == "turn" else (chat.tokenizer.eos_token_id,)
            counts["steps"] += 1
            counts["steps with our ids, and TRL's EOS"] += got == (*ours.prompt_ids, *ours.completion_ids, *ended)
            counts["steps with the sampled ids, and TRL's EOS"] += got == (
                *exact.prompt_ids,
                *exact.completion_ids,
                *ended,
            )
            counts["prompts that end where ours does"] += len(theirs["prompt_ids"]) == len(ours.prompt_ids)
    assert counts["steps with our ids, and TRL's EOS"] == counts["steps"] == 2 * len(pairs)
    loss = dpo.train().training_loss
    assert abs(loss - 0.693) < 0.01, loss  # policy and reference are equal at the first step
    raw = trainer(str(run / "pairs")).train_dataset
    for theirs, pair in zip(raw, pairs, strict=True):
        text = chat.tokenizer.decode(theirs["prompt_ids"])
        turn = pair["prompt"][-1]["content"] if pair["prompt"][-1]["role"] == "assistant" else ""
        counts["of RUN/pairs, prompts with a closed turn"] += bool(turn) and not text.endswith(turn)
    return {**counts, "loss of the first step": round(loss, 4)}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
