"""The reader beside zarr-python, xarray and tensorstore, on the same unit, from disk and from S3.

    python benchmarks/reader.py [--json] [--tokens 8192] [--repeats 40] [--skip-s3] [--prompts N]

Writes one unit of random bfloat16 (a model of 32 heads over 8 kv heads of size 128) to a temporary
folder and to a real S3 server on loopback, and reads the same parts of it with each library, opened
beforehand and with no cache. A request is one GET or one file read; `bytes` is what came back.
`open_over_a_slow_link` reaches the server 20 ms later with every request. `stream` is
`run.batches` over everything; `open_many_prompts` a run of 10^5 prompts in a process of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.slow_link import slow_link  # noqa: E402
from store import keys  # noqa: E402
from store.array_reader import ReadOptions  # noqa: E402
from store.codec import Codec  # noqa: E402
from store.objects.open import open_store  # noqa: E402
from store.prompt_blocks import BlockReader, choose  # noqa: E402
from store.run import Run, open_run  # noqa: E402
from store.run_format import Commit, Outcome, PromptOutcomes  # noqa: E402
from tests.store.s3_servers import S3Server, seaweedfs  # noqa: E402
from tests.store.sample_run import RUN_ID, SampleShape, write_run  # noqa: E402

SITE, LAYER, HEAD = "z", 1, 13
PROMPT_TOKENS = 512
LINK_MILLISECONDS = 20.0


def shape(codec: Codec) -> SampleShape:
    return SampleShape(
        num_layers=2, num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", codec=codec,
        max_shard_bytes=64 << 20, sites=("rot_k", "z"),
    )  # fmt: skip


class Counted:
    """An `ObjectStore` that counts what is read of arrays."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_ranges(self, name: str, ranges: Any) -> list[bytes]:
        self.requests += len(ranges)
        self.bytes += sum(wanted.length for wanted in ranges)
        return self._inner.get_ranges(name, ranges)


def ours(url: str, options: dict[str, Any]) -> tuple[dict[str, Callable[[int], Any]], Counted]:
    counted = Counted(open_store(url, options))
    run = Run(counted, ReadOptions(cache_bytes=0))  # type: ignore[arg-type]
    everything = list(range(run.prompts.num_rows))
    one_head = BlockReader(run._index, run._arrays, SITE, [LAYER], [HEAD])
    (unit,) = choose(run._index, everything, block_rows=1 << 40).blocks

    def prompt(i: int) -> int:
        return i % len(everything)

    return {
        "one_head_64_positions": lambda i: run.read(
            SITE, prompt=prompt(i), layer=LAYER, head=HEAD, pos=slice(100, 164)
        ),
        "one_head_64_positions_over_an_edge": lambda i: run.read(
            SITE, prompt=prompt(i), layer=LAYER, head=HEAD, pos=slice(224, 288)
        ),
        "one_layer_of_a_prompt": lambda i: run.read(SITE, prompt=prompt(i), layer=LAYER),
        "one_head_of_a_unit": lambda _: one_head.read(unit),
    }, counted


def array_parts(num_prompts: int) -> dict[str, Callable[[int], tuple[Any, ...]]]:
    """The same parts as indices into the unit's array [layer, token, head, d_head]."""

    def rows(i: int, start: int, stop: int) -> slice:
        first = i % num_prompts * PROMPT_TOKENS
        return slice(first + start, first + stop)

    return {
        "one_head_64_positions": lambda i: (LAYER, rows(i, 100, 164), HEAD),
        "one_head_64_positions_over_an_edge": lambda i: (LAYER, rows(i, 224, 288), HEAD),
        "one_layer_of_a_prompt": lambda i: (LAYER, rows(i, 0, PROMPT_TOKENS)),
        "one_head_of_a_unit": lambda _: (LAYER, slice(None), HEAD),
    }


def zarr_store(url: str, server: S3Server | None, prefix: str) -> Any:
    """A zarr store that counts: files on disk, obstore on S3, which zarr-python offers itself."""
    from zarr.storage import LocalStore, ObjectStore, WrapperStore

    class CountedStore(WrapperStore):  # type: ignore[type-arg]
        requests = 0
        bytes = 0

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            answer = await self._store.get(key, prototype, byte_range)
            CountedStore.requests += 1
            CountedStore.bytes += 0 if answer is None else len(answer)
            return answer

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
            wanted = list(key_ranges)
            answers = await self._store.get_partial_values(prototype, wanted)
            CountedStore.requests += len(wanted)
            CountedStore.bytes += sum(0 if a is None else len(a) for a in answers)
            return answers

    if server is None:
        return CountedStore(LocalStore(Path(url) / prefix, read_only=True))
    from obstore.store import S3Store

    options = server.options
    inner = S3Store(
        server.bucket,
        prefix=f"{url.split('/', 3)[3]}/{prefix}",
        endpoint=server.endpoint,
        access_key_id=options.get("access_key_id", "testkey"),
        secret_access_key=options.get("secret_access_key", "testsecret"),
        region="us-east-1",
        client_options={"allow_http": True},
    )
    return CountedStore(ObjectStore(inner, read_only=True))


