"""The benchmarks of the store run, and say what they promise to say."""

from __future__ import annotations

from benchmarks import open as opening
from benchmarks import writer


def test_the_writer_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 1024)
    places = {"tmpfs": tmp_path, "disk": tmp_path}
    figures = writer.measure(2, 1, places, s3=False)
    for codec in ("raw", "fast", "small"):
        for other in ("zarr_python", "tensorstore", "zarrs"):
            assert figures[f"{codec}_ratio_over_{other}"] > 0
            assert figures[f"{codec}_ratio_over_{other}_disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_opening_benchmark(tmp_path):
    figures = opening.measure(units=2000, newer=3, rounds=1, place=tmp_path)
    assert figures["open_seconds"] > 0
    assert 50 < figures["peak_mb"] < 500
    assert figures["newer_commit_bytes"] > 1000
    assert list(tmp_path.iterdir()) == []
