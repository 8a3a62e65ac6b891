"""What a run's verbs say of a commit that cannot be read and of a plan segment that is lost."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.config import RunConfig
from jobs.errors import ExitCode
from store import keys, open_run
from store.errors import DamagedObject
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.verify import verify_run
from tests.jobs.driven import TEXTS, Driven, names, statuses

COMMIT = keys.commit_key(2)
SEGMENT = "plan/0001/manifest.json"


@pytest.fixture
def made(drive: Driven) -> tuple[RunConfig, ObjectStore]:
    config = drive.config(TEXTS)
    drive(config)
    return config, open_store(config.output)


def data_of(config: RunConfig) -> list[str]:
    return [name for name in names(config) if "owners/" not in name]


def cut_short(objects: ObjectStore) -> None:
    objects.put(COMMIT, [objects.get(COMMIT, max_bytes=1 << 20)[:100]])


def attnstore(*arguments: str, code: int) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_a_damaged_commit_is_counted_apart_and_the_others_are_told(
    made: tuple[RunConfig, ObjectStore],
) -> None:
    config, objects = made
    cut_short(objects)
    found = json.loads(attnstore("status", config.output, "--json", code=2))
    assert found["units"] == {"planned": 6, "committed": 5, "quarantined": 0, "damaged": 1}
    assert found["prompts"]["stored"] == 10
    printed = attnstore("status", config.output, code=2)
    assert "5 of 6, 1 damaged" in printed
    assert f"1 of 6 units have commits that cannot be read; unit 2: {COMMIT}" in printed
    listed = [
        json.loads(one)
        for one in attnstore("ls", config.output, "--json", code=0).split("\n")
        if one
    ]
    assert [one["status"] for one in listed] == ["stored"] * 4 + ["damaged"] * 2 + ["stored"] * 6
    assert all(COMMIT in one["reason"] for one in listed[4:6])
    failed = attnstore("ls", config.output, "--failed", code=0)
    assert len(failed.splitlines()) == 2


def test_a_commit_of_other_prompts_tells_of_none(made: tuple[RunConfig, ObjectStore]) -> None:
    config, objects = made
    objects.put(COMMIT, [objects.get(keys.commit_key(1), max_bytes=1 << 20)])
    assert [s for s, _ in statuses(config).values()].count("damaged") == 2


@pytest.mark.parametrize("limits", [{}, {"max_bytes": 10**9}])
def test_a_run_with_a_damaged_commit_is_never_called_done_and_is_repaired(
    drive: Driven, made: tuple[RunConfig, ObjectStore], limits: dict[str, int]
) -> None:
    config, objects = made
    config = config.model_copy(update=limits)
    cut_short(objects)
    with pytest.raises(DamagedObject, match=r"unit 2: commits.*--repair"):
        drive(config)
    assert drive(config, repair=True).exit_code is ExitCode.DONE
    assert verify_run(objects, deep=True).problems == []
    assert set(statuses(config).values()) == {("stored", None)}


def test_a_lost_last_segment_is_named_and_nothing_is_captured(
    drive: Driven, made: tuple[RunConfig, ObjectStore]
) -> None:
    first, objects = made
    more = drive.config([{"id": f"more-{i}", "text": "w7 w8"} for i in range(5)], "more.jsonl")
    drive(more, extend=True)
    objects.delete(SEGMENT)
    before = data_of(first)
    sign = r"(unit 7 is committed|\S+ is there), beyond the 6 units"
    message = rf"{SEGMENT} (cannot .*: )?is missing, though {sign}"
    for run in (
        lambda: drive(first),
        lambda: drive(first, repair=True),
        lambda: drive(more, extend=True),
        lambda: open_run(first.output).prompts,
    ):
        with pytest.raises(DamagedObject, match=message):
            run()
    assert SEGMENT in attnstore("status", first.output, code=2)
    assert data_of(first) == before
    named = [(one.name, one.unit) for one in verify_run(objects).problems]
    assert named == [(SEGMENT, None)]
    assert open_run(first.output).read("z", prompt=0).sizes["pos"] == 4
