"""Read one slice of a run and print it: `python examples/read_slice.py RUN`. Needs no torch."""

from __future__ import annotations

import sys

from store import open_run


def main(url: str, prompt: str = "ioi-00", layer: int = 12) -> None:
    run = open_run(url)
    print(run)

    tokens = run.tokens(prompt)
    print(f"\nprompt {prompt}: {len(tokens.ids)} tokens")
    print(" ".join(repr(string) for string in tokens.strings))

    z = run.read("z", prompt=prompt, layer=layer, head=[0, 3, 8], pos=slice(0, 4))
    print("\nz, the output of three heads at the first four positions (first values of each):")
    print(z.isel(d_head=slice(0, 4)))

    pattern = run.pattern(prompt=prompt, layer=layer, head=3)
    last = pattern.isel(query_pos=-1)
    top = sorted(zip(last.values, tokens.strings, strict=True), reverse=True)[:3]
    looks = ", ".join(f"{string!r} {weight:.2f}" for weight, string in top)
    print(f"\nlayer {layer}, head 3: from the last token, attention goes to {looks}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo-run")
