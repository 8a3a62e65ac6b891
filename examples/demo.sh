#!/usr/bin/env bash
# The demo, once everything is installed: capture, account, read a slice, draw a pattern.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

say "attnstore run examples/demo.yaml"
code=0
attnstore run examples/demo.yaml || code=$?
case $code in
    0) ;;
    3) echo "Exit code 3 is expected: two prompts, 'empty' and 'too-long', cannot be captured." ;;
    *) exit "$code" ;;
esac

say "attnstore status demo-run"
attnstore status demo-run

say "examples/read_slice.py demo-run"
python examples/read_slice.py demo-run

say "attnstore show demo-run: one head's attention pattern"
attnstore show demo-run --prompt induction-01 --layer 18 --head 6 --output demo-run.png
