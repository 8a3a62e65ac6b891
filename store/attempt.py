"""The objects of one attempt at one unit, under a folder that no other attempt uses.

Ranks put shards, the worker that finishes the unit puts the metadata. Nothing here is part of the
run until a commit names it (`store.commit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from store import keys
from store.checksum import crc32c_of_parts, hex_crc32c
from store.objects.protocol import ObjectStore
from store.run_format import ArrayRecord, ObjectRecord
from store.shard import EncodedShard
from store.zarr_metadata import array_metadata, group_metadata


class AttemptWriter:
    """Puts the objects of attempt `attempt` at `unit`; usable from several threads at once."""

    def __init__(self, objects: ObjectStore, unit: int, attempt: str, *, run_id: str = "") -> None:
        self._objects = objects
        self._unit = unit
        self._attempt = attempt
        self._run_id = run_id
        self._prefix = keys.attempt_prefix(unit, attempt)

    @property
    def prefix(self) -> str:
        """The attempt's folder, relative to the run."""
        return self._prefix

    def shard_key(self, site: str, coordinates: Sequence[int]) -> str:
        """Return the name, relative to the run, of the shard at these Zarr `coordinates`.

        A shard is encoded for this name: the tags of its chunks say it.
        """
        return self._prefix + keys.shard_key(site, tuple(coordinates))

    def put_shard(self, encoded: EncodedShard) -> ObjectRecord:
        """Put one shard under the name it was encoded for; return its record. May be repeated."""
        if not encoded.key.startswith(self._prefix):
            raise ValueError(f"a shard encoded for {encoded.key} does not belong in {self._prefix}")
        name = encoded.key[len(self._prefix) :]
        self._objects.put(encoded.key, encoded)
        return ObjectRecord(name=name, bytes=encoded.num_bytes, crc32c=hex_crc32c(encoded.crc32c))

    def put_object(self, name: str, data: bytes) -> ObjectRecord:
        """Put any other object of the attempt (such as generated.parquet) and return its record."""
        self._objects.put(self._prefix + keys.checked_name(name), [data])
        return ObjectRecord(name=name, bytes=len(data), crc32c=hex_crc32c(crc32c_of_parts([data])))

    def put_metadata(self, arrays: Sequence[ArrayRecord]) -> list[ObjectRecord]:
        """Put the zarr.json of the group and of every array at once, and return their records.

        Nothing is put where there are no arrays: a unit of which nothing is stored has no data, and
        so can be given up even if none can be put.
        """
        if not arrays:
            return []
        documents = {
            keys.GROUP_METADATA: group_metadata(
                run_id=self._run_id, unit=self._unit, attempt=self._attempt
            )
        }
        for array in arrays:
            document = array_metadata(array, run_id=self._run_id, unit=self._unit)
            documents[keys.array_metadata_key(array.site)] = document
        # One round trip, or one flush of a busy disk, instead of one for each.
        with ThreadPoolExecutor(len(documents)) as pool:
            return list(pool.map(self.put_object, documents, documents.values()))

    def sync(self) -> None:
        """Return once everything put by this attempt survives a power cut."""
        self._objects.sync(self._prefix)
