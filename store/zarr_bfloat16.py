"""zarr-python's missing `bfloat16`: the registered Zarr extension type, bits kept exact.

Importing this module registers it (zarr-python 3.1); from 3.4 the entry point in the
`zarr.data_type` group does so without an import. tensorstore and zarrs know the type by themselves.
Specification: zarr-extensions, data-types/bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeGuard, cast

import ml_dtypes
import numpy as np
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.core.dtype.wrapper import ZDType

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined,unused-ignore]
except ImportError:  # zarr-python 3.1
    from zarr.core.dtype.common import DataTypeValidationError

NAME: Literal["bfloat16"] = "bfloat16"
_NATIVE = np.dtype(ml_dtypes.bfloat16)
_SPECIAL = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """The `bfloat16` data type: the upper half of a float32."""

    dtype_cls: ClassVar[type[Any]] = type(_NATIVE)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = NAME
    _zarr_v2_names: ClassVar[tuple[str, ...]] = (NAME,)

    @property
    def item_size(self) -> int:
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not bfloat16")

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == _NATIVE)

    def to_native_dtype(self) -> Any:
        return _NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if isinstance(data, dict) and data.get("name") == NAME:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not bfloat16")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == NAME:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not bfloat16")

    def to_json(self, zarr_format: int) -> Any:
        return {"name": NAME, "object_codec_id": None} if zarr_format == 2 else NAME

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.floating | np.integer | ml_dtypes.bfloat16)

    def cast_scalar(self, data: object) -> Any:
        return ml_dtypes.bfloat16(cast("float", data))

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002
        """Read a fill value: a number, `NaN`, `Infinity`, `-Infinity`, or its bits as `0x7fc0`."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array([int(data, 16)], np.uint16).view(_NATIVE)[0]
        return ml_dtypes.bfloat16(_SPECIAL[data] if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:  # noqa: ARG002
        value = float(cast("float", data))
        if np.isfinite(value):
            return value
        return "NaN" if np.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def register() -> None:
    """Make zarr-python know `bfloat16`; does nothing where it already does."""
    if NAME not in data_type_registry.contents:
        data_type_registry.register(NAME, BFloat16)


register()
