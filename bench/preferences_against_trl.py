"""The losses of preferences of tpu_rl against those of TRL, on one random batch.

    python bench/preferences_against_trl.py --trl PYTHON [--to FILE.md]

PYTHON is the interpreter of an environment with trl==1.16.0 and torch. The batch, the table of
logits and the columns are those of bench/objectives_against_peers.py: the 16 completions are eight
pairs, or 16 judged completions. TRL's own functions compute (bench/engines/peer_preferences.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import objectives_against_peers as objectives
from objectives_against_peers import HERE, LIMIT, PROMPT

from tpu_rl.algos.dpo import DpoConfig, dpo
from tpu_rl.algos.kto import KtoConfig, kto
from tpu_rl.proofs import tiny
from tpu_rl.types import Pairs, Rollout, Sampling

objectives.FACTORIES.update({DpoConfig: dpo, KtoConfig: kto})


@dataclass(frozen=True)
class Case:
    """A loss of TRL, and ours."""

    name: str
    ours: DpoConfig | KtoConfig
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def of_dpo(loss_type: str, ours: DpoConfig, **settings: Any) -> Case:
    return Case("DPOTrainer", ours, {"loss_type": loss_type.split("+"), **settings})


SMOOTH = {"label_smoothing": 0.1}
CASES = [
    of_dpo("sigmoid", DpoConfig()),
    of_dpo("hinge", DpoConfig(loss="hinge")),
    of_dpo("ipo", DpoConfig(loss="ipo")),
    of_dpo("exo_pair", DpoConfig(loss="exo", label_smoothing=0.1), **SMOOTH),
    of_dpo("nca_pair", DpoConfig(loss="nca")),
    of_dpo("robust", DpoConfig(loss="robust", label_smoothing=0.1), **SMOOTH),
    of_dpo("bco_pair", DpoConfig(loss="bco_pair")),
    of_dpo("sppo_hard", DpoConfig(loss="sppo")),
    of_dpo("aot", DpoConfig(loss="aot", label_smoothing=0.1), **SMOOTH),
    of_dpo("aot_unpaired", DpoConfig(loss="aot_unpaired")),
    of_dpo("apo_zero", DpoConfig(loss="apo_zero")),
    of_dpo("apo_down", DpoConfig(loss="apo_down")),
    of_dpo("discopop", DpoConfig(loss="discopop")),
    of_dpo("sigmoid_norm", DpoConfig(loss="sigmoid_norm")),
    of_dpo(
        "sigmoid+bco_pair",
        DpoConfig(loss_weight=0.8, further_losses=("0.2*bco_pair",)),
        loss_weights=[0.8, 0.2],
    ),
    of_dpo("sigmoid", DpoConfig(tail_weight=0.4), ld_alpha=0.4),
    of_dpo("sigmoid", DpoConfig(weigh_by_policy=True), use_weighting=True),
    of_dpo("sigmoid", DpoConfig(f_divergence="forward_kl"), f_divergence_type="forward_kl"),
    of_dpo("sigmoid", DpoConfig(f_divergence="js"), f_divergence_type="js_divergence"),
    Case("KTOTrainer", KtoConfig(), {"loss_type": "kto"}),
    Case("KTOTrainer", KtoConfig(loss="apo_zero"), {"loss_type": "apo_zero_unpaired"}),
    Case(
        "KTOTrainer",
        KtoConfig(good_weight=1.5, bad_weight=0.5),
        {"loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    Case("CPOTrainer", DpoConfig(reference_free=True), {"loss_type": "sigmoid", "cpo_alpha": 0.0}),
    Case(
        "CPOTrainer",
        DpoConfig(loss="hinge", reference_free=True),
        {"loss_type": "hinge", "cpo_alpha": 0.0},
    ),
    Case("CPOTrainer", DpoConfig(loss="simpo"), {"loss_type": "simpo", "cpo_alpha": 0.0}),
    Case("CPOTrainer", DpoConfig(loss="alphapo"), {"loss_type": "simpo", "alpha": 0.25}),
    Case("ORPOTrainer", DpoConfig(loss="orpo"), note="likelihood of the completion per token"),
]


def make_pairs(rollout: Rollout, arrays: dict[str, np.ndarray], graded: bool) -> Pairs:
    """Return the batch as pairs, now the first and now the second chosen, or graded alike."""
    rows = len(rollout.tokens)
    reference = np.zeros(rollout.tokens.shape)
    reference[:, PROMPT:] = arrays["reference_log_probs"] * arrays["mask"]
    number = np.arange(rows)
    return Pairs(
        tokens=rollout.tokens,
        action_mask=rollout.action_mask,
        group_id=jnp.asarray(number if graded else number // 2, jnp.int32),
        preferred=jnp.asarray(arrays["label"]),
        margin=jnp.zeros(rows),
        reference_log_probs=jnp.asarray(reference),
    )


def add_pairs(rollout: Rollout, arrays: dict[str, np.ndarray]) -> None:
    """Add who is chosen, and each prompt with the completion of the next row."""
    rows = np.arange(len(rollout.tokens))
    arrays["label"] = (rows % 2 == 0) ^ (rows // 2 % 3 == 1)
    arrays["chosen"] = rows[arrays["label"]]
    arrays["rejected"] = rows[~arrays["label"]]
    other = (rows + 1) % len(rows)
    arrays["other_mask"] = arrays["mask"][other]
    arrays["other_completion_ids"] = arrays["completion_ids"][other]
    arrays["other_previous"] = arrays["previous"][other].copy()
    arrays["other_previous"][:, 0] = arrays["previous"][:, 0]


def our_loss(
    case: Case, rollout: Rollout, arrays: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Return our loss and its gradient for the policy's table."""
    pairs = make_pairs(rollout, arrays, graded=isinstance(case.ours, KtoConfig))
    experience = tiny.experience(pairs, row_length=48, micro_batch_rows=1)
    params = {name: jnp.asarray(arrays[name]) for name in ("table", "reference_table")}
    params = {"policy": params["table"], "reference": params["reference_table"]}
    algorithm = objectives.FACTORIES[type(case.ours)](
        case.ours, objectives.table_roles(), Sampling(temperature=1.0, max_new_tokens=LIMIT)
    )
    batch, _ = algorithm.make_batch(experience, params, jnp.zeros(2))

    def loss(table: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for number in range(batch.action_mask.shape[1]):
            micro_batch = jax.tree.map(lambda x, number=number: x[0, number], batch)
            total += algorithm.loss(params | {"policy": table}, micro_batch)[0]
        return total

    value, gradient = jax.value_and_grad(loss)(params["policy"])
    return float(value), np.asarray(gradient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trl", required=True, help="interpreter of an environment with trl")
    parser.add_argument("--to", type=Path, help="file that gets the table; default: print only")
    arguments = parser.parse_args()
    rollout, arrays = objectives.make_rollout()
    add_pairs(rollout, arrays)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "arrays.npz", **arrays)
        sent = json.dumps([{"name": case.name, "settings": case.settings} for case in CASES])
        (folder / "cases.json").write_text(sent, encoding="utf-8")
        program = str(HERE / "engines" / "peer_preferences.py")
        subprocess.run([arguments.trl, program, str(folder)], check=True)
        results = dict(np.load(folder / "results.npz"))
    lines = ["| there | here | value | gradient | of |", "|---|---|---|---|---|"]
    for number, case in enumerate(CASES):
        value, gradient = our_loss(case, rollout, arrays)
        there = results[f"{number}_gradient"]
        settings = ", ".join(
            f"{key} {objectives.as_written(value)}" for key, value in case.settings.items()
        )
        details = [part for part in (f"`{settings}`" if settings else "", case.note) if part]
        cells = [
            ", ".join([f"TRL `{case.name}`", *details]),
            objectives.flags(case),
            f"{abs(value - results[f'{number}_value']):.0e}",
            f"{np.abs(gradient - there).max():.0e}",
            f"{np.abs(there).max():.2g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.to:
        arguments.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
