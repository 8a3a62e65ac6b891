"""A TCP link to a server on this machine that takes its time: every message to it is held back.

    python benchmarks/slow_link.py PORT MILLISECONDS

Prints the port that it listens on, and forwards to PORT until it is ended. A request that fits one
packet comes this much later, as over a network; nothing else is slowed. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def slow_link(port: int, milliseconds: float) -> Iterator[int]:
    """Run a link to `port` in a process of its own; gives the port to connect to instead."""
    command = [sys.executable, __file__, str(port), str(milliseconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 18):
            await asyncio.sleep(seconds)
            sink.write(data)
            await sink.drain()
    sink.close()


async def serve(port: int, seconds: float) -> None:
    async def connected(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(source, back, seconds), forward(there, sink, 0))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
