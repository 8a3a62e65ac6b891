"""JSON objects that carry a crc32c of their own canonical body, so that any flipped byte is found.

Canonical body: UTF-8, keys sorted, no white space, `crc32c` itself left out. The checksum is stored
as eight lower-case hexadecimal digits under the key `crc32c`. NaN and infinities are refused.
"""

from __future__ import annotations

import json
from typing import Any

from store.checksum import crc32c, hex_crc32c
from store.errors import DamagedObject, FormatError

MAX_JSON_BYTES = 256 << 20
_CRC = "crc32c"
_CANONICAL = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
"""Kept: making one takes as long as encoding a small document."""


def seal(body: dict[str, Any]) -> bytes:
    """Return `body` as canonical JSON bytes with its crc32c added."""
    if _CRC in body:
        raise ValueError("the body already has a crc32c; pass the unsealed body")
    parts = _around_crc(body)
    return _joined(parts, hex_crc32c(crc32c(_joined(parts))))


def checksum_of(body: dict[str, Any]) -> str:
    """Return the crc32c of the canonical form of `body`, as documents write it."""
    return hex_crc32c(crc32c(_CANONICAL.encode(body).encode()))


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Return the body of sealed JSON bytes, without its checksum.

    `name` is the object's name, for messages. Raises `DamagedObject` if the bytes are not the
    canonical form of what they say, `FormatError` if they are no sealed JSON at all.
    """
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(
            f"{name}: {len(data)} bytes of JSON, more than the {MAX_JSON_BYTES} allowed"
        )
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(
            f"{name}: not readable as JSON ({error}); run `attnstore verify`"
        ) from error
    if not isinstance(body, dict) or not isinstance(body.get(_CRC), str):
        raise FormatError(f"{name}: no crc32c in it; this is not an object of an attnstore run")
    try:
        parts = _around_crc(body)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(f"{name}: not canonical JSON ({error})") from error
    stated = body.pop(_CRC)
    actual = hex_crc32c(crc32c(_joined(parts)))
    if stated != actual or _joined(parts, stated) != bytes(data):
        raise DamagedObject(
            f"{name}: its crc32c says {stated}, its body gives {actual}; run `attnstore verify`"
        )
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _around_crc(body: dict[str, Any]) -> tuple[str, str]:
    """Return the members of the body before and after its crc32c in canonical form."""
    before = {key: value for key, value in body.items() if key < _CRC}
    after = {key: value for key, value in body.items() if key > _CRC}
    return _CANONICAL.encode(before)[1:-1], _CANONICAL.encode(after)[1:-1]


def _joined(parts: tuple[str, str], checksum: str | None = None) -> bytes:
    own = "" if checksum is None else f'"{_CRC}":{_CANONICAL.encode(checksum)}'
    return ("{" + ",".join(filter(None, (parts[0], own, parts[1]))) + "}").encode()
