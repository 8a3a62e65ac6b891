"""A shard writer as a process: `python -m capture.shard_process PIPE SLABS`, started by a rank.

It is told its work over the inherited pipe and maps the rank's slabs from the inherited memory
file. It ends when the pipe does, so it never outlives the rank. No torch is loaded here.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from capture.lanes import STOP, LaneStart, open_loop, serve
from capture.slabs import SlabMemory


def main(pipe: int, slabs: int) -> None:
    """Serve messages until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(pipe)
    start = connection.recv()
    assert isinstance(start, LaneStart)
    loop = open_loop(start)
    memory = SlabMemory(slabs, start.num_slabs, start.slab_bytes, mapped_at_once=start.pinned)
    # A pipe that ends means that the rank is gone: then there is nobody to tell.
    with suppress(EOFError, OSError):
        while (message := connection.recv()) != STOP:
            serve(loop, memory, message, connection.send)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
