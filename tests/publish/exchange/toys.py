"""Rows as published tools write them, invented."""

from __future__ import annotations

from typing import Any


def proguide_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row in the documented fields of RAG-ProGuide."""
    instruction, asked = "Reason.", f"Question: Who made film {number}?"
    return {
        "instruction": instruction,
        "input": asked,
        "prompt": f"System: {instruction}\nUser: {asked}",
        "chosen": f"So the next query is <query>film {number}</query>",
        "rejected": "So the answer is <answer>\nLucas </answer>",
        "chosen_action_type": "Query Generation",
        "chosen_content": f"film {number}",
        "rejected_action_type": "Answer Generation",
        "rejected_content": "Lucas",
        "layer": number % 4,
    } | changes


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
