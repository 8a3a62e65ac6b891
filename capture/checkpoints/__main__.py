"""Prepare a model folder, once: `python -m capture.checkpoints smollm2|FAMILY DEST`."""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.checkpoints.families import FAMILIES
from capture.checkpoints.folder import COMPLETE
from capture.checkpoints.smollm2 import prepare_smollm2
from capture.checkpoints.tiny import tiny


def main() -> None:
    """Parse the command line, prepare the folder and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m capture.checkpoints", description=__doc__)
    parser.add_argument("model", choices=["smollm2", *FAMILIES])
    parser.add_argument("dest", type=Path)
    chosen = parser.parse_args()
    known = (chosen.dest / COMPLETE).exists()
    if not known:
        print(f"Preparing {chosen.model} in {chosen.dest} (once)", flush=True)
    if chosen.model == "smollm2":
        prepare_smollm2(chosen.dest)
    else:
        tiny(chosen.model, chosen.dest)
    print(f"{chosen.model} is in {chosen.dest}")


if __name__ == "__main__":
    main()
