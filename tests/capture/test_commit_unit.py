"""From the ranks' reports to a commit that the reader and verify accept. No engine runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capture.assembly import RankReport
from capture.commit_unit import CaptureShape, commit_captured_unit
from capture.errors import RowsMissing
from capture.rank import RankFacts
from capture.rows import UnitLayout
from capture.settings import CaptureSettings, PromptTask, UnitTask
from store import keys, open_run
from store.attempt import AttemptWriter
from store.codec import DTYPES
from store.objects.local import LocalStore
from store.packed_pattern import num_entries
from store.run_format import LayerSemantics, ModelManifest, Site
from store.shard import encode_shard
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, plan_hash_of, write_manifests

LENGTHS = [300, 20]
TASK = UnitTask(0, "a0", 0, tuple(PromptTask(np.arange(n, dtype=np.int32)) for n in LENGTHS))
LAYOUT = UnitLayout.plan(0, 0, "a0", LENGTHS)
LAYERS = tuple(
    LayerSemantics(
        layer=number, module=f"l{number}", num_heads=8, num_kv_heads=2, head_size=16,
        v_head_size=8, scale=0.25,
    )
    for number in (1, 4)
)  # fmt: skip
MODEL = ModelManifest(
    run_id=RUN_ID, architecture="Tiny", dtype="bfloat16", hidden_size=64, layers=list(LAYERS)
)
SITES = (Site.ROT_Q, Site.ROT_K, Site.V, Site.Z, Site.PRE_Q, Site.PRE_K, Site.PROJ_IN)


def facts(rank: int, ranks: int) -> RankFacts:
    """8 query heads over the ranks; of 4 ranks every second one writes a kv head."""
    share = 8 // ranks
    query = tuple(range(rank * share, (rank + 1) * share))
    kv = (rank,) if ranks == 2 else ((rank // 2,) if rank % 2 == 0 else ())
    heads = {str(site): kv if site.is_kv else query for site in SITES} | {"pattern": query}
    return RankFacts(rank, (), heads, (), 0, 0, 0, 0)


def report(objects: LocalStore, shape: CaptureShape, rank: RankFacts) -> RankReport:
    """Put random values for every shard that the rank owes."""
    rng = np.random.default_rng(rank.rank)
    writer = AttemptWriter(objects, 0, "a0")
    records, rows = [], {}
    for site in shape.sites:
        mine = rank.heads[site.name]
        if not mine:
            continue
        total = sum(map(num_entries, LENGTHS)) if site.packed else sum(LENGTHS)
        array = shape.array(site, total, {})
        cut = array.geometry()
        head_shard = array.heads.index(mine[0]) // cut.shard_heads
        for layer in range(len(LAYERS)):
            for shard in range(cut.num_token_shards):
                size = (cut.shard_heads, cut.tokens_in_shard(shard), cut.head_size)
                values = rng.random(size).astype(DTYPES[site.dtype])
                name = array.shard_name(layer, shard, head_shard)
                key = writer.prefix + name
                encoded = encode_shard(cut, shard, values, shape.settings.codec, key)
                records.append(writer.put_shard(encoded))
        rows[site.name] = total * len(LAYERS)
    return RankReport(0, rank.rank, objects=tuple(records), rows=rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_the_ranks_report_becomes_a_unit_that_is_read_and_verified(tmp_path: Path, ranks):
    objects = LocalStore(tmp_path)
    write_manifests(objects, SampleShape(), [LENGTHS])
    objects.put(keys.MODEL, [MODEL.to_bytes()])
    held = tuple(facts(rank, ranks) for rank in range(ranks))
    settings = CaptureSettings(sites=SITES, pattern="float32")
    shape = CaptureShape(RUN_ID, "bfloat16", LAYERS, settings, held)
    reports = [report(objects, shape, rank) for rank in held]
    fewer = [replace(reports[0], objects=reports[0].objects[1:]), *reports[1:]]
    with pytest.raises(RowsMissing, match="were due"):
        commit_captured_unit(objects, shape, TASK, LAYOUT, {}, fewer, {})
    task = replace(TASK, plan_hash=plan_hash_of(objects, 0))
    result, commit = commit_captured_unit(
        objects, shape, task, LAYOUT, {}, reports, {}, model_crc32c=MODEL.fingerprint
    )
    assert result.won
    assert commit.plan_hash == task.plan_hash is not None
    assert commit.model_crc32c == MODEL.fingerprint
    assert all(array.tags for array in commit.arrays)
    assert verify_run(objects, deep=True).problems == []
    run = open_run(str(tmp_path))
    assert run.read("z", prompt="p1", layer=4).sizes == {"head": 8, "pos": 20, "d_head": 8}
    assert run.read("rot_k", prompt="p0", layer=1, head=1).sizes == {"pos": 300, "d_head": 16}
    assert run.pattern("p1", 4, 7).shape == (20, 20)
