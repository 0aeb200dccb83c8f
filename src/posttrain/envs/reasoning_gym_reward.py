"""Grading reasoning-gym answers, behind a process boundary."""

from __future__ import annotations

import base64
import json
import math
import pickle
import re
from collections.abc import Sequence

from posttrain.rewards.worker import (
    WorkerCrash,
    WorkerPool,
    WorkerRaised,
    WorkerStartError,
    WorkerTimeout,
)
from posttrain.types import Invalid, InvalidKind, RewardTerm, Scored, Task, Turn, Verdict

_TIMEOUT_S = 10.0
_TARGET = "posttrain.envs.reasoning_gym_worker:score"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(text: str) -> str:
    """What stands in the last <answer>...</answer>, else the whole text, without outer space.

    Example:
        >>> extract_answer("<answer>3</answer> no, <answer> 4 </answer>"), extract_answer(" 5\\n")
        ('4', '5')
    """
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


class ReasoningGymReward:
    """The library's own score of the last turn's answer; correct from 1.

    Scorers parse text of the policy, some with `eval`, and some hang on hostile input, so they
    run in a worker process that is killed from outside after 10 s. A scorer that fails is an
    `Invalid`, not a 0. The process keeps a bad answer from stopping the run; it is no sandbox.

    Example:
        >>> ReasoningGymReward().__class__.__name__
        'ReasoningGymReward'
    """

    def __init__(self, pool: WorkerPool | None = None) -> None:
        self._pool = pool or WorkerPool(_TARGET, timeout_s=_TIMEOUT_S)

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        answer = extract_answer(turns[-1].completion.text) if turns else ""
        if not answer:
            return _scored(0.0, "no answer", parsed=False)
        hidden = task.hidden.reveal()
        arguments = {
            "dataset": hidden["dataset"],
            "params_json": json.dumps(hidden["params"], sort_keys=True),
            "entry_pickle": base64.b64encode(pickle.dumps(hidden["entry"])).decode(),
            "answer": answer,
        }
        try:
            value = await self._pool.call(None, arguments)
        except WorkerTimeout as error:
            return Invalid(InvalidKind.REWARD_TIMEOUT, str(error), retryable=True)
        except (WorkerCrash, WorkerStartError) as error:
            return Invalid(InvalidKind.GRADER_CRASH, str(error), retryable=True)
        except WorkerRaised as error:
            return Invalid(InvalidKind.REWARD_ERROR, f"reasoning-gym {hidden['dataset']}: {error}")
        if not math.isfinite(value):
            return Invalid(InvalidKind.REWARD_VALUE, f"reasoning-gym scored {value}")
        return _scored(value, f"answer {answer[:200]!r}", parsed=True)

    async def close(self) -> None:
        await self._pool.close()


def _scored(value: float, evidence: str, *, parsed: bool) -> Scored:
    return Scored(value, (RewardTerm("reasoning_gym", value),), evidence, parsed)
