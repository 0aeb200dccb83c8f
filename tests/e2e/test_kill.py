"""Killed at any moment, the same command goes on to the same end."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.journal import Journal

JOURNAL = "posttrain.journal:Journal"
LEARNER = "posttrain.training.learner:InlineLearner"
OPTIMIZER = "posttrain.training.optimizer:MasterOptimizer"
CHECKPOINTS = "posttrain.training.checkpoints"


def death(at: str, nth: int, after: bool = False, number: int = signal.SIGKILL) -> dict[str, Any]:
    return {"at": at, "nth": nth, "after": after, "signal": int(number)}


QUICK = {
    "before the model's weights are recorded": death(f"{JOURNAL}.record_event", 1),
    "in the middle of the second evaluation": death(f"{JOURNAL}.record_eval_group", 6),
    "after the optimizer moved, before the step is finished": death(f"{LEARNER}.step", 5, True),
    "with a checkpoint half written": death(f"{OPTIMIZER}.save", 2, True),
}
SLOW = {
    "before the journal exists": death(f"{JOURNAL}.create", 1),
    "right after the journal was made": death(f"{JOURNAL}.create", 1, True),
    "before the first draw": death(f"{JOURNAL}.record_draw", 1),
    "between the groups of a step": death(f"{JOURNAL}.record_group", 11),
    "after the last group of a step": death(f"{JOURNAL}.record_group", 12, True),
    "before a step is begun": death(f"{JOURNAL}.begin_step", 4),
    "after a step was begun": death(f"{JOURNAL}.begin_step", 4, True),
    "before the optimizer moves": death(f"{OPTIMIZER}.update", 3),
    "after a step was finished": death(f"{JOURNAL}.finish_step", 6, True),
    "before a checkpoint is begun": death(f"{LEARNER}.save", 1),
    "before a checkpoint gets its name": death(f"{CHECKPOINTS}:_sync_folder", 1, True),
    "between a checkpoint's name and its record": death(f"{JOURNAL}.record_checkpoint", 2),
    "between forgetting a checkpoint and removing it": death(
        f"{JOURNAL}.forget_checkpoint", 1, True
    ),
    "before the last checkpoint": death(f"{LEARNER}.save", 3),
    "before a line of metrics": death("posttrain.telemetry.files:MetricsFile.append", 4),
    "before the first evaluation": death(f"{JOURNAL}.record_eval_group", 1),
    "before an evaluation is recorded": death(f"{JOURNAL}.record_evaluation", 3),
    "before the summary": death("posttrain.run:write_json", 1),
}


def check_resume(
    zygote: Any, argv: Any, outcome: Any, folder: Path, reference: Path, fatal: dict[str, Any]
) -> None:
    command = argv(folder / "run")
    killed = zygote.run(*command, cwd=folder, deaths=[fatal])
    assert killed.status == -signal.SIGKILL, killed.err
    done = zygote.run(*command, cwd=folder)
    assert done.status == 0, done.err
    assert outcome(folder / "run") == outcome(reference)


@pytest.mark.parametrize("moment", QUICK)
def test_a_killed_run_goes_on_to_the_same_weights(
    moment: str, zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    check_resume(zygote, argv, outcome, tmp_path, reference, QUICK[moment])


@pytest.mark.slow
@pytest.mark.parametrize("moment", SLOW)
def test_every_boundary_survives_a_kill(
    moment: str, zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    check_resume(zygote, argv, outcome, tmp_path, reference, SLOW[moment])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_line_of_the_program_survives_a_kill(
    seed: int, zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    """Killed at line after line, again and again, until one process gets through."""
    rng = random.Random(seed)
    command = argv(tmp_path / "run")
    for _ in range(4):
        fatal = {"line": int(10 ** rng.uniform(2.5, 5.0))}
        killed = zygote.run(*command, cwd=tmp_path, deaths=[fatal])
        assert killed.status in (0, -signal.SIGKILL), killed.err
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)


def test_the_real_command_survives_sigkill(
    zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    command = argv(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain.cli", *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if '"event": "step", "step": 5,' in line:
            process.kill()
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)


def test_a_kill_during_the_redo_is_one_more_kill(
    zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    command = argv(tmp_path / "run")
    zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", 6)])
    again = zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", 2)])
    assert again.status == -signal.SIGKILL, again.err
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)


def test_a_resumed_run_shows_the_true_step(zygote: Any, argv: Any, tmp_path: Path) -> None:
    """f13: the display goes on from where the run was; what is redone is said."""
    command = argv(tmp_path / "run")
    zygote.run(*command, cwd=tmp_path, deaths=[death(f"{JOURNAL}.finish_step", 5, True)])
    done = zygote.run(*command, cwd=tmp_path)
    steps = [e["step"] for e in done.events if e["event"] == "step"]
    assert steps == [6, 7, 8]
    messages = [e["text"] for e in done.events if e["event"] == "message"]
    assert any("checkpoint of step 3, redoing steps 4 to 5" in text for text in messages)


def test_without_checkpoints_the_journal_is_redone_from_the_model(
    zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    command = argv(tmp_path / "run")
    zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", 8)])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    messages = [e["text"] for e in done.events if e["event"] == "message"]
    assert any("redoing steps 1 to 8" in text for text in messages)
    assert outcome(tmp_path / "run").weights_hash == outcome(reference).weights_hash


def test_a_checkpoint_that_the_journal_does_not_know_is_not_restored(
    zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    command = argv(tmp_path / "run")
    zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", 5)])
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-000003", folder / "step-000004")
    (folder / "step-000004" / "masters.safetensors").write_bytes(b"half")
    (folder / "step-000006.partial").mkdir()
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000006", "step-000008"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_finishes_the_write_and_says_how_to_go_on(
    number: signal.Signals,
    zygote: Any,
    argv: Any,
    outcome: Any,
    read_json: Callable[[Path], Any],
    tmp_path: Path,
    reference: Path,
) -> None:
    command = argv(tmp_path / "run")
    stop = death(f"{LEARNER}.step", 4, True, number)
    stopped = zygote.run(*command, cwd=tmp_path, deaths=[stop])
    assert stopped.status == 130
    assert "Traceback" not in stopped.err
    for part in ("interrupted", "is kept", f"--run-dir {tmp_path / 'run'}", "--resume"):
        assert part in stopped.err
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["exit_reason"], summary["steps"]) == ("interrupted", 4)
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)


def test_a_stop_is_heard_between_two_redone_steps(
    zygote: Any,
    argv: Any,
    outcome: Any,
    read_json: Callable[[Path], Any],
    tmp_path: Path,
    reference: Path,
) -> None:
    command = argv(tmp_path / "run")
    zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", 6)])
    stop = death(f"{LEARNER}.step", 1, True, signal.SIGTERM)
    stopped = zygote.run(*command, cwd=tmp_path, deaths=[stop])
    assert stopped.status == 130, stopped.err
    assert read_json(tmp_path / "run" / "summary.json")["exit_reason"] == "interrupted"
    assert [e for e in stopped.events if e["event"] == "step"] == []
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run") == outcome(reference)


def test_ctrl_c_before_the_run_began_leaves_nothing(zygote: Any, argv: Any, tmp_path: Path) -> None:
    stop = death("posttrain.run:build_spec", 1, False, signal.SIGINT)
    stopped = zygote.run(*argv(tmp_path / "run"), cwd=tmp_path, deaths=[stop])
    assert stopped.status == 130
    assert stopped.err == "interrupted: the run had not begun, nothing was written\n"
    assert not (tmp_path / "run").exists()


def test_with_a_lag_every_draw_is_still_used_once(
    zygote: Any, argv: Any, outcome: Any, tmp_path: Path
) -> None:
    """Which policy samples what depends on when the kill came; what is drawn and used does not."""
    command = argv(tmp_path / "run", "max_policy_lag=2")
    for nth in (3, 2):
        killed = zygote.run(*command, cwd=tmp_path, deaths=[death(f"{LEARNER}.step", nth)])
        assert killed.status == -signal.SIGKILL, killed.err
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    result = outcome(tmp_path / "run")
    assert [s[1] for s in result.steps] == [tuple(range(4 * i, 4 * i + 4)) for i in range(8)]
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        for step in journal.steps():
            oldest = min(journal.group(d).min_policy_version for d in step.draw_ids)
            assert step.step - 1 - oldest <= 2
