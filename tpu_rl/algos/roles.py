"""Roles that several algorithms ask for in the same way."""

from __future__ import annotations

from tpu_rl.algorithm_spec import RoleSpec


def with_reference(
    roles: dict[str, RoleSpec], needed: bool, tracks_policy: float = 0.0
) -> dict[str, RoleSpec]:
    """Add a frozen role "reference" to `roles` if it is needed, which may move to the policy
    now and then, by the share `tracks_policy` of the way.

    A run without that role neither keeps a reference model nor makes a reference pass.
    """
    if not needed:
        return roles
    return roles | {"reference": RoleSpec(trainable=False, tracks_policy=tracks_policy)}
