"""A run is untrusted input: it cannot point outside itself, exhaust memory, or run anything."""

from __future__ import annotations

import base64
import json
import tracemalloc

import numpy as np
import pytest

from store import keys, open_run
from store.checksum import crc32c, hex_crc32c
from store.commit import committed_units, read_commit, read_commit_leniently
from store.commit_problems import commit_problems
from store.errors import DamagedObject, FormatError, RunError, StoreError, UnsafeName
from store.objects.local import LocalStore
from store.plan import read_segments
from store.run_format import Commit
from store.sealed_json import seal, unseal
from store.snapshot import find_committed
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, plan_file, write_run

LENGTHS = [[30, 0, 7]]
KEY = keys.commit_key(0)


@pytest.fixture
def run(tmp_path):
    objects = LocalStore(tmp_path / "run")
    write_run(objects, SampleShape(), LENGTHS)
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    return objects


def rewrite(objects: LocalStore, name: str, change) -> None:
    """Change a sealed document and seal it again, as an attacker can."""
    body = unseal(objects.get(name, max_bytes=1 << 20), name)
    change(body)
    objects.put(name, [seal(body)])


def read_something(url: str) -> None:
    opened = open_run(url)
    opened.read("z", prompt="p0", layer=0)
    opened.pattern(prompt="p0", layer=0, head=0)


NAMES = [
    "../../secret",
    "/etc/passwd",
    "a/../../b",
    "a//b",
    ".hidden",
    "a\x00b",
    "a\\..\\b",
    "",
    "x" * 600,
]


@pytest.mark.parametrize("name", NAMES)
def test_object_names_stay_inside_the_run(run, name):
    rewrite(run, KEY, lambda body: body["objects"][0].update(name=name))
    with pytest.raises((FormatError, UnsafeName)):
        read_commit(run, KEY)
    assert not verify_run(run, deep=True).ok


@pytest.mark.parametrize("attempt", ["..", "../../secret", "a/b", "", ".", "a" * 200])
def test_attempts_stay_inside_the_run(run, attempt):
    rewrite(run, KEY, lambda body: body.update(attempt=attempt))
    with pytest.raises(FormatError):
        read_commit(run, KEY)


@pytest.mark.parametrize("site", ["../z", "a/b", "", ".", "s" * 100])
def test_sites_stay_inside_the_attempt(run, site):
    rewrite(run, KEY, lambda body: body["arrays"][0].update(site=site))
    with pytest.raises(FormatError):
        read_commit(run, KEY)


@pytest.mark.parametrize("name", ["../../../secret", "..", "/etc/passwd"])
def test_plan_files_stay_inside_the_run(run, name):
    rewrite(run, "plan/0000/manifest.json", lambda body: body["prompts"][0].update(name=name))
    with pytest.raises(RunError):
        open_run(run.url).prompts  # noqa: B018


SIZES = {
    "num_tokens": 1 << 47,
    "head_size": 1 << 20,
    "shard_tokens": 1 << 30,
    "shard_heads": 1 << 20,
    "chunk_tokens": 1 << 20,
    "group_heads": 1 << 20,
    "layers": list(range(100_000)),
    "heads": list(range(100_000)),
}


@pytest.mark.parametrize("field", SIZES)
def test_sizes_are_checked_before_anything_is_allocated(run, field):
    rewrite(
        run, KEY, lambda body: [array.update({field: SIZES[field]}) for array in body["arrays"]]
    )
    tracemalloc.start()
    problems = []
    try:
        problems = commit_problems(read_commit_leniently(run, KEY))
    except RunError as error:
        problems = [str(error)]
    with pytest.raises(RunError):
        read_commit(run, KEY)
    report = verify_run(run, deep=True)
    with pytest.raises((RunError, StoreError, LookupError)):
        open_run(run.url).read("z", prompt="p0", layer=1, head=3, pos=29)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problems
    assert not report.ok
    assert peak < 200 << 20


def test_rows_beyond_the_array_are_refused(run):
    rewrite(run, KEY, lambda body: body["prompts"].update(num_rows=[1 << 40, 0, 7]))
    assert commit_problems(read_commit_leniently(run, KEY))
    with pytest.raises((RunError, StoreError, LookupError)):
        open_run(run.url).read("z", prompt="p0", layer=0)


