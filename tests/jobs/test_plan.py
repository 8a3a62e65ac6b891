"""Planning: the same prompts give the same plan, every prompt keeps its place, ids are unique."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.config import RunConfig
from jobs.errors import InputsChanged, SourceError
from jobs.packing import MAX_UNIT_PROMPTS, UnitPacker
from jobs.plan import RESERVED_COLUMNS, check_inputs, read_unit_table, stored_name, write_plan
from jobs.prompt_ids import PromptIds
from store.objects.open import open_store
from store.plan import read_prompts, read_segments
from store.plan_tables import PlanTables

RUN_ID = "0123456789abcdef"
Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]


def planned(config: RunConfig, where: Path, **options: Any) -> pa.Table:
    objects = open_store(str(where))
    manifest = write_plan(objects, config, run_id=RUN_ID, **options)
    return read_prompts(objects, manifest)


def test_a_plan_is_the_same_every_time(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    config = make_config(write_prompts([f"w{i} w{i + 1}" for i in range(50)]))
    first = write_plan(open_store(str(tmp_path / "a")), config, run_id=RUN_ID)
    second = write_plan(open_store(str(tmp_path / "b")), config, run_id=RUN_ID)
    assert first == second
    other = make_config(write_prompts(["w1 w2"] * 50, "other.jsonl"))
    third = write_plan(open_store(str(tmp_path / "c")), other, run_id=RUN_ID)
    assert third.plan_hash != first.plan_hash


def test_prompts_that_cannot_run_keep_their_place_and_say_why(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    records = [
        {"id": "good", "text": "w1 w2 w3", "kind": "a", "deep": {"x": 1}},
        {"id": "empty", "text": ""},
        {"id": "long", "text": " ".join(["w5"] * 64), "kind": "b"},
        {"id": "fits", "text": " ".join(["w5"] * 63)},
        {"id": "number", "text": 7},
        {"id": "none", "kind": "c"},
        {"id": "left-out", "text": "w1"},
    ]
    config = make_config(write_prompts(records), prompts={"skip": ["left-out"]})
    table = planned(config, tmp_path / "run")
    reasons = dict(
        zip(table["prompt_id"].to_pylist(), table["plan_reason"].to_pylist(), strict=True)
    )
    assert reasons.pop("good") is None
    assert reasons.pop("fits") is None
    assert reasons == {
        "empty": "it is empty: no tokens to capture",
        "long": "too long: 64 tokens, the engine takes 63 (max_model_len 64 less one for the "
        "token it generates)",
        "number": "its text is of type int, not a string",
        "none": "its text is missing",
        "left-out": "skipped: listed in prompts.skip",
    }
    assert table["token_ids"][0].as_py() == [1, 2, 3]
    assert table["token_strings"][0].as_py() == ["w1", "w2", "w3"]
    assert table["kind"].to_pylist()[:3] == ["a", None, "b"]
    assert table["deep"][0].as_py() == '{"x": 1}'


def test_long_prompts_are_truncated_where_the_config_says_so(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    config = make_config(write_prompts([" ".join(["w5"] * 100)]), prompts={"too_long": "truncate"})
    table = planned(config, tmp_path / "run")
    assert table["num_tokens"].to_pylist() == [63]
    assert table["tokens_before_truncation"].to_pylist() == [100]
    assert table["plan_reason"].to_pylist() == [None]


def test_repeated_ids_are_named(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    records = [{"id": name, "text": "w1"} for name in ("a", "b", "a", "c", "b")]
    with pytest.raises(SourceError, match=r"'a' \(prompts 0 and 2\), 'b' \(prompts 1 and 4\)"):
        planned(make_config(write_prompts(records)), tmp_path / "run")


def test_ids_are_derived_where_there_are_none(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    config = make_config(write_prompts([{"text": "w1"}, {"text": "w2"}]))
    assert planned(config, tmp_path / "run")["prompt_id"].to_pylist() == ["p0", "p1"]


def test_a_wrong_column_is_answered_with_the_nearest(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    config = make_config(write_prompts([{"id": "a", "txt": "w1"}]))
    with pytest.raises(SourceError, match="did you mean 'txt'"):
        planned(config, tmp_path / "run")


ROWS = [{"id": "a", "text": "w1 w2", "kind": "x"}, {"id": "b", "text": "w3", "kind": "y"}]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wt") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in ROWS))


def write_zstd(path: Path) -> None:
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data)


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "text", "kind"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_hf_dataset(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("p.jsonl", write_jsonl),
        ("p.jsonl.gz", write_gzip),
        ("p.jsonl.zst", write_zstd),
        ("p.json", write_json),
        ("p.csv", write_csv),
        ("p.parquet", write_parquet),
        ("dataset", write_hf_dataset),
    ],
)
def test_every_format_gives_the_same_prompts(
    make_config: Configs, tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    source = tmp_path / name
    write(source)
    table = planned(make_config(source), tmp_path / "run")
    assert table["prompt_id"].to_pylist() == ["a", "b"]
    assert [ids.as_py() for ids in table["token_ids"]] == [[1, 2], [3]]
    assert table["kind"].to_pylist() == ["x", "y"]


def test_a_text_file_is_a_prompt_a_line(make_config: Configs, tmp_path: Path) -> None:
    source = tmp_path / "p.txt"
    source.write_text("w1 w2\n\nw3\n")
    table = planned(make_config(source), tmp_path / "run")
    assert table["prompt_id"].to_pylist() == ["p0", "p1", "p2"]
    assert table["num_tokens"].to_pylist() == [2, 0, 1]


def test_files_of_a_glob_come_in_the_order_of_their_names(
    make_config: Configs, tmp_path: Path
) -> None:
    for number in (2, 0, 1):
        (tmp_path / f"part-{number}.txt").write_text(f"w{number}\n")
    table = planned(make_config(tmp_path / "part-*.txt"), tmp_path / "run")
    assert table["token_ids"].to_pylist() == [[0], [1], [2]]


def test_other_places_than_this_disk_work_through_fsspec(
    make_config: Configs, tmp_path: Path
) -> None:
    import fsspec

    with fsspec.open("memory://corpus/p.txt", "w") as stream:
        stream.write("w7\n")
    config = make_config(Path("x"), prompts={"source": "memory://corpus/p.txt"})
    assert planned(config, tmp_path / "run")["token_ids"].to_pylist() == [[7]]


def test_token_ids_are_taken_as_they_are(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    records = [{"id": "a", "ids": [5, 6]}, {"id": "b", "ids": [5, 999]}, {"id": "c", "ids": "no"}]
    config = make_config(write_prompts(records), prompts={"token_ids_column": "ids"})
    table = planned(config, tmp_path / "run")
    assert table["token_ids"].to_pylist() == [[5, 6], [], []]
    assert table["plan_reason"].to_pylist() == [
        None,
        "token id 999 lies outside the model's vocabulary of 201",
        "its token ids are of type str, not a list",
    ]


def test_chats_go_through_the_model_s_template(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path, word_model: Path
) -> None:
    model = tmp_path / "chat-model"
    shutil.copytree(word_model, model)
    template = (
        "{% for m in messages %}{{ raise_exception('no') if m['role'] == 'bad' }}w1 "
        "{{ m['content'] }} {% endfor %}{{ 'w9' if add_generation_prompt }}"
    )
    (model / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    records = [
        {"id": "a", "chat": chat},
        {"id": "b", "chat": [{"role": "bad", "content": "w5"}]},
        {"id": "c", "chat": "hello"},
    ]
    config = make_config(
        write_prompts(records),
        model={"path": str(model)},
        prompts={"messages_column": "chat", "add_generation_prompt": True},
    )
    table = planned(config, tmp_path / "run")
    assert table["token_ids"].to_pylist() == [[1, 5, 1, 6, 9], [], []]
    reasons = table["plan_reason"].to_pylist()
    assert reasons[0] is None
    assert "the chat template refused it" in reasons[1]
    assert reasons[2] == "its chat messages are not a list of messages"


def test_special_tokens_are_added_or_not_as_the_config_says(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path, tiny_qwen3_dir: Path
) -> None:
    from tokenizers import Tokenizer, processors

    model = tmp_path / "bos-model"
    shutil.copytree(tiny_qwen3_dir, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    for policy, first in (("model", 0), ("none", None)):
        config = make_config(
            write_prompts(["The heads"]),
            model={"path": str(model)},
            prompts={"special_tokens": policy},
        )
        ids = planned(config, tmp_path / policy)["token_ids"][0].as_py()
        assert (ids[0] == 0) is (first == 0)
        assert 0 not in ids[1:]


def test_changed_inputs_are_refused_and_named(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    source = write_prompts(["w1", "w2"])
    config = make_config(source)
    objects = open_store(str(tmp_path / "run"))
    write_plan(objects, config, run_id=RUN_ID)
    segments = read_segments(objects)
    assert check_inputs(config, segments) is None
    text = source.read_text()
    source.write_text(text)
    assert check_inputs(config, segments) is None
    source.write_text(text.replace("w2", "w3"))
    with pytest.raises(InputsChanged, match=r"prompts\.jsonl has sha256"):
        check_inputs(config, segments)
    source.unlink()
    assert "going on from the stored plan" in str(check_inputs(config, segments))


def test_a_segment_more_continues_the_numbers(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    objects = open_store(str(tmp_path / "run"))
    texts = [f"w{i} w1 w2" for i in range(9)]
    first = write_plan(objects, make_config(write_prompts(texts)), run_id=RUN_ID)
    more = write_prompts([{"id": f"q{i}", "text": "w3"} for i in range(3)], "more.jsonl")
    second = write_plan(objects, make_config(more), run_id=RUN_ID, before=[first])
    assert (second.first_prompt, second.first_unit) == (9, first.num_units)
    table = read_unit_table(objects, read_segments(objects))
    assert table.num_tokens.sum() == 30
    assert table.segment.tolist() == [0] * first.num_units + [1] * second.num_units
    wrong = write_prompts([{"id": "r", "txt": "w3"}], "wrong.jsonl")
    with pytest.raises(SourceError, match="did you mean 'txt'"):
        write_plan(objects, make_config(wrong), run_id=RUN_ID, before=[first, second])
    again = write_prompts([{"id": "p3", "text": "w3"}], "again.jsonl")
    with pytest.raises(SourceError, match=r"'p3' \(prompts 3 and 12\)"):
        write_plan(objects, make_config(again), run_id=RUN_ID, before=[first, second])


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=200),
    unit_tokens=st.integers(1, 64),
)
def test_units_cover_all_prompts_in_order_and_stay_within_their_tokens(
    rows: list[int], unit_tokens: int
) -> None:
    packer = UnitPacker(unit_tokens)
    units = [unit for count in rows if (unit := packer.add(count))]
    last = packer.close()
    assert last is not None
    units.append(last)
    next_prompt = 0
    for number, unit in enumerate(units):
        assert (unit.unit, unit.first_prompt) == (number, next_prompt)
        own = rows[next_prompt : next_prompt + unit.num_prompts]
        assert unit.num_tokens == sum(own)
        assert unit.num_tokens <= unit_tokens or sum(1 for count in own if count) == 1
        next_prompt += unit.num_prompts
    assert next_prompt == len(rows)


def test_units_of_tiny_prompts_are_bounded_in_prompts() -> None:
    packer = UnitPacker(1 << 30)
    units = [unit for _ in range(MAX_UNIT_PROMPTS + 1) if (unit := packer.add(1))]
    assert [unit.num_prompts for unit in units] == [MAX_UNIT_PROMPTS]


@given(ids=st.lists(st.sampled_from("abcdefgh"), max_size=40), in_memory=st.integers(1, 8))
def test_repeated_ids_are_found_in_memory_and_on_disk(ids: list[str], in_memory: int) -> None:
    expected = [(ids.index(name), place) for place, name in enumerate(ids) if name in ids[:place]]
    with PromptIds(in_memory) as known:
        for place, name in enumerate(ids):
            known.add(name, place)
        found = known.repeated(most=1000)
    assert [again for _, again in found] == [again for _, again in expected]
    assert all(ids[earlier] == ids[again] and earlier < again for earlier, again in found)


BIG = (1 << 53) + 1


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1, 2.5, None], [1.0, 2.5, None]),
        ([BIG, 1.5, None], [str(BIG), "1.5", None]),
        ([1 << 63, -1], [str(1 << 63), "-1"]),
        ([10**400, 0.5], ["1" + "0" * 400, "0.5"]),
        ([(1 << 63) + 1, None], [str((1 << 63) + 1), None]),
        ([True, 1], ["true", "1"]),
    ],
)
def test_metadata_keeps_every_value_exactly(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path, values: list, kept: list
) -> None:
    records = [{"id": f"p{i}", "text": "w1", "note": value} for i, value in enumerate(values)]
    table = planned(make_config(write_prompts(records)), tmp_path / "run")
    assert table["note"].to_pylist() == kept


def test_metadata_named_as_the_plan_s_own_columns_gets_a_name_that_is_free(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path
) -> None:
    records = [{"id": "a", "text": "w1", "status": "mine", "status_": "other", "unit": 3}]
    (row,) = planned(make_config(write_prompts(records)), tmp_path / "run").to_pylist()
    assert (row["status_"], row["status__"], row["unit_"]) == ("mine", "other", 3)


def test_a_field_has_the_same_column_in_every_file_and_segment(
    make_config: Configs,
    write_prompts: Prompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.plan.PROMPTS_PER_FILE", 1)
    both = [
        {"id": "a", "text": "w1", "status": "status of a", "status_": "status_ of a"},
        {"id": "b", "text": "w1", "status": "status of b"},
        {"id": "c", "text": "w1", "status_": "status_ of c"},
    ]
    more = [{"id": "d", "text": "w1", "status": "status of d"}]
    objects = open_store(str(tmp_path / "run"))
    first = write_plan(objects, make_config(write_prompts(both)), run_id=RUN_ID)
    config = make_config(write_prompts(more, "more.jsonl"))
    write_plan(objects, config, run_id=RUN_ID, before=[first])
    table = PlanTables(objects, read_segments(objects)).prompts()
    assert table["status_"].to_pylist() == [f"status of {one}" for one in "ab"] + [
        None,
        "status of d",
    ]
    assert table["status__"].to_pylist() == ["status_ of a", None, "status_ of c", None]


@given(st.lists(st.from_regex(r"\A(status|unit|text|note|_)?_{0,3}\Z"), unique=True))
def test_no_two_fields_are_stored_as_one_column(names: list[str]) -> None:
    stored = [stored_name(name) for name in names]
    assert len(set(stored)) == len(names)
    assert not RESERVED_COLUMNS & set(stored)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (BIG, 1.5, [str(BIG), "1.5"]),
        (1, 1.5, [1.0, 1.5]),
        (1, "a", ["1", "a"]),
        (True, "a", ["true", "a"]),
        (True, 2, ["true", "2"]),
        (None, 2, [None, 2]),
    ],
)
def test_a_column_may_be_of_other_types_in_later_files(
    make_config: Configs,
    write_prompts: Prompts,
    tmp_path: Path,
    first: object,
    second: object,
    kept: list,
) -> None:
    objects = open_store(str(tmp_path / "run"))
    one = write_prompts([{"id": "a", "text": "w1", "note": first}], "one.jsonl")
    two = write_prompts([{"id": "b", "text": "w1", "note": second}], "two.jsonl")
    segment = write_plan(objects, make_config(one), run_id=RUN_ID)
    write_plan(objects, make_config(two), run_id=RUN_ID, before=[segment])
    tables = PlanTables(objects, read_segments(objects))
    assert tables.prompts()["note"].to_pylist() == kept
