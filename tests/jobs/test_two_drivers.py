"""Two drivers of one run: whatever one did while the other waited or planned stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import jobs.driver
from jobs.config import RunConfig
from jobs.errors import ConfigError, ExitCode, RunOwnedElsewhere
from jobs.owner import RunOwner
from jobs.prepare import read_manifest
from jobs.status import read_status
from store import keys
from store.commit import committed_units, read_commit
from store.errors import DamagedObject, FormatError, FrozenFieldChanged
from store.objects.open import open_store
from store.plan import read_segments
from store.verify import verify_run
from tests.jobs.driven import TEXTS, Driven, break_unit, commit_of, names, statuses

MORE = [{"id": f"more-{i}", "text": "w7 w8"} for i in range(5)]
OTHERS = [{"id": f"other-{i}", "text": "w3 w4 w5"} for i in range(9)]


def while_waiting(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Let another driver do its work while the next one waits for its claim."""
    claim = RunOwner.claim
    waited: list[bool] = []

    def wait(*arguments: Any, **options: Any) -> RunOwner:
        if not waited:
            waited.append(True)
            work()
        return claim(*arguments, **options)

    monkeypatch.setattr(jobs.driver.RunOwner, "claim", wait)


def at(drive: Driven, event: str, work: Callable[[], Any]) -> None:
    """Let another driver take over and do its work when the first one logs this event."""
    done: list[bool] = []

    def look(logged: str, **_fields: object) -> None:
        if logged == event and not done:
            done.append(True)
            work()

    drive.also = look


def objects_of(config: RunConfig) -> dict[str, bytes]:
    objects = open_store(config.output)
    return {
        name: objects.get(name, max_bytes=1 << 30)
        for name in (info.name for info in objects.list(""))
        if not name.startswith(keys.OWNERS)
    }


def test_a_run_made_while_a_driver_waited_is_gone_on_from(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drive.config(TEXTS, workers={"drain_seconds": 6})
    while_waiting(monkeypatch, lambda: drive(drive.config(TEXTS)))
    assert drive(config).exit_code is ExitCode.DONE
    assert len(drive.events("planned")) == 1
    assert len(drive.events("committed")) == 6
    assert verify_run(open_store(config.output), deep=True).ok


def test_a_segment_added_while_a_driver_waited_is_followed_by_its_own(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(drive.config(TEXTS))
    more, others = drive.config(MORE, "more.jsonl"), drive.config(OTHERS, "others.jsonl")
    while_waiting(monkeypatch, lambda: drive(more, extend=True))
    assert drive(others, extend=True).exit_code is ExitCode.DONE
    objects = open_store(more.output)
    assert [one.num_prompts for one in read_segments(objects)] == [12, 5, 9]
    assert set(statuses(more).values()) == {("stored", None)}
    assert verify_run(objects, deep=True).ok
    stated = [read_commit(objects, key).plan_hash for key in committed_units(objects).values()]
    due = [[one.plan_hash] * one.num_units for one in read_segments(objects)]
    assert stated == [one for segment in due for one in segment]


def test_a_driver_that_is_taken_over_while_it_extends_leaves_the_others_segment(
    drive: Driven,
) -> None:
    drive(drive.config(TEXTS))
    more, others = drive.config(MORE, "more.jsonl"), drive.config(OTHERS, "others.jsonl")
    at(drive, "planned so far", lambda: drive(others, extend=True, take_over=True))
    with pytest.raises(FormatError, match="plan segment 1 holds another plan"):
        drive(more, extend=True)
    assert len(statuses(more)) == 21
    assert verify_run(open_store(more.output), deep=True).ok
    drive.also = lambda *_event, **_fields: None
    assert drive(more, extend=True).exit_code is ExitCode.DONE
    assert len(statuses(more)) == 26
    assert verify_run(open_store(more.output), deep=True).ok


@pytest.mark.parametrize("frozen", [False, True])
def test_a_driver_that_is_taken_over_while_it_plans_leaves_the_others_run(
    drive: Driven, frozen: bool
) -> None:
    capture = {"capture": {"unit_tokens": 12}} if frozen else {}
    mine, others = drive.config(MORE, "more.jsonl", **capture), drive.config(OTHERS, "others.jsonl")
    at(drive, "planned so far", lambda: drive(others, take_over=True))
    with pytest.raises(RunOwnedElsewhere, match="made the run at"):
        drive(mine)
    assert len(statuses(others)) == 9
    assert verify_run(open_store(others.output), deep=True).ok


@pytest.mark.parametrize("left", ["plan/0000/manifest.json", keys.RUN])
@pytest.mark.parametrize("source", [MORE, TEXTS])
def test_a_run_whose_plan_or_identity_is_lost_is_never_made_anew(
    drive: Driven, left: str, source: Any
) -> None:
    config = drive.config(TEXTS)
    drive(config)
    open_store(config.output).delete(left)
    before = objects_of(config)
    with pytest.raises(DamagedObject, match=f"{left} is missing at .*Restore {left}"):
        drive(drive.config(source, "other.jsonl"))
    assert objects_of(config) == before
    if left != keys.RUN:
        with pytest.raises(DamagedObject, match=f"Restore {left}"):
            drive(drive.config(source, "other.jsonl", capture={"unit_tokens": 12}))
        assert objects_of(config) == before


def test_a_segment_that_is_lost_is_not_planned_over(drive: Driven) -> None:
    drive(drive.config(TEXTS))
    more, others = drive.config(MORE, "more.jsonl"), drive.config(OTHERS, "others.jsonl")
    drive(more, extend=True)
    open_store(more.output).delete("plan/0001/manifest.json")
    before = objects_of(more)
    for config in (more, others):
        with pytest.raises(DamagedObject, match=r"plan/0001/manifest\.json is missing"):
            drive(config, extend=True)
    assert objects_of(more) == before


def test_a_start_that_left_only_run_json_is_gone_on_from_or_named(drive: Driven) -> None:
    config = drive.config(TEXTS)
    drive(config)
    run = open_store(config.output).get(keys.RUN, max_bytes=1 << 20)
    for name in names(config):
        open_store(config.output).delete(name.removeprefix(f"{config.output}/"))
    open_store(config.output).put(keys.RUN, [run])
    with pytest.raises(FrozenFieldChanged, match=r"unit_tokens.*delete run\.json"):
        drive(drive.config(TEXTS, capture={"unit_tokens": 12}))
    assert drive(drive.config(MORE, "more.jsonl")).exit_code is ExitCode.DONE
    assert open_store(config.output).get(keys.RUN, max_bytes=1 << 20) == run
    assert verify_run(open_store(config.output), deep=True).ok


def test_a_run_is_extended_and_repaired_at_once(drive: Driven) -> None:
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    broken = commit_of(objects, 2)
    break_unit(objects, 2)
    more = drive.config(MORE, "more.jsonl")
    assert drive(more, extend=True, repair=True).exit_code is ExitCode.DONE
    assert committed_units(objects)[2] == "commits/000000/00000002.r1.json"
    assert read_status(objects).prompts_stored == 17
    assert verify_run(objects, deep=True).ok
    assert read_manifest(objects).run_id == broken.run_id


def test_deep_without_repair_is_refused_by_name(drive: Driven) -> None:
    with pytest.raises(ConfigError, match="give --repair too"):
        drive(drive.config(TEXTS), deep=True)
