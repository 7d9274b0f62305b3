"""Roles that several algorithms ask for in the same way."""

from __future__ import annotations

from tpu_rl.algorithm_spec import RoleSpec


def with_reference(roles: dict[str, RoleSpec], needed: bool) -> dict[str, RoleSpec]:
    """Return `roles`, with a frozen role "reference" if it is needed.

    A run without that role neither keeps a reference model nor makes a reference pass.
    """
    if not needed:
        return roles
    return roles | {"reference": RoleSpec(trainable=False)}
