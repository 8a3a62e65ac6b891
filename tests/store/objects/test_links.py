"""Links and pipes inside of a run: nothing outside of the root is listed, read, made or deleted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from store import open_run
from store.errors import NotAFile, ObjectNotFound, RunError, StoreError
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.verify import verify_run
from tests.store.sample_run import (
    SampleShape,
    capture,
    sample_units,
    write_manifests,
    write_run,
)

LENGTHS = [[3, 5], [30]]
SHARD = "data/00000000/a0/z/c/0/0/0/0"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the run, with a file that no run may touch."""
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    for name in ("manifest.json", "sub/b.txt"):
        (folder / name).write_text("precious")
    os.utime(folder / "manifest.json", (1e9, 1e9))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    objects = LocalStore(tmp_path / "run")
    write_run(objects, SampleShape(), LENGTHS)
    return objects


def files_in(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


@pytest.mark.parametrize(
    "links", [["data/00000001/evil"], [f"snapshots/0000000{i}-aa" for i in range(3)]]
)
def test_gc_deletes_nothing_through_a_link(run, outside, links):
    for name in links:
        link = Path(run.url) / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(outside)
    collect_garbage(run, delete=True)
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


def test_gc_deletes_no_old_file_through_a_linked_temporary_folder(run, outside):
    (Path(run.url) / ".tmp").rmdir()
    (Path(run.url) / ".tmp").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        collect_garbage(run, delete=True)
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


@pytest.mark.parametrize("name", ["link/manifest.json", "link/sub/b.txt", "link/new"])
def test_no_object_is_reached_through_a_linked_folder(run, outside, name):
    (Path(run.url) / "link").symlink_to(outside)
    calls = [
        lambda: run.get(name, max_bytes=100),
        lambda: run.get_ranges(name, []),
        lambda: run.size(name),
        lambda: run.put(name, [b"x"]),
        lambda: run.put(f"link/made/{name}", [b"x"]),
        lambda: run.create(name, b"x"),
        lambda: run.delete(name),
        lambda: list(run.list("link/")),
        lambda: list(run.list("link/sub/")),
        lambda: run.sync("link/"),
    ]
    for call in calls:
        with pytest.raises(NotAFile, match="link: nothing of a run is read"):
            call()
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]
    assert not (outside / "made").exists()
    listed = [info.name for info in run.list("") if info.name.startswith("link")]
    assert listed == ["link"]
    run.delete("link")
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


def test_a_folder_exchanged_for_a_link_is_not_deleted_through(run, outside):
    run.put("data/00000009/b/manifest.json", [b"x"])
    run.delete("data/00000009/b/manifest.json")
    run.put("data/00000009/b/manifest.json", [b"x"])
    (Path(run.url) / "data/00000009/b/manifest.json").unlink()
    (Path(run.url) / "data/00000009/b").rmdir()
    (Path(run.url) / "data/00000009/b").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        run.delete("data/00000009/b/manifest.json")
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


def test_a_temporary_folder_that_is_a_link_is_not_written_to(tmp_path, outside):
    objects = LocalStore(tmp_path / "new")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".tmp").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        objects.put("x", [b"x"])
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


def test_the_root_itself_may_be_a_link(run, tmp_path):
    (tmp_path / "alias").symlink_to(run.url)
    objects = LocalStore(tmp_path / "alias")
    assert open_run(objects.url).read("z", prompt=0, layer=0).sizes["pos"] == 3
    objects.put("data/00000000/lost/zarr.json", [b"{}"])
    assert len(collect_garbage(objects, delete=True).garbage) == 1
    assert verify_run(objects, deep=True).problems == []


DOCUMENTS = ["run.json", "model.json", "commits/000000/00000000.json", "plan/0000/manifest.json"]


