"""What can go wrong between a prompt and its durable rows."""

from __future__ import annotations


class CaptureError(Exception):
    """Base of the capture errors."""


class EngineDead(CaptureError, RuntimeError):
    """The engine can do no more work; its process must be replaced."""


class PromptRefused(CaptureError, ValueError):
    """The engine does not take this prompt; it is recorded as failed and the rest goes on."""


class UnsupportedModel(CaptureError, ValueError):
    """The model's attention is of a kind whose rows or pattern cannot be captured faithfully."""


class AdapterMismatch(CaptureError, RuntimeError):
    """nnsight or vLLM is not as the adapter expects; the message names what changed."""


class RowsMissing(CaptureError, RuntimeError):
    """A unit's rows are not all there exactly once; it must not be committed."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        """`rank` is whose rows they are, where they are one rank's."""
        super().__init__(message)
        self.rank = rank


class CaptureStalled(CaptureError, TimeoutError):
    """Staged rows were not written away in time."""


class UnsupportedOption(CaptureError, ValueError):
    """An engine option under which stored rows would not be right."""


class SelfCheckFailed(CaptureError, RuntimeError):
    """What the engine captured of a few prompts is not right; the run must not start."""


class ProbeError(CaptureError, ValueError):
    """A user's probe cannot be used, or gave something else than in its trial."""
