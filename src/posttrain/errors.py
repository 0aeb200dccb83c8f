"""One error tree. Every message names the object, the fact and the remedy.

Each error is also the standard type a caller would expect, so `except ValueError` keeps working.
`exit_status` is what the command line returns: 2 for what the user can mend before a run starts,
1 for what failed while one was going on.
"""

from __future__ import annotations


class PosttrainError(Exception):
    """Root of everything this project raises on purpose."""

    exit_status = 1


class UserError(PosttrainError, ValueError):
    """Bad input that was found before anything started. Nothing was written."""

    exit_status = 2


class ConfigError(UserError):
    """A recipe, an override or a combination of settings is wrong."""


class ModelError(UserError):
    """A model folder is missing, incomplete or unusable for the task."""


class DataError(UserError):
    """A data file or one of its rows is unusable."""


class RunDirectoryError(UserError):
    """The run directory is taken, missing, unwritable or belongs to another recipe."""


class NetworkError(UserError, ConnectionError):
    """A download was needed and could not be had."""


class JournalError(PosttrainError, RuntimeError):
    """The journal cannot be read or written."""


class JournalCorruptError(JournalError):
    """Bytes on disk are not the bytes that were written. The message says where."""


class SchemaVersionError(JournalError):
    """The journal was written by a version that this code does not read."""


class StorageError(PosttrainError, OSError):
    """The disk is full or the run directory cannot be written."""


class ReplayMismatchError(PosttrainError, RuntimeError):
    """A redone step did not give the weights that were recorded."""


class EngineError(PosttrainError, RuntimeError):
    """A sampler failed to serve a request."""


class RolloutError(PosttrainError, RuntimeError):
    """Rollouts cannot go on (for instance every group is invalid)."""


class TrainingError(PosttrainError, RuntimeError):
    """The learner cannot go on (for instance repeated non-finite gradients)."""


class BenchmarkError(PosttrainError, RuntimeError):
    """A benchmark could not measure what it claims, or what it compares with failed."""


class MissingDependencyError(UserError, ImportError):
    """An optional package is needed. The message says how to install it."""
