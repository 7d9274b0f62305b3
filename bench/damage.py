"""Files of a checkpoint are damaged one by one: is each named, and is nothing wrong ever restored?

    python bench/damage.py RUN_DIR [--flips 500] [--seed 0]

Works on a copy of the run's newest checkpoint. Single flipped bits, in files drawn uniformly; then every file deleted,
emptied and cut in half. Each time: does manifests.compare (verify.py) name that file and no other; and does restoring
give the recorded arrays, or is it refused as damaged?
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpu_rl import checkpoint, digests, manifests  # noqa: E402
from tpu_rl.errors import DamagedDataError  # noqa: E402

Damage = tuple[str, Path, Callable[[bytes], bytes | None]]
"""What is done to which file: its content -> another, or None to delete it."""


def damages(files: list[Path], flips: int, chance: random.Random) -> Iterator[Damage]:
    for _ in range(flips):
        path = chance.choice([path for path in files if path.stat().st_size])
        bit = chance.randrange(8 * path.stat().st_size)

        def flip(content: bytes, bit: int = bit) -> bytes:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            return bytes(flipped)

        yield "flipped", path, flip
    for path in files:
        yield "deleted", path, lambda content: None
        if path.stat().st_size:
            yield "emptied", path, lambda content: b""
            yield "cut in half", path, lambda content: content[: len(content) // 2]


def restored(folder: Path, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> str:
    """The digest of what is restored, or "refused"."""
    reader = checkpoint.read_checkpoints(str(folder))
    try:
        return digests.of_tree(reader.restore(step, wanted)[0])
    except DamagedDataError:
        return "refused"
    finally:
        reader.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    steps = [int(path.name) for path in (flags.run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder, step = Path(temporary), max(steps)
        shutil.copytree(flags.run_dir / "checkpoints" / str(step), folder / str(step))
        leaves = json.loads((folder / str(step) / "record" / "metadata").read_bytes())["leaves"]
        wanted = {path: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for path, leaf in leaves.items()}
        right = restored(folder, step, wanted)
        files = sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())
        for what, path, change in damages(files, flags.flips, random.Random(flags.seed)):
            content = path.read_bytes()
            changed = change(content)
            path.unlink() if changed is None else path.write_bytes(changed)
            differences = manifests.compare(folder / str(step))
            name = str(path.relative_to(folder / str(step)))
            alone = differences is not None and [*differences.changed, *differences.missing] == [name]
            no_manifest = differences is None and name == manifests.MANIFEST
            digest = restored(folder, step, wanted)
            outcome = "unharmed" if digest == right else digest if digest == "refused" else "WRONG"
            found[what, outcome if alone or no_manifest else f"{outcome}, NOT NAMED"] += 1
            path.write_bytes(content)
    for (what, outcome), count in sorted(found.items()):
        print(f"{what}: {count} {outcome}")
    return any(outcome.isupper() or "NOT NAMED" in outcome for _, outcome in found)


if __name__ == "__main__":
    sys.exit(main())