@pytest.mark.parametrize("name", [*DOCUMENTS, SHARD, "data/00000000/a0/zarr.json"])
@pytest.mark.parametrize("kind", ["pipe", "loop", "link"])
def test_what_is_no_file_is_told_at_once(run, outside, name, kind):
    path = Path(run.url) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else outside / "manifest.json")

    def look() -> None:
        problems.extend(verify_run(run, deep=True).problems)
        try:
            open_run(run.url).read("z", prompt="p0", layer=0, head=0)
            size = run.size(name)
        except RunError as error:
            problems.append(error)
        else:
            problems.append(ObjectNotFound(f"read as {size} bytes"))

    problems: list[object] = []
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive(), "opening a pipe waits for its other end"
    assert not any(isinstance(one, ObjectNotFound) for one in problems)
    assert len(problems) > 1


@pytest.mark.parametrize("part", ["data", "data/00000001", "data/00000001/a0"])
def test_a_folder_exchanged_for_a_link_after_it_was_used_is_gone_through_no_more(
    run, outside, part
):
    name = "data/00000001/a0/more"
    run.put(name, [b"ours"])
    assert run.get(name, max_bytes=9) == b"ours"
    folder, rest = Path(run.url) / part, name.removeprefix(f"{part}/")
    folder.rename(Path(run.url) / "was-there")
    (outside / rest).parent.mkdir(parents=True, exist_ok=True)
    (outside / rest).write_bytes(b"theirs")
    before = files_in(outside)
    folder.symlink_to(outside)
    for call in (
        lambda: run.put(name, [b"x"]),
        lambda: run.put(f"{name}-new", [b"x"]),
        lambda: run.create(f"{name}-new", b"x"),
        lambda: run.put("data/00000001/a0/site/c/new", [b"x"]),
        lambda: run.get(name, max_bytes=9),
        lambda: run.size(name),
        lambda: list(run.list("data/00000001/a0/")),
    ):
        with pytest.raises(NotAFile, match="symbolic link"):
            call()
    assert files_in(outside) == before
    assert (outside / rest).read_bytes() == b"theirs"


def test_a_unit_of_which_nothing_is_stored_needs_no_folder(tmp_path, outside):
    """So that a unit can be given up whose every object is in the way of something."""
    objects, shape = LocalStore(tmp_path / "run"), SampleShape()
    units = sample_units(shape, [[3], [0, 0], [2]])
    write_manifests(objects, shape, [[3], [0, 0], [2]])
    (tmp_path / "run/data").mkdir()
    (tmp_path / "run/data/00000001").symlink_to(outside)
    assert all(capture(objects, shape, unit).won for unit in units)
    problems = verify_run(objects, deep=True).problems
    assert [problem.name for problem in problems] == ["data/00000001"]
    opened = open_run(objects.url)
    assert opened.prompts["status"].to_pylist() == ["stored", "failed", "failed", "stored"]
    assert opened.moments("z").sizes["layer"] == 2
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]


TOP = ["checks", "commits", "data", "owners", "plan", "snapshots", "summaries", "weights", ".tmp"]


@pytest.mark.parametrize("name", [*TOP, "commits/000000", "plan/0000", "data/00000001"])
def test_a_verification_names_every_link(run, outside, name):
    folder = Path(run.url) / name
    if folder.exists():
        folder.rename(outside / "moved")
    folder.symlink_to(outside / "moved")
    problems = verify_run(LocalStore(run.url)).problems
    assert name in {problem.name for problem in problems}
    assert "link" in next(one.message for one in problems if one.name == name)


def test_a_pipe_and_a_link_can_be_deleted(run, outside):
    os.mkfifo(Path(run.url) / "data/pipe")
    (Path(run.url) / "data/link").symlink_to(outside)
    for name in ("data/pipe", "data/link"):
        with pytest.raises(StoreError):
            run.size(name)
        run.delete(name)
        assert name not in [info.name for info in run.list("data/")]
    assert files_in(outside) == ["manifest.json", "sub/b.txt"]
