"""How fast shards are encoded and written, next to zarr-python, tensorstore and zarrs.

The same values, the same shards and chunks, the same codecs: 64 MiB shards of bfloat16 heads. Ours
come chunk by chunk, as the capture's slabs hold them (and, for comparison, head by head); the
others get the plain array. Every library writes the same array and ours is read back by zarr-python
before anything is timed. Libraries take turns, round after round; a figure is the median of its
rounds. On disk every library's files are flushed, ours by its own put and the others' here.

    python -m benchmarks.writer --json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zarr

import store.zarr_bfloat16  # noqa: F401
from store.attempt import AttemptWriter
from store.codec import Codec
from store.geometry import ArrayGeometry
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.objects.protocol import ObjectStore
from store.run_format import ArrayRecord
from store.shard import EncodedShard, encode_chunks, encode_shard
from store.zarr_metadata import array_metadata

HEADS, HEAD_SIZE, SHARD_TOKENS = 8, 128, 32_768
SHARD_BYTES = HEADS * HEAD_SIZE * SHARD_TOKENS * 2


@dataclass(frozen=True)
class Work:
    """Some layers of one site, one shard a layer, in three layouts of the same values."""

    data_LTHD: np.ndarray
    heads_LHTD: np.ndarray
    chunks_LGCgtD: np.ndarray
    record: ArrayRecord

    @property
    def geometry(self) -> ArrayGeometry:
        return self.record.geometry()

    @property
    def nbytes(self) -> int:
        return self.data_LTHD.nbytes


def make_work(shards: int, codec: Codec) -> Work:
    """Return normally distributed heads whose channels differ in scale, as activations do."""
    rng = np.random.default_rng(0)
    scale_D = rng.lognormal(0, 1, HEAD_SIZE).astype(np.float32)
    one_HTD = (rng.standard_normal((HEADS, SHARD_TOKENS, HEAD_SIZE), np.float32) * scale_D).astype(
        ml_dtypes.bfloat16
    )
    heads_LHTD = np.stack([np.roll(one_HTD, layer, axis=1) for layer in range(shards)])
    cut = ArrayGeometry.plan(
        num_layers=shards, num_tokens=SHARD_TOKENS, num_heads=HEADS, shard_heads=HEADS,
        head_size=HEAD_SIZE, item_bytes=2,
    )  # fmt: skip
    record = ArrayRecord.of(
        cut, site="z", dtype="bfloat16", dims=["layer", "token", "head", "d_head"],
        layers=list(range(shards)), heads=list(range(HEADS)), codec=codec,
    )  # fmt: skip
    blocks = (shards, cut.groups_per_shard, cut.group_heads, -1, cut.chunk_tokens, HEAD_SIZE)
    chunks_LGCgtD = np.ascontiguousarray(heads_LHTD.reshape(blocks).swapaxes(2, 3))
    return Work(np.ascontiguousarray(heads_LHTD.swapaxes(1, 2)), heads_LHTD, chunks_LGCgtD, record)


def encode(work: Work, layer: int, *, by_chunks: bool = True) -> EncodedShard:
    """Return one layer's shard."""
    key = f"data/00000000/a0/z/c/{layer}/0/0/0"
    if by_chunks:
        return encode_chunks(work.geometry, 0, work.chunks_LGCgtD[layer], work.record.codec, key)
    return encode_shard(work.geometry, 0, work.heads_LHTD[layer], work.record.codec, key)


def encode_rate(work: Work, rounds: int) -> float:
    """Return GB/s of one thread that makes every byte of all shards, the median of its rounds.

    A shard's checksums are computed as its parts are taken, so all of them are: to be thrown away.
    """
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for layer in range(work.geometry.num_layers):
            encoded = encode(work, layer)
            made = sum(memoryview(part).nbytes for part in encoded)
            assert made == encoded.num_bytes
            assert encoded.crc32c
        seconds.append(time.perf_counter() - begun)
    return work.nbytes / statistics.median(seconds) / 1e9


def write_ours(objects: ObjectStore, work: Work, threads: int, *, by_chunks: bool = True) -> None:
    """Encode and put every shard from `threads` threads, as a rank's writer does."""
    writer = AttemptWriter(objects, 0, "a0")

    def one(layer: int) -> None:
        writer.put_shard(encode(work, layer, by_chunks=by_chunks))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(work.geometry.num_layers)))


def write_zarr(folder: Path, work: Work) -> None:
    """Write through zarr-python, all shards in one assignment."""
    write_metadata(folder, work)
    array = zarr.open_array(folder / "z", mode="r+")
    array[:] = work.data_LTHD


def write_zarrs(folder: Path, work: Work) -> None:
    """Write through zarr-python with the zarrs pipeline."""
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        write_zarr(folder, work)


def write_tensorstore(folder: Path, work: Work) -> None:
    """Write through tensorstore, all shards in one assignment."""
    import tensorstore as ts

    write_metadata(folder, work)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "z")}}
    array = ts.open(spec, open=True).result()
    array.write(work.data_LTHD).result()


