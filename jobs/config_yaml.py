"""YAML as a config means it: each key once, and `5:2` is a text.

PyYAML reads YAML 1.1, where a later key silently replaces an earlier one, `5:2` is 302 in base 60
and `010` is eight. All that it writes is read back the same here. Knows no key of the config.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_NUMBERS: Final = {
    _INT: r"[-+]?(?:0|[1-9][0-9_]*|0b[01][01_]*|0x[0-9a-fA-F][0-9a-fA-F_]*)",
    _FLOAT: (
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the two differences."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping. Raises `ConstructorError` with the place of a key given twice."""
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, yaml.MappingNode)
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            known.add((key.tag, key.value))
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _NUMBERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list("-+.0123456789"))


def read_yaml(text: str | bytes) -> Any:
    """Return what a YAML document holds. Raises `yaml.YAMLError` naming the place."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - it derives from the safe one
    except (ValueError, RecursionError) as error:  # the 45th of a month, ten thousand brackets
        raise yaml.YAMLError(str(error)) from error
