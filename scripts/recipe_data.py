"""Writes the data files of the shipped recipes: answers of the `reverse` environment, given.

Held-out strings of the recipes' environment never occur. Run it again after a change of the
environment; a test holds that the files are what it writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from posttrain.config import ReverseConfig
from posttrain.envs.reverse import ReverseSpec

ENV = ReverseConfig(alphabet="0123456789", length=4, num_eval=100)
FOLDER = Path(__file__).parents[1] / "src/posttrain/recipes/data"
NUM_ROWS = 1500


def rows() -> Iterator[tuple[str, str, str]]:
    """Prompt, right answer, wrong answer. A wrong one is right but for one or two places."""
    tasks, chance = ReverseSpec(ENV).train_tasks(), random.Random(0)
    for index in range(NUM_ROWS):
        task = tasks[index]
        prompt = task.prompt[-1].plain_text()
        gold: str = task.hidden.reveal()["answer"]
        wrong = list(gold)
        for place in chance.sample(range(len(gold)), chance.choice((1, 2))):
            wrong[place] = chance.choice([c for c in ENV.alphabet if c != gold[place]])
        yield prompt, gold, "".join(wrong)


def files() -> dict[str, str]:
    """Text of each file by name."""
    demonstrations, pairs = [], []
    for prompt, gold, wrong in rows():
        demonstrations.append({"prompt": prompt, "completion": gold})
        pairs.append({"prompt": prompt, "chosen": gold, "rejected": wrong})
    return {
        "reverse-demonstrations.jsonl": _lines(demonstrations),
        "reverse-pairs.jsonl": _lines(pairs),
    }


def _lines(values: list[dict[str, str]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