def test_chunk_sizes_that_lie_are_refused(tmp_path):
    from store.codec import Codec

    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(codec=Codec.FAST), LENGTHS)

    def enlarge(body) -> None:
        for array in body["arrays"]:
            for name, text in array["chunk_sizes"].items():
                sizes = np.frombuffer(base64.b64decode(text), "<u4").copy()
                sizes[0] = 1 << 31
                array["chunk_sizes"][name] = base64.b64encode(sizes.tobytes()).decode()

    rewrite(objects, KEY, enlarge)
    assert commit_problems(read_commit_leniently(objects, KEY))
    with pytest.raises((RunError, StoreError)):
        open_run(str(tmp_path)).read("z", prompt="p0", layer=0)


def test_objects_larger_than_stated_are_not_read(run, tmp_path):
    path = tmp_path / "run" / plan_file(run, "prompts")
    assert path.exists()
    with path.open("ab") as file:
        file.truncate(1 << 34)
    tracemalloc.start()
    with pytest.raises((RunError, StoreError)):
        open_run(run.url).prompts  # noqa: B018
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'{"crc32c":"00000000"}', b'{"crc32c":1}', b"\xff\xfe",
        b'{"a":NaN,"crc32c":"00000000"}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000,
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_any_bytes_for_a_document_are_an_error_of_ours(run, data):
    for name in (KEY, keys.RUN, keys.MODEL, "plan/0000/manifest.json"):
        original = run.get(name, max_bytes=1 << 20)
        run.put(name, [data])
        assert not verify_run(run).ok
        with pytest.raises((RunError, StoreError)):
            read_something(run.url)
        run.put(name, [original])


def test_unknown_members_are_refused(run):
    rewrite(run, KEY, lambda body: body.update(__class__="os.system"))
    with pytest.raises(FormatError):
        read_commit(run, KEY)


def test_ids_are_data_and_never_names(tmp_path):
    from store.plan_writer import write_segment
    from tests.store.sample_run import capture, plan_tables, sample_units

    objects = LocalStore(tmp_path / "run")
    tables = plan_tables([[3, 4]])
    ids = ["../../../etc/passwd", "'; DROP TABLE prompts; --"]
    prompts = tables["prompts"].set_column(0, tables["prompts"].schema.field(0), [ids])
    write_segment(objects, run_id=RUN_ID, segment=0, prompts=prompts, units=tables["units"])
    capture(objects, SampleShape(), sample_units(SampleShape(), [[3, 4]])[0])
    assert all("passwd" not in info.name for info in objects.list(""))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_foreign_names_among_commits_are_ignored(run):
    for name in ("commits/000000/x.json", "commits/1/00000000.json", "commits/000005/00000001.json",
                 "commits/000000/00000000.r01.json", "commits/repaired/x"):  # fmt: skip
        run.put(name, [b"{}"])
    assert committed_units(run) == {0: KEY}
    assert find_committed(run, RUN_ID).units().tolist() == [0]


def test_a_commit_under_another_name_is_refused(run):
    run.put(keys.commit_key(1), [run.get(KEY, max_bytes=1 << 20)])
    with pytest.raises(DamagedObject, match="unit 0"):
        read_commit(run, keys.commit_key(1))


def test_documents_of_another_run_are_found(run):
    rewrite(run, KEY, lambda body: body.update(run_id="f" * 16))
    assert any("belongs to run" in problem.message for problem in verify_run(run).problems)


def test_seals_cover_every_member():
    body = {"b": [1, {"é": None}], "a": "x"}
    data = seal(body)
    assert unseal(data, "d") == body
    spaced = json.dumps(json.loads(data)).encode()
    with pytest.raises(DamagedObject):
        unseal(spaced, "d")
    assert hex_crc32c(crc32c(b'{"a":"x","b":[1,{"\xc3\xa9":null}]}')).encode() in data
    with pytest.raises(ValueError, match="unsealed"):
        seal({"crc32c": "x"})


def test_segments_that_do_not_continue_are_refused(run):
    rewrite(run, "plan/0000/manifest.json", lambda body: body.update(segment=3))
    with pytest.raises(DamagedObject, match="segment 3"):
        read_segments(run)


def test_a_commit_is_frozen(run):
    commit = read_commit(run, KEY)
    with pytest.raises(ValueError, match="frozen"):
        commit.unit = 5
    assert isinstance(commit, Commit)
