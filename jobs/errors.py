"""What can be wrong with a job: its config, its inputs, its workers. Each says what to do next."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ends; the same code again when run again on a finished run."""

    DONE = 0
    REFUSED = 2
    """Bad config, or the run was stopped because going on made no sense."""
    SOME_FAILED = 3
    """Everything is committed, but some prompts failed."""
    INTERRUPTED = 75
    """Not finished; run the same command again."""


class JobError(Exception):
    """Base of the errors that end a command; `exit_code` is the code it ends with."""

    exit_code = ExitCode.REFUSED


class ConfigError(JobError, ValueError):
    """The config file, or a `--set`, is not usable."""


class SourceError(JobError, ValueError):
    """A prompt source cannot be read, or not as the config says."""


class InputsChanged(JobError, ValueError):
    """The prompt source is not what the run was planned from."""


class QuotaExceeded(JobError, RuntimeError):
    """The run would store more than `max_bytes` allows."""


class RunStopped(JobError, RuntimeError):
    """The policy stopped the run: more attempts would fail the same way."""


class RunInterrupted(JobError, RuntimeError):
    """The run was asked to stop, or lost its workers; running it again goes on."""

    exit_code = ExitCode.INTERRUPTED


class RunOwnedElsewhere(RunInterrupted):
    """Another driver works on this run."""
