"""What a grader worker runs to score reasoning-gym answers. Imported by workers only."""

from __future__ import annotations

import base64
import json
import pickle
from functools import cache
from typing import Any

from reasoning_gym import create_dataset


def score(dataset: str, params_json: str, entry_pickle: str, answer: str) -> float:
    """The dataset's own score of `answer`, usually 0..1.

    `entry_pickle` is the puzzle as the parent generated it, in base64: JSON would turn its tuples
    into lists and its integer keys into text, which some scorers don't survive.
    """
    entry = pickle.loads(base64.b64decode(entry_pickle))
    return float(_dataset(dataset, params_json).score_answer(answer, entry))


@cache
def _dataset(name: str, params_json: str) -> Any:
    return create_dataset(name, seed=0, size=1, **json.loads(params_json))