def write_metadata(folder: Path, work: Work) -> None:
    (folder / "z").mkdir(parents=True)
    (folder / "z" / "zarr.json").write_bytes(array_metadata(work.record, run_id="0" * 16, unit=0))


def flush(folder: Path) -> None:
    """Flush every file below a folder, which our own puts have done by themselves."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def rates(place: Path, work: Work, rounds: int, threads: int) -> dict[str, float]:
    """Return GB/s by library, each the median of its rounds."""
    contenders: dict[str, Callable[[Path], None]] = {
        "attnstore": lambda folder: write_ours(LocalStore(folder), work, threads),
        "attnstore_by_heads": lambda folder: write_ours(
            LocalStore(folder), work, threads, by_chunks=False
        ),
        "attnstore_one_thread": lambda folder: write_ours(LocalStore(folder), work, 1),
        "zarr_python": lambda folder: write_zarr(folder, work),
        "tensorstore": lambda folder: write_tensorstore(folder, work),
        "zarrs": lambda folder: write_zarrs(folder, work),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, write in contenders.items():
            folder = Path(tempfile.mkdtemp(prefix="attnstore-bench-", dir=place))
            begun = time.perf_counter()
            write(folder)
            if not name.startswith("attnstore"):
                flush(folder)
            seconds[name].append(time.perf_counter() - begun)
            shutil.rmtree(folder)
    return {name: work.nbytes / statistics.median(s) / 1e9 for name, s in seconds.items()}


def check(place: Path, work: Work) -> None:
    """Read what we write back through zarr-python; raises if a bit differs."""
    folder = Path(tempfile.mkdtemp(prefix="attnstore-bench-", dir=place))
    objects = LocalStore(folder)
    write_ours(objects, work, 1)
    AttemptWriter(objects, 0, "a0").put_metadata([work.record])
    array = zarr.open_array(folder / "data/00000000/a0/z", mode="r")
    for layer in range(work.geometry.num_layers):
        same = array[layer].tobytes() == work.data_LTHD[layer].tobytes()
        assert same, f"layer {layer} differs"
    shutil.rmtree(folder)


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """Yield a list that holds this process's CPU seconds once the block is left."""
    spent: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield spent
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def s3_cpu(work: Work, rounds: int, threads: int) -> dict[str, float]:
    """Return client CPU seconds per GB against a seaweedfs server on loopback."""
    from tests.store.s3_servers import KEY, SECRET, seaweedfs

    spent: dict[str, list[float]] = {"attnstore": [], "zarr_python_fsspec": []}
    with seaweedfs() as server:
        import s3fs

        for number in range(rounds):
            objects = ObstoreStore(server.url(f"ours-{number}"), server.options)
            with cpu_seconds() as cpu:
                write_ours(objects, work, threads)
            spent["attnstore"].append(cpu[0])
            files = s3fs.S3FileSystem(
                key=KEY, secret=SECRET, endpoint_url=server.endpoint, asynchronous=True
            )
            target = zarr.storage.FsspecStore(files, path=f"{server.bucket}/theirs-{number}")
            metadata = array_metadata(work.record, run_id="0" * 16, unit=0)
            array = _open_array_on(target, metadata)
            with cpu_seconds() as cpu:
                array[:] = work.data_LTHD
            spent["zarr_python_fsspec"].append(cpu[0])
    return {name: statistics.median(s) / (work.nbytes / 1e9) for name, s in spent.items()}


def _open_array_on(target: Any, metadata: bytes) -> zarr.Array:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    value = default_buffer_prototype().buffer.from_bytes(metadata)
    sync(target.set("zarr.json", value))
    return zarr.open_array(target, mode="r+")


def measure(shards: int, rounds: int, places: dict[str, Path], *, s3: bool) -> dict[str, Any]:
    """Return all figures; ratios are of one run."""
    threads = min(2, os.cpu_count() or 1)
    figures: dict[str, Any] = {"shard_bytes": SHARD_BYTES, "shards": shards, "threads": threads}
    for codec in Codec:
        work = make_work(shards, codec)
        check(places["tmpfs"], work)
        figures[f"{codec}_encode_gb_s_one_thread"] = encode_rate(work, rounds)
        for name, place in places.items():
            found = rates(place, work, rounds, threads)
            figures[f"{codec}_{name}_gb_s"] = found
            for other in ("zarr_python", "tensorstore", "zarrs"):
                ratio = found["attnstore"] / found[other]
                figures[f"{codec}_ratio_over_{other}{'' if name == 'tmpfs' else '_' + name}"] = (
                    ratio
                )
    if s3:
        spent = s3_cpu(make_work(shards, Codec.RAW), rounds, threads)
        figures["s3_cpu_seconds_per_gb"] = spent
        figures["s3_cpu_ratio_to_zarr_python"] = spent["attnstore"] / spent["zarr_python_fsspec"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--no-s3", action="store_true", help="leave the S3 server out")
    arguments = parser.parse_args()
    places = {"tmpfs": arguments.tmpfs, "disk": arguments.disk}
    figures = measure(arguments.shards, arguments.rounds, places, s3=not arguments.no_s3)
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
