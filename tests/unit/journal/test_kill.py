"""SIGKILL at any point: nothing recorded is lost, nothing is trained twice, writing goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).with_name("kill_driver.py")


def kills_of(mode: str, folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, str(DRIVER), mode, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[0])


def test_a_kill_during_create_leaves_nothing_or_a_whole_journal(tmp_path) -> None:
    assert kills_of("create", tmp_path) >= 20


def test_every_prompt_is_trained_once_per_epoch_across_kills(tmp_path) -> None:
    """Field report f02: 20 prompts, kill -9 at a random step, resume, count trained prompts.

    The kills fall on random lines of the journal's own code, at any of its methods.
    """
    assert kills_of("lines", tmp_path) >= 20


def test_kills_from_outside_lose_nothing_that_was_recorded(tmp_path) -> None:
    """Field report f02 again, with kills that fall inside system calls too."""
    assert kills_of("anywhere", tmp_path) >= 10
