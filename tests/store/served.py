"""A test's web server in a thread of this process: started, given, and ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

END_SECONDS = 10.0


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serve and give the server's authority, `127.0.0.1:<port>`."""
    server.daemon_threads = True
    name = type(server).__name__
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(END_SECONDS)
