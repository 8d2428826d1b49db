"""How good a process reward model is on steps of held-out questions: order and calibration, with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import permutations
from typing import Any

from reasonrag.core.bootstrap import Measure, Ratio, intervals

GOOD = 0.5  # SPRE from which on a step is called good
BINS = 10
_MARGIN = 0.01  # siblings whose SPRE differs by less are not compared, as in pairs


def measures(
    question: Sequence[int], state: Sequence[int], predicted: Sequence[float], spre: Sequence[float], *, usual: float
) -> dict[str, Any]:
    """Return measures of `[n]` held-out steps, n >= 1, each with its 95 % interval over questions, or None if unknown.

    Args:
        question: number of the question of each step.
        state: number, within the question, of the state in which it was taken.
        predicted: what the model says, in [0, 1].
        spre: what it should say.
        usual: mean SPRE in training, the prediction of a model that knows nothing.

    Returns:
        `sibling_auc`: share of any two steps in one state, with different SPRE, that are in the right order, half for a
            tie: what choosing steps rests on.
        `auc`: probability that a good step (SPRE of at least `good`) is valued more than one that is not, over all
            questions; its interval is that of the linearised statistic (Obuchowski 1997, Biometrics 53, 567-578).
        `brier`: mean squared difference from SPRE; `usual_brier`: that of `usual`.
        `ece`: expected calibration error over ten equal bins; its interval keeps the sign of each bin's error.
        `reliability`: by bin, the mean prediction, the mean SPRE `observed`, and the number of steps.
    """
    import numpy as np

    said, seen, asked = np.array(predicted), np.array(spre), np.array(question)
    names, place = np.unique(asked, return_inverse=True)
    gap, bins = said - seen, np.minimum(said * BINS, BINS - 1).astype(int)
    sign = np.sign(np.bincount(bins, gap, BINS))[bins]
    every = np.ones(len(seen))
    states: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step, its_state in enumerate(zip(question, state, strict=True)):
        states[its_state].append(step)
    ordered = [(first, second) for steps in states.values() for first, second in permutations(steps, 2)]
    better, worse = np.array([two for two in ordered if spre[two[0]] - spre[two[1]] >= _MARGIN], int).reshape(-1, 2).T
    right = (np.sign(said[better] - said[worse]) + 1) / 2

    def ratio(part: Any, whole: Any = every, rows: Any = slice(None)) -> Ratio:
        return Ratio(*(np.bincount(place[rows], column, len(names)).tolist() for column in (part, whole)))

    columns: dict[str, Measure] = {
        "sibling_auc": ratio(right, np.ones(len(right)), better),
        "auc": _auc(said, seen >= GOOD, place),
        "brier": ratio(gap**2),
        "usual_brier": ratio((usual - seen) ** 2),
        "ece": ratio(sign * gap),
    }
    filled = np.unique(bins).tolist()
    columns |= {f"bin {number}": ratio(seen * (bins == number), every * (bins == number)) for number in filled}
    found = {name: interval and asdict(interval) for name, interval in intervals(columns, seed=0).items()}
    reliability = [
        {"predicted": said[bins == number].mean(), "observed": found.pop(f"bin {number}"), "steps": count}
        for number, count in zip(filled, np.bincount(bins)[filled].tolist(), strict=True)
    ]
    counts: Mapping[str, Any] = {"steps": len(seen), "questions": len(names), "siblings": len(right)}
    return {**found, "reliability": reliability, **counts, "good": GOOD, "usual": usual}


def _auc(said: Any, good: Any, place: Any) -> list[float | None]:
    """Return a column by question whose mean is the AUC: a question's value is the AUC and its share in the error."""
    import numpy as np

    questions = int(place.max()) + 1
    if good.all() or not good.any():
        return [None] * questions
    share = np.zeros(len(good))
    for side, sign in ((good, 1.0), (~good, -1.0)):  # how often a step stands on the right side of the others
        others = np.sort(sign * said[~side])
        below = sum(np.searchsorted(others, sign * said[side], end) for end in ("left", "right"))
        share[side] = below / 2 / len(others) / side.sum()
    auc = share[good].sum()
    share -= auc / np.where(good, good.sum(), (~good).sum())
    column: list[float | None] = (auc + questions * np.bincount(place, share)).tolist()
    return column
