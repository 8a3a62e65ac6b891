"""Sources that cannot be read say which file, where in it, and what to do."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from jobs.config import PromptsConfig
from jobs.errors import SourceError
from jobs.sources import PromptSource


def read(path: Path | str, **settings: object) -> list[str]:
    config = PromptsConfig.model_validate({"source": str(path), **settings})
    return [str(record.row.get("text")) for record in PromptSource(config).records()]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("p.jsonl", b'{"text": "a"}\n{"text": \n', r"p\.jsonl, line 2: not readable as JSON"),
        ("p.jsonl", b'{"text": "a"}\n[1]\n', "line 2: expected an object, got list"),
        ("p.json", b'{"text": "a"}', "must be one array of objects"),
        ("p.json", b"[", "cannot read .*p.json as json"),
        ("p.parquet", b"not parquet", "cannot read .*p.parquet as parquet"),
        ("p.jsonl.gz", b"not gzip", "cannot read .*p.jsonl.gz as jsonl"),
        ("p.jsonl", b"\xff\xfe\n", "cannot read .*p.jsonl as jsonl"),
        ("p.csv", b'id,text\n1,"open', "cannot read .*p.csv as csv"),
        (
            "p.jsonl.gz",
            # Of no time: two processes that collect this must give it one name.
            gzip.compress(b'{"text": "a"}' * 999, mtime=0)[:-20],
            "cannot read .*p.jsonl.gz",
        ),
        ("p.jsonl.zst", b"not zstandard", "cannot read .*p.jsonl.zst"),
        ("p.xyz", b"a", "unknown kind of file"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, data: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=text):
        read(tmp_path / name)


def test_a_source_that_names_nothing_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere.jsonl", tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(SourceError, match="names no file"):
            read(place)
    with pytest.raises(SourceError, match="cannot open"):
        read("nosuchscheme://bucket/p.jsonl")


def test_a_stated_format_overrules_the_name(tmp_path: Path) -> None:
    (tmp_path / "p.data").write_text("one\ntwo\n")
    assert read(tmp_path / "p.data", format="text") == ["one", "two"]


def test_a_folder_is_read_in_the_order_of_names_and_other_files_are_left_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.txt").write_text("two\n")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "README").write_text("no prompt\n")
    assert read(tmp_path) == ["one", "two"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_bytes(b"\xef\xbb\xbftext,id\nhello,1\n")
    assert read(tmp_path / "p.csv") == ["hello"]


def test_a_csv_field_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("text\n" + "x" * 300_000 + "\n")
    assert len(read(tmp_path / "p.csv")[0]) == 300_000


@pytest.mark.parametrize("name", ["p.txt", "p.txt.gz"])
def test_a_carriage_return_alone_ends_no_prompt(tmp_path: Path, name: str) -> None:
    data = b"one\rtwo\r\nthree\n\rfour\r\r\nfive\r"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read(tmp_path / name) == ["one\rtwo", "three", "\rfour\r", "five"]


def test_a_carriage_return_within_a_record_is_white_space(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"text":\r"a"}\r\n{"text": "b"}\n')
    assert read(tmp_path / "p.jsonl") == ["a", "b"]
