"""Ctrl-C and SIGTERM as a cancelled wait."""

from __future__ import annotations

import asyncio
import signal


class interruptible:
    """Ctrl-C and SIGTERM cancel the loop at its next wait; a second Ctrl-C ends the process.

    Nothing is cut in the middle of a write: the loop only waits between them.
    """

    def __enter__(self) -> None:
        task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        assert task is not None

        def stop() -> None:
            self._remove()
            task.cancel()

        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, stop)
        except (ValueError, RuntimeError, NotImplementedError):
            pass  # not the main thread, or no signals here: the caller's handlers stay

    def _remove(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def __exit__(self, *_: object) -> None:
        self._remove()
