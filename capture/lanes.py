"""How a rank reaches its shard writers: threads of this process, or processes beside it.

A lane carries messages and slab numbers to one `ShardLoop` and brings its answers back by callback.
Threads cost nothing to start and suit a CPU engine. Beside a GPU they would share the interpreter's
lock with the forward pass and with each other: 14 threads that checksum 256 KiB at a time spent 250
microseconds on each 10 of work, so there every writer is a process that maps the same slabs.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Protocol

from capture.settings import StoreLocation
from capture.shard_loop import Message, PartReport, PartState, ShardLoop, Tap
from capture.slabs import Entry, SlabMemory
from store.codec import Codec
from store.objects.open import open_store
from store.objects.protocol import ObjectStore


@dataclass(frozen=True, slots=True)
class Rows:
    """Entries of one writer in slab number `slab`; answered by `SlabDone` once they are taken."""

    slab: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class SlabDone:
    """The writer took its rows of this slab."""

    slab: int


@dataclass(frozen=True, slots=True)
class Broken:
    """An error that belongs to no unit; the lane can do no more."""

    error: str


@dataclass(frozen=True, slots=True)
class LaneStart:
    """The first message of a writer process."""

    rank: int
    taps: dict[int, Tap]
    codec: Codec
    location: StoreLocation
    slab_bytes: int
    num_slabs: int
    pinned: bool
    """Whether the slabs' pages are all there: page-locked for a GPU."""


STOP = "stop"
"""The last message of a writer process."""

Answer = PartReport | PartState | SlabDone | Broken
OnAnswer = Callable[[Answer], None]


class Lane(Protocol):
    """The way to one shard writer. `send` never waits for the work."""

    def send(self, message: Message | Rows) -> None: ...

    def close(self, seconds: float) -> None: ...


def serve(loop: ShardLoop, slabs: SlabMemory, message: Message | Rows, answer: OnAnswer) -> None:
    """Obey one message and answer; the same in a thread and in a process."""
    part: PartReport | PartState | None = None
    try:
        if isinstance(message, Rows):
            loop.place(message.entries, slabs.slab(message.slab))
        else:
            part = loop.handle(message)
    except Exception:  # noqa: BLE001
        # Policy: rows that cannot be read as what they should be, and messages that cannot be
        # obeyed, end the engine, with why.
        answer(Broken(traceback.format_exc()))
    if isinstance(message, Rows):
        answer(SlabDone(message.slab))
    elif part is not None:
        answer(part)


SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For writer processes: one each for a core's work, with as many threads in BLAS as the host has
cores, would wait for each other in every small product of a stored pattern."""


class ThreadLane:
    """A writer in a thread of this process."""

    def __init__(
        self, number: int, loop: ShardLoop, slabs: SlabMemory, on_answer: OnAnswer
    ) -> None:
        self._messages: queue.SimpleQueue[Message | Rows | None] = queue.SimpleQueue()

        def work() -> None:
            while (message := self._messages.get()) is not None:
                serve(loop, slabs, message, on_answer)

        self._thread = threading.Thread(target=work, name=f"shard-writer-{number}", daemon=True)
        self._thread.start()

    def send(self, message: Message | Rows) -> None:
        self._messages.put(message)

    def close(self, seconds: float) -> None:
        self._messages.put(None)
        self._thread.join(seconds)


class ProcessLane:
    """A writer in a process of its own, which maps the slabs and opens its own store."""

    def __init__(self, number: int, start: LaneStart, slabs: SlabMemory) -> None:
        ours, theirs = Pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **SINGLE_THREADED,
        }
        self.number, self.stopped = number, False
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "capture.shard_process",
                str(theirs.fileno()),
                str(slabs.descriptor),
            ],
            pass_fds=(theirs.fileno(), slabs.descriptor),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.connection: Connection = ours
        ours.send(start)

    def send(self, message: Message | Rows) -> None:
        # The collector meets the same end of a broken pipe and reports it.
        with suppress(OSError):
            self.connection.send(message)

    def close(self, seconds: float) -> None:
        self.stopped = True
        # Told, not just hung up on: while the collector polls, a closed pipe stays half open.
        with suppress(OSError):
            self.connection.send(STOP)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()


def thread_lanes(
    rank: int,
    taps: Sequence[dict[int, Tap]],
    codec: Codec,
    store: ObjectStore,
    slabs: SlabMemory,
    on_answer: OnAnswer,
) -> list[Lane]:
    """Start one thread for each share of the taps."""
    return [
        ThreadLane(number, ShardLoop(rank, share, codec, store), slabs, on_answer)
        for number, share in enumerate(taps)
    ]


def process_lanes(
    rank: int,
    taps: Sequence[dict[int, Tap]],
    codec: Codec,
    location: StoreLocation,
    slabs: SlabMemory,
    on_answer: OnAnswer,
    *,
    pinned: bool = False,
) -> list[Lane]:
    """Start one process for each share of the taps, and a thread that collects their answers."""
    lanes = [
        ProcessLane(
            number,
            LaneStart(rank, share, codec, location, slabs.slab_bytes, slabs.num_slabs, pinned),
            slabs,
        )
        for number, share in enumerate(taps)
    ]

    def collect() -> None:
        open_lanes = {lane.connection: lane for lane in lanes}
        while open_lanes:
            try:
                ready = wait(list(open_lanes))
            except OSError:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    on_answer(connection.recv())
                except (EOFError, OSError):
                    lane = open_lanes.pop(connection)
                    connection.close()
                    if not lane.stopped:
                        on_answer(Broken(f"shard writer process {lane.number} ended"))

    threading.Thread(target=collect, name="shard-collector", daemon=True).start()
    return list(lanes)


def open_loop(start: LaneStart) -> ShardLoop:
    """Return the loop of a writer process."""
    store = open_store(start.location.url, start.location.options)
    return ShardLoop(start.rank, start.taps, start.codec, store)
