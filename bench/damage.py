"""Damage the files of a checkpoint one by one: is each named, and is nothing wrong ever restored?

    python bench/damage.py RUN_DIR [--flips 500] [--seed 0]

Works on a copy of the run's newest checkpoint. First flips single bits in random files; then
deletes, empties and halves every file. Each time, checks that manifests.compare (verify.py) names
that file and no other, and that restoring either gives the recorded arrays or is refused.
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

from tpu_rl.checkpoint import digests, manager, manifests
from tpu_rl.errors import DamagedDataError

Damage = tuple[str, Path, Callable[[bytes], bytes | None]]
"""(name, file, content -> new content, or None to delete the file)."""


def make_damages(files: list[Path], flips: int, rng: random.Random) -> Iterator[Damage]:
    """Return the flipped bits, then all deleted, emptied and halved files."""
    for _ in range(flips):
        path = rng.choice([path for path in files if path.stat().st_size])
        bit = rng.randrange(8 * path.stat().st_size)

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


def restored_digest(folder: Path, step: int, shapes: dict[str, jax.ShapeDtypeStruct]) -> str:
    """Return the digest of the restored arrays, or "refused"."""
    reader = manager.read_checkpoints(str(folder))
    try:
        return digests.of_tree(reader.restore(step, shapes)[0])
    except DamagedDataError:
        return "refused"
    finally:
        reader.close()


def names_only(folder: Path, file: Path) -> bool:
    """Return True if the manifest's comparison names this damaged file and no other."""
    name = str(file.relative_to(folder))
    differences = manifests.compare(folder)
    if differences is None:  # There is no readable manifest.
        return name == manifests.MANIFEST
    return [*differences.changed, *differences.missing] == [name]


def count_outcomes(folder: Path, step: int, flips: int, seed: int) -> Counter[tuple[str, str]]:
    """Damage each file of a checkpoint and repair it. Returns (damage, outcome) -> count."""
    checkpoint = folder / str(step)
    leaves = json.loads((checkpoint / "record" / "metadata").read_bytes())["leaves"]
    shapes = {
        path: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for path, leaf in leaves.items()
    }
    right_digest = restored_digest(folder, step, shapes)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    outcomes: Counter[tuple[str, str]] = Counter()
    for damage, path, change in make_damages(files, flips, random.Random(seed)):
        content = path.read_bytes()
        changed = change(content)
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        is_named = names_only(checkpoint, path)
        digest = restored_digest(folder, step, shapes)
        outcome = {right_digest: "unharmed", "refused": "refused"}.get(digest, "WRONG")
        outcomes[damage, outcome if is_named else f"{outcome}, NOT NAMED"] += 1
        path.write_bytes(content)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--flips", type=int, default=500, help="flipped bits")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    checkpoints = flags.run_dir / "checkpoints"
    step = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoints / str(step), Path(folder) / str(step))
        outcomes = count_outcomes(Path(folder), step, flags.flips, flags.seed)
    for (damage, outcome), count in sorted(outcomes.items()):
        print(f"{damage}: {count} {outcome}")
    return any(outcome.isupper() or "NOT NAMED" in outcome for _, outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
