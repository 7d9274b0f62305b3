"""Pairs of a test and a program, which attack the judge (`attacks.txt`) or are honest
(`honest.txt`).

A line `#### KIND NAME` begins a family, a test or a program, and `# include NAME` stands for code
that many programs share.
"""

from pathlib import Path

from tests.sandbox.forgeries import FRAMES, SEND, YES

HANDLES = """
import os
def message(*parts):
    data = b"".join(t + len(c).to_bytes(4, "big") + c for t, c in parts)
    return len(data).to_bytes(8, "big") + data
def put(*parts):
    for n in range(3, 32):
        try: os.write(n, message(*parts))
        except OSError: pass
def ask(operation, *arguments):
    put((b't', b''), (b'u', b'ask'), (b'u', operation), (b't', b''), *arguments, (b'.', b''),
        (b'd', b''), (b'.', b''), (b'0', b''), (b'.', b''))
"""
INCLUDED = {"YES": YES, "FRAMES": FRAMES, "SEND": SEND, "HANDLES": HANDLES}


def _read(name: str) -> dict[str, list[tuple[str, str]]]:
    families: dict[str, list[tuple[str, str]]] = {}
    family: list[tuple[str, str]] = []
    test = ""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for section in text.split("\n#### ")[1:]:
        heading, _, content = section.partition("\n")
        kind, _, title = heading.partition(" ")
        for included, code in INCLUDED.items():
            content = content.replace(f"# include {included}", code)
        match kind:
            case "family":
                family = families[title] = []
            case "test":
                test = content
            case "program":
                family.append((test, content))
            case _:
                raise ValueError(heading)
    return families


ATTACKS = _read("attacks.txt")
HONEST = {name: pair for name, (pair,) in _read("honest.txt").items()}
