"""The benchmarks of the store run, and say what they promise to say."""

from __future__ import annotations

import json
import socket
import time

from benchmarks import open as opening
from benchmarks import reader, writer
from benchmarks.slow_link import slow_link
from store.codec import Codec


def test_the_writer_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 1024)
    places = {"tmpfs": tmp_path, "disk": tmp_path}
    figures = writer.measure(2, 1, places, s3=False)
    for codec in ("raw", "fast", "small"):
        assert figures[f"{codec}_encode_gb_s_one_thread"] > 0
        for other in ("zarr_python", "tensorstore", "zarrs"):
            assert figures[f"{codec}_ratio_over_{other}"] > 0
            assert figures[f"{codec}_ratio_over_{other}_disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_encoding_is_timed_with_every_part_of_every_shard(monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 1024)
    work, taken, encode = writer.make_work(2, Codec.RAW), [], writer.encode

    def counted(*of):
        encoded = encode(*of)
        taken.append(encoded)
        return encoded

    monkeypatch.setattr(writer, "encode", counted)
    assert writer.encode_rate(work, 3) > 0
    assert len(taken) == 6
    assert all(one.crc32c for one in taken), "a checksum is known once all parts were taken"


def test_the_opening_benchmark(tmp_path):
    figures = opening.measure(units=2000, newer=3, rounds=1, place=tmp_path)
    assert figures["open_seconds"] > 0
    assert 50 < figures["peak_mb"] < 500
    assert figures["newer_commit_bytes"] > 1000
    assert list(tmp_path.iterdir()) == []


def test_the_reader_benchmark(tmp_path, monkeypatch, capsys):
    options = "reader --json --tokens 1024 --repeats 2 --skip-s3 --prompts 2000"
    monkeypatch.setattr("sys.argv", options.split())
    reader.main()
    figures = json.loads(capsys.readouterr().out)
    small = figures["local"]["one_head_64_positions"]
    assert (small["requests"], small["requests_zarr"]) == (1, 2)
    assert small["bytes"] <= 750_000
    assert figures["local"]["one_head_64_positions_over_an_edge"]["requests"] == 1
    assert figures["local"]["one_layer_of_a_prompt"]["requests"] == 8
    assert figures["local"]["one_head_of_a_unit"]["requests"] == 1
    for name, entry in figures["local"].items():
        if name.startswith("one_"):
            assert entry["bytes"] <= entry["bytes_zarr"], name
            assert min(entry[f"p50_ms{s}"] for s in ("", "_zarr", "_xarray", "_tensorstore")) > 0
    assert figures["local"]["open"]["p95_ms"] > 0
    assert figures["local"]["stream"]["gigabytes_per_cpu_second"] > 0
    assert figures["open_many_prompts"]["prompts"] == 2000
    assert figures["open_many_prompts"]["prompts_table_mebibytes"] < 200


def test_a_slow_link_holds_every_request_back():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        slow_link(server.getsockname()[1], 50) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as client,
    ):
        there, _ = server.accept()
        there.settimeout(10)
        begun = time.monotonic()
        client.sendall(b"ask")
        assert there.recv(10) == b"ask"
        assert time.monotonic() - begun >= 0.045
        there.sendall(b"answer")
        assert client.recv(10) == b"answer"
        there.close()