def open_zarr(url: str, server: S3Server | None, prefix: str) -> Any:
    import zarr

    import store.zarr_bfloat16  # noqa: F401

    return zarr.open_group(zarr_store(url, server, prefix), mode="r")[SITE]


def open_xarray(url: str, server: S3Server | None, prefix: str) -> Any:
    import xarray as xr

    found = zarr_store(url, server, prefix)
    return xr.open_zarr(found, consolidated=False, chunks=None)[SITE]


def tensorstore_array(url: str, server: S3Server | None, prefix: str) -> Any:
    import tensorstore

    where: dict[str, Any] = {"driver": "file", "path": f"{url}/{prefix}{SITE}/"}
    if server is not None:
        os.environ.setdefault("AWS_ACCESS_KEY_ID", "testkey")
        os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testsecret")
        where = {
            "driver": "s3", "bucket": server.bucket, "endpoint": server.endpoint,
            "aws_region": "us-east-1", "path": f"{url.split('/', 3)[3]}/{prefix}{SITE}/",
        }  # fmt: skip
    return tensorstore.open({"driver": "zarr3", "kvstore": where}, read=True).result()


def timed(reads: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, float]:
    """Return p50 and p95 in ms by suffix; the libraries take turns, so that a busy moment of the
    machine meets all of them."""
    taken: dict[str, list[float]] = {suffix: [] for suffix in reads}
    for i in range(-1, repeats):
        for suffix, read in reads.items():
            start = time.perf_counter()
            read(max(i, 0))
            if i >= 0:
                taken[suffix].append(1e3 * (time.perf_counter() - start))
    found: dict[str, float] = {}
    for suffix, times in taken.items():
        found[f"p50_ms{suffix}"] = round(statistics.median(times), 3)
        found[f"p95_ms{suffix}"] = round(statistics.quantiles(times, n=20)[-1], 3)
    return found


