"""What the driver looks at now and then beside its workers: the cluster, another owner, the quota.

Each look may end the run through the dispatcher; none of them decides anything about units.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from capture.settings import UnitResult
from jobs.config import RunConfig
from jobs.dispatch import Dispatcher
from jobs.owner import RunOwner
from jobs.policy import Event
from jobs.snapshots import SnapshotKeeper
from jobs.status import read_status
from store.byte_count import human_bytes
from store.objects.protocol import ObjectStore

if TYPE_CHECKING:
    from jobs.ray_pool import RayPool

LOOK_SECONDS = 5.0


class Watch:
    """The slow looks around: the owner's beat, nodes told to leave, the quota."""

    def __init__(
        self,
        objects: ObjectStore,
        config: RunConfig,
        owner: RunOwner,
        dispatcher: Dispatcher,
        pool: RayPool,
        snapshots: SnapshotKeeper,
    ) -> None:
        self._owner = owner
        self._dispatcher = dispatcher
        self._pool = pool
        self._snapshots = snapshots
        self._quota = config.max_bytes
        self._stored = read_status(objects).bytes if config.max_bytes is not None else 0
        self._looked = time.monotonic()

    def note(self, result: UnitResult) -> None:
        """Count a unit's bytes against the quota; end the run once the next would not fit."""
        self._snapshots.note()
        self._stored += result.bytes
        if self._quota is not None and self._stored + result.bytes > self._quota:
            message = (
                f"{human_bytes(self._stored)} are stored and another unit does not fit into "
                f"max_bytes ({human_bytes(self._quota)}); raise it and run again"
            )
            self._dispatcher.end(Event.QUOTA, message, time.monotonic())

    def look(self) -> None:
        """Look if it is time to."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if not self._pool.has_nodes():
            message = "no node of the Ray cluster is left; run the same command to go on"
            self._dispatcher.end(Event.CLUSTER_GONE, message, now)
            return
        self._dispatcher.drain_nodes(self._pool.draining_nodes())
        newer = self._owner.newer
        if newer is not None:
            message = f"a driver on {newer.host} (process {newer.pid}) took this run over"
            self._dispatcher.end(Event.OTHER_DRIVER, message, now)
