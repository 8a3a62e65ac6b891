"""A process that has imported vLLM and what captures need, and begins each capture as its copy.

Importing takes longer than a tiny model's whole capture, and every rank would do it again. A copy
(fork) shares nothing with the others: what one leaves behind is gone with it. The environment is
that of the first call. Ranks started afresh, as a run has them, are what the tests of `jobs` start.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.lots import ROOT, assert_may_start_engines

IMPORTED = (
    "nnsight.modeling.vllm",
    "capture.engine",
    "capture.adapters.vllm_worker",
    "tests.capture.live_capture",
)
TIMED_OUT = 124

_nursery: subprocess.Popen[str] | None = None


def run_copy(spec: Path, seconds: float) -> tuple[int, str]:
    """Run the captures that `spec` lists in a copy of the nursery; return exit code and output."""
    assert_may_start_engines()
    global _nursery  # noqa: PLW0603 - one a test process, from its first capture to its end
    if _nursery is None or _nursery.poll() is not None:
        _nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.capture.nursery"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_nursery.communicate)
    assert _nursery.stdin is not None
    assert _nursery.stdout is not None
    log = spec.with_suffix(".log")
    _nursery.stdin.write(json.dumps([str(spec), str(log), seconds]) + "\n")
    _nursery.stdin.flush()
    answer = _nursery.stdout.readline()
    if not answer:
        raise AssertionError(f"the nursery ended with {_nursery.wait()} while it ran {spec}")
    return json.loads(answer), log.read_text(errors="replace")


def serve() -> None:
    """Begin a copy for every line of standard input; answer with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    for line in sys.stdin:
        spec, log, seconds = json.loads(line)
        copy = os.fork()
        if copy == 0:
            _run(Path(spec), log)
        print(_exit_code(copy, time.monotonic() + seconds), file=answers, flush=True)


def _import_all() -> None:
    gc.disable()
    from capture.adapters.vllm_engine import set_environment
    from capture.settings import EngineSettings

    set_environment(EngineSettings(model="none yet"))
    for module in IMPORTED:
        import_module(module)
    import vllm.v1.executor.multiproc_executor as executor

    executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    gc.freeze()
    gc.enable()


def _run(spec: Path, log: str) -> None:
    """Run captures and end this process, whatever comes."""
    from tests.capture.live_capture import capture_all

    code = 1
    try:
        os.setsid()
        for number, target in ((0, os.devnull), (1, log), (2, log)):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(target, flags, 0o600), number)
        capture_all(spec)
        code = 0
    except BaseException:  # noqa: BLE001 - told in the log, and by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(copy: int, deadline: float) -> int:
    """Wait for a copy, which leads a process group; kill the group where it takes too long."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    return TIMED_OUT


if __name__ == "__main__":
    serve()
