"""Which driver works on a run: advisory epochs under `owners/`, so that a second one is told.

Correctness never rests on this: attempts never share names and commits are create-only, so two
drivers can only waste work. A thread renews the owner's object every `BEAT_SECONDS`, whatever the
driver is busy with. A new driver takes over at once from an owner that said goodbye or whose
process on this host is gone, and otherwise after watching it miss its beats. The older of two
drivers sees the newer epoch and stops.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from jobs.errors import RunOwnedElsewhere
from store import keys
from store.errors import ObjectExists, ObjectNotFound, RunError, StoreError
from store.objects.protocol import ObjectStore
from store.run_format import Document

BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 35.0
_MAX_BYTES = 1 << 16
UNKNOWN = "an unknown driver"
_NAME = re.compile(r"owners/(\d{8,})\.json")


class OwnerRecord(Document):
    """`owners/<epoch>.json`: who drives the run, and how lately it said so."""

    kind: Literal["owner"] = "owner"
    epoch: int
    host: str
    pid: int
    process: str
    """The kernel's start time of the process, so that a reused pid is told from the owner."""
    beat: int = 0
    released: bool = False


class RunOwner:
    """This driver's claim on a run."""

    def __init__(self, objects: ObjectStore, record: OwnerRecord) -> None:
        self._objects = objects
        self._record = record
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="owner-beat", daemon=True)
        self.newer: OwnerRecord | None = None
        """The driver that took over, once there is one."""

    @classmethod
    def claim(
        cls,
        objects: ObjectStore,
        *,
        take_over: bool = False,
        patience: float = PATIENCE_SECONDS,
        tell: Callable[[str], None] = lambda _message: None,
    ) -> RunOwner:
        """Become the run's owner. Raises `RunOwnedElsewhere` while another driver is alive."""
        latest = _latest(objects)
        if latest is not None and not latest.released and not take_over:
            _wait_until_silent(objects, latest, patience, tell)
        epoch = latest.epoch + 1 if latest else 1
        record = OwnerRecord(
            epoch=epoch, host=_host(), pid=os.getpid(), process=_process_start(os.getpid()) or ""
        )
        try:
            objects.create(_name(epoch), record.to_bytes())
        except ObjectExists:
            raise RunOwnedElsewhere(
                "another driver took up this run at the same moment; run again once it is done"
            ) from None
        owner = cls(objects, record)
        owner._thread.start()
        return owner

    @property
    def epoch(self) -> int:
        return self._record.epoch

    def beat(self) -> None:
        """Say that this driver lives, and look whether a newer one took over."""
        latest = _latest(self._objects)
        if latest is not None and latest.epoch > self.epoch:
            self.newer = latest
            return
        self._record = self._record.model_copy(update={"beat": self._record.beat + 1})
        self._objects.put(_name(self.epoch), [self._record.to_bytes()])

    def release(self) -> None:
        """Say goodbye, so that the next driver need not wait."""
        self._stop.set()
        self._thread.join(BEAT_SECONDS)
        self._record = self._record.model_copy(update={"released": True})
        self._objects.put(_name(self.epoch), [self._record.to_bytes()])

    def _beat_on(self) -> None:
        while not self._stop.wait(BEAT_SECONDS) and self.newer is None:
            with suppress(
                StoreError
            ):  # A missed beat or two are within every successor's patience.
                self.beat()


def _wait_until_silent(
    objects: ObjectStore, owner: OwnerRecord, patience: float, tell: Callable[[str], None]
) -> None:
    who = f"a driver on {owner.host} (process {owner.pid}, epoch {owner.epoch})"
    if owner.host.startswith(UNKNOWN):
        who = f"{owner.host}, of epoch {owner.epoch},"
    refusal = f"{who} works on this run; wait for it, stop it, or take over with --take-over"
    if owner.host == _host():
        if _process_start(owner.pid) == owner.process:
            raise RunOwnedElsewhere(refusal)
        return
    tell(f"{who} may still work on this run; watching it for {patience:.0f} s")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(2.0, patience / 10))
        latest = _latest(objects)
        if latest is None or latest.released:
            return
        if (latest.epoch, latest.beat) != (owner.epoch, owner.beat):
            raise RunOwnedElsewhere(refusal)


def _latest(objects: ObjectStore) -> OwnerRecord | None:
    epochs = {
        int(match[1]): info.bytes
        for info in objects.list(keys.OWNERS)
        if (match := _NAME.fullmatch(info.name)) is not None
    }
    if not epochs:
        return None
    epoch = max(epochs)
    name = _name(epoch)
    if epochs[epoch] > _MAX_BYTES:
        return _unreadable(epoch, f"{name} has {epochs[epoch]} bytes")
    try:
        record = OwnerRecord.from_bytes(objects.get(name, max_bytes=_MAX_BYTES), name)
    except ObjectNotFound:
        return None
    except RunError as error:
        return _unreadable(epoch, str(error))
    if record.epoch != epoch:
        return _unreadable(epoch, f"{name} says it is of epoch {record.epoch}")
    return record


def _unreadable(epoch: int, why: str) -> OwnerRecord:
    """Return an owner that nothing is known of: it may live, so it is watched, and never beats."""
    return OwnerRecord(epoch=epoch, host=f"{UNKNOWN} ({why})", pid=0, process="", beat=-1)


def _name(epoch: int) -> str:
    return f"{keys.OWNERS}{epoch:08d}.json"


def _host() -> str:
    """The host's name, boot and process-id namespace: where a pid means what it means here."""
    name = socket.gethostname()
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.is_symlink():
        return name
    return f"{name}/{boot.read_text().strip()[:8]}/{namespace.readlink().name}"


def _process_start(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[-1].split()
    return None if fields[0] in "ZX" else fields[19]