def measure(url: str, server: S3Server | None, repeats: int) -> dict[str, Any]:
    options = {} if server is None else server.options
    reads, counted = ours(url, options)
    run = open_run(url, options)
    commit = run._index.commit(0)
    assert commit is not None
    prefix = keys.attempt_prefix(0, commit.attempt)
    parts = array_parts(run.prompts.num_rows)
    array = open_zarr(url, server, prefix)
    data = open_xarray(url, server, prefix)
    of_tensorstore = tensorstore_array(url, server, prefix)
    asyncio.set_event_loop(None)
    results: dict[str, Any] = {}
    for name, read in reads.items():
        part = parts[name]
        # On local disk the first read of a shard also proves it: 4 bytes of each other chunk.
        read(3)
        counted.requests = counted.bytes = 0
        mine = np.asarray(read(3)).astype(np.float32).squeeze()
        entry: dict[str, Any] = {"requests": counted.requests, "bytes": counted.bytes}
        kind = type(array.store)
        kind.requests = kind.bytes = 0
        theirs = np.asarray(array[part(3)]).astype(np.float32)
        entry |= {"requests_zarr": kind.requests, "bytes_zarr": kind.bytes}
        if theirs.ndim == 3:
            theirs = theirs.swapaxes(0, 1)
        assert np.array_equal(mine, theirs), name
        readers: dict[str, Callable[[int], Any]] = {
            "": read,
            "_zarr": lambda i, part=part: array[part(i)],
            "_xarray": lambda i, part=part: data[part(i)].values,
            "_tensorstore": lambda i, part=part: of_tensorstore[part(i)].read().result(),
        }
        entry |= timed(readers, repeats)
        results[name] = entry
    results["open"] = opening(url, server, prefix, repeats)
    if server is not None:
        host, port = server.endpoint.rsplit(":", 1)
        with slow_link(int(port), LINK_MILLISECONDS) as slow:
            endpoint = f"{host}:{slow}"
            far = replace(server, endpoint=endpoint, options={**options, "endpoint": endpoint})
            results["open_over_a_slow_link"] = opening(url, far, prefix, repeats // 2)
    results["stream"] = stream(url, options)
    return results


def opening(url: str, server: S3Server | None, prefix: str, repeats: int) -> dict[str, float]:
    """Open and read one row, each library with a new client."""
    options = {} if server is None else server.options
    return timed(
        {
            "": lambda _: open_run(url, options).read(SITE, prompt=0, layer=0, head=0, pos=0),
            "_zarr": lambda _: open_zarr(url, server, prefix)[0, 0, 0],
            "_xarray": lambda _: open_xarray(url, server, prefix)[0, 0, 0].values,
        },
        max(4, repeats),
    )


def stream(url: str, options: dict[str, Any]) -> dict[str, float]:
    """Stream everything three times; the median, for the first meets memory never used before."""
    rounds = [stream_once(url, options) for _ in range(3)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def stream_once(url: str, options: dict[str, Any]) -> dict[str, float]:
    run = open_run(url, options)
    start, cpu = time.perf_counter(), time.process_time()
    count = sum(
        values.nbytes
        for batch in run.batches([SITE], size=4096, shuffle=0, buffer_bytes=64 << 20)
        for values in batch.arrays.values()
    )
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    return {
        "gigabytes_per_second": round(count / wall / 1e9, 3),
        "gigabytes_per_cpu_second": round(count / used / 1e9, 3),
    }


MEMORY_PROBE = """
import resource, sys, time
import psutil
from store import open_run
me = psutil.Process()
before = me.memory_info().rss
start = time.perf_counter()
run = open_run(sys.argv[1])
opened = time.perf_counter() - start
after = me.memory_info().rss
rows = run.prompts.num_rows
table = me.memory_info().rss
print(rows, opened, (after - before) / 2**20, (table - before) / 2**20)
"""


def open_many(folder: Path, count: int) -> dict[str, float]:
    """A run of `count` prompts of 20 tokens each, opened in a process of its own."""
    from tests.store.sample_run import write_manifests

    objects = open_store(str(folder))
    lengths = [[20] * 1000] * (count // 1000)
    write_manifests(objects, SampleShape(), lengths)
    for unit in range(len(lengths)):
        commit = Commit(
            run_id=RUN_ID, unit=unit, attempt="a0", first_prompt=unit * 1000, arrays=[],
            objects=[], ranks=[],
            prompts=PromptOutcomes(
                outcome=[Outcome.STORED] * 1000, first_row=list(range(0, 20_000, 20)),
                num_rows=[20] * 1000, first_position=[0] * 1000,
            ),
        )  # fmt: skip
        objects.create(keys.commit_key(unit), commit.to_bytes())
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(folder)], cwd=ROOT, check=True, text=True,
        capture_output=True,
    )  # fmt: skip
    rows, seconds, opened, table = (float(value) for value in done.stdout.split())
    return {
        "prompts": rows,
        "open_seconds": round(seconds, 3),
        "open_mebibytes": round(opened, 1),
        "prompts_table_mebibytes": round(table, 1),
    }


@contextmanager
def s3(wanted: bool) -> Iterator[S3Server | None]:
    if not wanted:
        yield None
        return
    with seaweedfs() as server:
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--skip-s3", action="store_true")
    parser.add_argument("--prompts", type=int, default=100_000, help="of the run that is opened")
    options = parser.parse_args()
    lengths = [[PROMPT_TOKENS] * (options.tokens // PROMPT_TOKENS)]
    results: dict[str, Any] = {"tokens": options.tokens, "repeats": options.repeats}
    with (
        tempfile.TemporaryDirectory(prefix="attnstore-reader-") as name,
        s3(not options.skip_s3) as server,
    ):
        folder = Path(name)
        local = str(folder / "raw")
        write_run(open_store(local), shape(Codec.RAW), lengths)
        results["local"] = measure(local, None, options.repeats)
        fast = str(folder / "fast")
        write_run(open_store(fast), shape(Codec.FAST), lengths)
        results["local"]["stream_fast_codec"] = stream(fast, {})
        if server is not None:
            url = server.url("reader")
            write_run(open_store(url, server.options), shape(Codec.RAW), lengths)
            results["s3"] = measure(url, server, options.repeats)
        results["open_many_prompts"] = open_many(folder / "many", options.prompts)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for place in ("local", "s3"):
        for what, entry in results.get(place, {}).items():
            print(f"{place:6} {what:36} " + "  ".join(f"{k}={v}" for k, v in entry.items()))
    print(results["open_many_prompts"])


if __name__ == "__main__":
    main()
