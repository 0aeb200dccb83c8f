"""Processes that we compare with: requests and answers, and how they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.benchmarks.peer import Peer, environment
from posttrain.errors import BenchmarkError, MissingDependencyError

DOUBLER = """
import os, sys
from posttrain.benchmarks.channel import Channel
channel = Channel()
print("a library says hello")
os.write(1, b"and so does C\\n")
channel.answer({"ready": True})
for request in channel.requests():
    if request["value"] < 0:
        sys.exit("there are no negative numbers here")
    channel.answer({"value": 2 * request["value"], "threads": os.environ["BENCH_THREADS"]})
"""


def doubler(folder: Path) -> Peer:
    return Peer("doubler", [sys.executable, "-c", DOUBLER], folder, {"BENCH_THREADS": "2"})


def test_a_peer_answers_each_request_whatever_its_libraries_print(tmp_path: Path) -> None:
    with doubler(tmp_path) as peer:
        assert [peer.ask(value=v)["value"] for v in (1, 5, 0)] == [2, 10, 0]
        assert peer.ask(value=1)["threads"] == "2", "variables reach its environment"
    assert peer._process.returncode == 0, "it ends by itself when there are no more requests"


def test_a_peer_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with (
        doubler(tmp_path) as peer,
        pytest.raises(BenchmarkError, match="doubler ended(.|\n)*no negative numbers"),
    ):
        peer.ask(value=-1)


def test_a_peer_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    peer = Peer("broken", [sys.executable, "-c", "import no_such_package"], tmp_path)
    with pytest.raises(BenchmarkError, match="no_such_package"), peer:
        pass
    assert peer._process.returncode == 1


def test_a_missing_environment_names_the_script_that_makes_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"setup\.sh nobody"):
        environment("nobody")
