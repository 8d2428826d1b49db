"""From questions to an evaluated policy in Python: `python -m examples.questions_to_policy runs/script`.

It runs in the demo world. For questions of yours leave the preset out, name `questions.dataset`, `retrieval.corpus` and
`policy.spec`, and give `DPOSettings` the model. A call that was killed resumes if it is repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import reasonrag


def main(out: Path, questions: int = 60, max_steps: int = -1) -> dict[str, Any]:
    """Build trees, train DPO on their pairs, and compare the policy with the one before on held-out questions."""
    config = reasonrag.load_config(preset="demo", overrides={"questions.limit": questions})
    reasonrag.build_trees(config, out / "trees")
    settings = reasonrag.DPOSettings(
        data=str(out / "trees"),
        model="demo",
        method="full",
        learning_rate=1e-4,
        max_steps=max_steps,
        min_examples=1,  # a look: so few pairs teach noise
        min_questions=1,
    )
    reasonrag.train_dpo(settings, out / "dpo")
    held_out = {"questions.split": "test", "questions.limit": questions}
    policies = {
        name: reasonrag.load_config(preset="demo", overrides=held_out | {"policy.spec": spec})
        for name, spec in {"base": "demo", "dpo": f"hf:{out / 'dpo'}"}.items()
    }
    return reasonrag.Evaluation(policies, out / "eval", temperatures=[0.0]).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the trees, the policy and the evaluation")
    for difference in main(parser.parse_args().out)["differences"]:
        print("dpo - base: {metric} {mean:+.3f} [{low:+.3f}, {high:+.3f}], {n} questions".format(**difference))
