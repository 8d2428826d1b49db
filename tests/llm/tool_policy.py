"""The demo world's policy of one growing turn as one that calls functions: its weights, other words for its tokens.

What it has learnt to write as `<search>` is spelt as the beginning of a call, and so on. Its chat template puts the
calls and results of a chat where it has learnt to see them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from reasonrag.core.models import demo_folder

# Old and new word of a token; what begins like another one stands before it in the tokenizer's pattern.
BEGIN, END = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
WORDS = {
    "<search>": BEGIN,
    "</search>": END,
    "<answer>": "<|answer|>",
    "</answer>": "<|done|>",
    "Search R1.": "Tool calls.",
    r"Search\ R1\.": r"Tool\ calls\.",
}
TEMPLATE = """\
{%- for m in messages -%}
    {%- if m.role == "system" -%}{{- "Tool calls.\\n" -}}
    {%- elif m.role == "user" -%}{{- "Question: " + m.content + "\\n<|assistant|>" -}}
    {%- elif m.role == "tool" -%}{{- "\\n<information>" + m.content + "</information>\\n" -}}
    {%- else -%}
        {{- m.content | replace("\\n", "") -}}
        {%- for call in m.tool_calls -%}
            {{- '<tool_call>{"name": "search", "arguments": ' + call.function.arguments | tojson + "}</tool_call>" -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{{- "<|answer|>" if add_generation_prompt and not tools -}}
"""


def save_tool_policy(folder: Path) -> Path:
    """Save it, and the settings that it was trained with."""
    shutil.copytree(demo_folder("search_r1"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    ends = [words["<|end|>"], words["</search>"], words["</answer>"]]
    specials = [words["<answer>"], words["</answer>"]]
    tokenizer["model"]["vocab"] = {WORDS.get(word, word): id for word, id in words.items()}
    for id, word in zip(specials, ("<|answer|>", "<|done|>"), strict=True):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": id, "content": word})
    pattern = tokenizer["pre_tokenizer"]["pattern"]
    # A word ends where JSON does.
    alternatives = pattern["Regex"].replace(r"[^\s?!.,:;<>]+", r"""[^\s?!.,:;<>"{}]+""").split("|")
    pattern["Regex"] = "|".join(_escaped(WORDS[word]) if word in WORDS else word for word in alternatives)
    for rule in tokenizer["decoder"]["decoders"][2:]:
        for old in ("<search>", "</search>"):
            rule["pattern"]["String"] = rule["pattern"]["String"].replace(old, WORDS[old])
            rule["content"] = rule["content"].replace(old, WORDS[old])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": ends}), encoding="utf-8")
    card = (folder / "reasonrag.yaml").read_text(encoding="utf-8")
    (folder / "reasonrag.yaml").write_text(card.replace("format: {", "format: {name: tool_calls, "), encoding="utf-8")
    return folder


def _escaped(word: str) -> str:
    return word if "\\" in word else word.translate({ord(c): f"\\{c}" for c in '{}|"'})
