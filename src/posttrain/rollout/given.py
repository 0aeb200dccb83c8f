"""Groups of given answers, drawn and journalled as sampled ones are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from posttrain.data.given import GivenAnswer, answers
from posttrain.data.rows import BadRows
from posttrain.errors import DataError
from posttrain.protocols import Curriculum, DrawJournal
from posttrain.rollout.recorder import Renderer
from posttrain.types import (
    Draw,
    Group,
    Scored,
    StopReason,
    Task,
    TokenKind,
    TokenSequence,
    Trajectory,
)


def given_group(renderer: Renderer, task: Task, draw: Draw, max_tokens: int) -> Group:
    """The given answers of a task as trajectories: what the template writes between the generation
    prompt and the end of the turn is DEMONSTRATION, the rest is prompt.

    Raises DataError for an answer that does not fit into `max_tokens`, prompt included, or that
    the template does not append to the prompt.
    """
    members = []
    for index, answer in enumerate(answers(task)):
        sequence = _sequence(renderer, task, answer)
        if len(sequence) > max_tokens:
            raise DataError(
                f"task {task.task_id}: prompt and {answer.role} answer have {len(sequence)} tokens "
                f"and the context holds {max_tokens}; shorten the row or raise model.max_context"
            )
        members.append(
            Trajectory(
                draw.draw_id,
                index,
                draw.seed,
                (),
                (sequence,),
                Scored(answer.reward),
                StopReason.TERMINATED,
                fingerprint=task.fingerprint,
                role=answer.role,
            )
        )
    return Group(draw, tuple(members))


def check_given(renderer: Renderer, tasks: Sequence[Task], max_tokens: int) -> None:
    """Measure every row before the run, so that none fails in the middle of it.

    Raises DataError with each row that does not fit into `max_tokens` or whose two answers become
    the same tokens, and ModelError as `given_group`.
    """
    bad: dict[tuple[str, str], BadRows] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        place = (task.metadata["source"], next(k for k in task.metadata if k != "source"))
        rows = bad.setdefault(place, BadRows(*place))
        sizes[place] += 1
        number = task.metadata[place[1]]
        given = {a.role: _sequence(renderer, task, a).token_ids.tolist() for a in answers(task)}
        for role, ids in given.items():
            if len(ids) > max_tokens:
                rows.add(
                    number,
                    "it is longer than the context",
                    f"prompt and {role} have {len(ids)} tokens, model.max_context is {max_tokens}",
                )
        if len(given) == 2 and given["chosen"] == given["rejected"]:
            rows.add(number, "chosen and rejected are the same tokens")
    for place, rows in bad.items():
        rows.raise_if_any(sizes[place])


def _sequence(renderer: Renderer, task: Task, answer: GivenAnswer) -> TokenSequence:
    prompt_ids, prompt_kinds = renderer.opening(task.prompt)
    answer_ids = renderer.answer_ids(task.prompt, answer.text)
    count = len(prompt_ids) + len(answer_ids)
    kinds = [*prompt_kinds, *[int(TokenKind.DEMONSTRATION)] * len(answer_ids)]
    return TokenSequence.build([*prompt_ids, *answer_ids], kinds, [0.0] * count, [-1] * count)


class GivenProducer:
    """Hands out groups of given answers in the order they were drawn. Nothing is in flight: what
    is drawn is journalled before the next line runs."""

    def __init__(
        self,
        renderer: Renderer,
        curriculum: Curriculum,
        journal: DrawJournal,
        *,
        max_tokens: int,
        groups_per_step: int,
        next_draw_id: int = 0,
        open_draws: Iterable[tuple[Draw, Group | None]] = (),
    ) -> None:
        self._renderer = renderer
        self._curriculum = curriculum
        self._journal = journal
        self._max_tokens = max_tokens
        self._groups_per_step = groups_per_step
        self._next_draw_id = next_draw_id
        self._left_open = list(open_draws)

    async def take(self, policy_version: int) -> list[Group]:
        """The next `groups_per_step` groups; those that a former process left open come first."""
        taken: list[Group] = []
        while len(taken) < self._groups_per_step:
            if self._left_open:
                draw, group = self._left_open.pop(0)
            else:
                draw, group = self._curriculum.draw(self._next_draw_id), None
                self._next_draw_id += 1
                self._journal.record_draw(draw)
            if group is None:
                task = self._curriculum.task(draw)
                group = given_group(self._renderer, task, draw, self._max_tokens)
                self._journal.record_group(group)
            taken.append(group)
        return taken

    async def close(self) -> None:
        """Nothing is in flight."""
