"""What a dispatcher asks of a pool of workers; `jobs.ray_pool` is the real one."""

from __future__ import annotations

from typing import Protocol

from jobs.messages import PoolEvent, UnitOrder, WorkerId


class WorkerPool(Protocol):
    """Workers that start, take orders and die. Nothing here blocks but `poll`."""

    def spawn(self) -> WorkerId:
        """Ask for one more worker; `Placed`, then `Started` or `StartFailed` follow."""

    def send(self, worker: WorkerId, order: UnitOrder | None) -> None:
        """Make one call of `work`; one `Reported` follows, or `Lost` for all open calls at once."""

    def kill(self, worker: WorkerId) -> None:
        """End a worker now, whatever it does; no event of it follows. Unknown ones are fine."""

    def poll(self, timeout: float) -> list[PoolEvent]:
        """Return what has happened, waiting up to `timeout` seconds for something to."""
