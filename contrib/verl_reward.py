"""A reward function for verl: exact match of the last answer.

    python -m verl.trainer.main_ppo ... reward.custom_reward_function.path=contrib/verl_reward.py

The score is that of `reasonrag eval` (em). verl's own for `searchR1_*` data sets differs if a policy opens a second
`<answer>` in an answer: verl reads from the first one on, this from the last.
"""

import re
import string
from collections.abc import Mapping, Sequence


def compute_score(data_source: str, solution_str: str, ground_truth: Mapping[str, Sequence[str]], **_: object) -> float:
    """Return 1.0 if the last `<answer>` of a response equals one in `ground_truth["target"]`, else 0.0."""
    # Text that a search returned is not the policy's answer.
    written = re.sub(r"</search>\s*<information>.*?</information>", "", solution_str, flags=re.DOTALL)
    answers = [opened.rpartition("<answer>")[2] for opened in re.findall("<answer>(.*?)</answer>", written, re.DOTALL)]
    if not answers or not answers[-1].strip():
        return 0.0
    return float(any(_normal(answers[-1]) == _normal(golden) for golden in ground_truth["target"]))


def _normal(text: str) -> str:
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
