"""The one family of errors that a user sees: what went wrong, where, why, and how to mend it.

`launch` prints them as one short text and exits with their code; anything else that escapes is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

from tpu_rl.redaction import redact


class TpuRlError(Exception):
    """An error with a remedy. Use one of the subclasses: they carry the process's exit code."""

    code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = ""):
        # Errors are printed and kept: what others' libraries say in them may hold a token.
        what, where, why, fix = (redact(text) for text in (what, where, why, fix))
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        lines += [f"  {name}: {text}" for name, text in (("where", where), ("why", why), ("fix", fix)) if text]
        super().__init__("\n".join(lines))


class InputError(TpuRlError):
    """The user's flags, files, data or reward function are at fault (exit code 2)."""

    code = 2


class MachineError(TpuRlError):
    """The machine lacks something: a device, a package, disk space, a permission (exit code 3)."""

    code = 3


class DamagedDataError(TpuRlError):
    """Something that this program wrote cannot be trusted any more (exit code 4)."""

    code = 4
