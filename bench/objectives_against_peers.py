"""The losses and advantages of tpu_rl against those of TRL and verl, on one random batch.

    python bench/objectives_against_peers.py --trl PYTHON [--verl FOLDER] [--to FILE.md]

PYTHON is the interpreter of an environment with trl==1.16.0 and torch. FOLDER is the folder `verl`
of verl's source, e.g. of its unpacked wheel. The peers' own functions compute
(bench/engines/peer_objectives.py). Nothing of theirs is copied here.

The policy is a free table of logits: row v holds the logits of the token after token v, and every
token stands once in the batch, but for the prompts that groups share. Four groups of four
completions of 2 to 7 tokens; old policy and reference differ from it by random numbers. Ours goes
through make_batch, packed rows and loss. All in float64, but for the weights of tokens, which are
float32 (hence differences of about 1e-9). Columns:

    value     largest difference of the loss, or of an advantage
    gradient  largest difference of the loss's gradient for a logit
    of        the largest gradient for a logit
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import numpy as np

from tpu_rl.algos.cispo import CispoConfig, cispo
from tpu_rl.algos.grpo import ADVANTAGES, GrpoConfig, grpo
from tpu_rl.algos.gspo import GspoConfig, gspo
from tpu_rl.algos.surrogates import SurrogatesConfig, surrogates
from tpu_rl.proofs import tiny
from tpu_rl.types import Algorithm, Role, Rollout, Sampling

FACTORIES: dict[type, Callable[..., Algorithm]] = {
    GrpoConfig: grpo,
    GspoConfig: gspo,
    CispoConfig: cispo,
    SurrogatesConfig: surrogates,
}
GROUPS, COMPLETIONS, PROMPT, LIMIT = 4, 4, 3, 7
OLD = "old_log_probs"


@dataclass(frozen=True)
class Case:
    """A loss or an advantage of a peer, and ours."""

    peer: str
    name: str
    ours: Any
    """Configuration of the algorithm."""
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    old: str = OLD
    """"near_log_probs": the policy but for a constant, where covariances of policy and old policy
    are the same."""
    note: str = ""
    kind: str = "loss"
    """"advantages": those of the batch are compared, and no loss."""
    arrays: dict[str, str] = field(default_factory=dict)
    """Further parameters of the peer's function -> the arrays that they get."""

    def sent(self) -> dict[str, Any]:
        """Return what the peer's process needs to know."""
        return {
            "peer": self.peer,
            "name": self.name,
            "kind": self.kind,
            "settings": self.settings,
            "arguments": self.arguments,
            "old": self.old,
            "arrays": self.arrays,
        } | ({"config": True} if self.name == "grpo_passk" else {})


def trl(loss_type: str, ours: Any, note: str = "", **settings: Any) -> Case:
    arguments = settings.pop("arguments", {})
    name = "GMPOTrainer" if loss_type == "GMPOTrainer" else "GRPOTrainer"
    return Case("trl", name, ours, {"loss_type": loss_type, **settings}, arguments, note=note)


def verl(name: str, ours: Any, note: str = "", old: str = OLD, **settings: Any) -> Case:
    return Case("verl", name, ours, settings, note=note, old=old)


def estimator(
    name: str, ours: Any, note: str = "", arrays: dict[str, str] | None = None, **settings: Any
) -> Case:
    kind = "advantages"
    return Case("verl", name, ours, settings, note=note, kind=kind, arrays=arrays or {})


def of_surrogates(name: str, **settings: Any) -> SurrogatesConfig:
    return SurrogatesConfig(surrogate=name, **settings)


SEQUENCE = {"importance_sampling_level": "sequence"}
WIDE = {"epsilon_low": 0.05, "epsilon_high": 0.1}
VERL_WIDE = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
OUR_WIDE = {"clip_low": 0.05, "clip_high": 0.1}
CASES = [
    trl("grpo", GrpoConfig(loss_aggregation="sequence_mean")),
    trl("dapo", GrpoConfig(clip_high=0.28), epsilon_high=0.28),
    trl("bnpo", GrpoConfig()),
    trl("dr_grpo", GrpoConfig(loss_aggregation="constant_length")),
    trl("dapo", GrpoConfig(dual_clip=1.3), arguments={"delta": 1.3}),
    trl("dapo", GrpoConfig(kl_loss_coef=0.1), "`use_bias_correction_kl`", beta=0.1),
    trl("dapo", GrpoConfig(entropy_coef=0.1), entropy_coef=0.1),
    trl("cispo", CispoConfig(clip_high=0.25), epsilon_high=1.25),
    trl("grpo", GspoConfig(**OUR_WIDE), **SEQUENCE, **WIDE),
    trl("luspo", GspoConfig(loss_aggregation="sequence_sum", **OUR_WIDE), **SEQUENCE, **WIDE),
    trl("sapo", of_surrogates("sapo", loss_aggregation="sequence_mean")),
    trl("vespo", of_surrogates("vespo")),
    trl(
        "GMPOTrainer",
        of_surrogates("gmpo", loss_aggregation="sequence_mean"),
        epsilon_low=0.4,
        epsilon_high=0.4,
    ),
    verl("vanilla", GrpoConfig()),
    verl("vanilla", GrpoConfig(dual_clip=1.3), clip_ratio_c=1.3),
    verl(
        "vanilla",
        GrpoConfig(loss_aggregation="sequence_mean"),
        loss_agg_mode="seq-mean-token-mean",
    ),
    verl(
        "vanilla", GrpoConfig(loss_aggregation="sequence_sum"), loss_agg_mode="seq-mean-token-sum"
    ),
    verl(
        "vanilla",
        GrpoConfig(loss_aggregation="constant_length"),
        loss_agg_mode="seq-mean-token-sum-norm",
    ),
    verl(
        "gspo",
        GspoConfig(importance_sampling_level="sequence_token", **OUR_WIDE),
        loss_agg_mode="seq-mean-token-mean",
        **VERL_WIDE,
    ),
    verl("cispo", CispoConfig(clip_low=0.2, clip_high=0.2)),
    verl(
        "sapo",
        of_surrogates("sapo", loss_aggregation="sequence_mean"),
        tau_pos=1.0,
        tau_neg=1.05,
    ),
    verl(
        "geo_mean",
        of_surrogates("gmpo", loss_aggregation="sequence_mean", clip_low=0.2, clip_high=0.2),
    ),
    verl(
        "dppo_tv",
        of_surrogates("dppo_tv", ratio_cap=1.3, clip_low=0.01, clip_high=0.01),
        clip_ratio_c=1.3,
        clip_ratio_low=0.01,
        clip_ratio_high=0.01,
    ),
    verl(
        "dppo_kl",
        of_surrogates("dppo_kl", ratio_cap=1.3, clip_low=1e-3, clip_high=1e-3),
        clip_ratio_c=1.3,
        clip_ratio_low=1e-3,
        clip_ratio_high=1e-3,
    ),
    verl("dro", of_surrogates("dro", beta=0.3), policy_loss={"dro_beta": 0.3}),
    verl("gpg", of_surrogates("gpg")),
    verl(
        "clip_cov",
        of_surrogates("clip_cov", covariance_share=0.9, covariance_low=0.2, covariance_high=1.5),
        "at the first update; all candidates dropped",
        "near_log_probs",
        policy_loss={"clip_cov_ratio": 0.9, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5},
    ),
    verl(
        "kl_cov",
        of_surrogates("kl_cov", covariance_share=0.2, covariance_kl_coef=0.5),
        "at the first update",
        "near_log_probs",
        policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
    ),
    estimator("grpo", GrpoConfig(advantages="group")),
    estimator("grpo", GrpoConfig(advantages="centered"), norm_adv_by_std_in_grpo=False),
    estimator("rloo", GrpoConfig(advantages="leave_one_out")),
    estimator("opo", GrpoConfig(advantages="opo")),
    estimator("grpo_passk", GrpoConfig(advantages="pass_at_k"), norm_adv_by_std_in_grpo=False),
    estimator(
        "grpo_passk", GrpoConfig(advantages="pass_at_k_scaled"), norm_adv_by_std_in_grpo=True
    ),
    estimator("gpg", GrpoConfig(advantages="gpg"), note="zeros are one whole group"),
    estimator(
        "optimal_token_baseline",
        GrpoConfig(credit="token", advantages="opo"),
        arrays={"old_log_probs": "log_probs", "sum_pi_squared": "sum_pi_squared"},
        handle_zero_tail=False,
    ),
]


def make_rollout() -> tuple[Rollout, dict[str, np.ndarray]]:
    """Return the batch, and the arrays of it that the peers need."""
    random = np.random.default_rng(0)
    rows = GROUPS * COMPLETIONS
    lengths = random.integers(2, LIMIT + 1, rows)
    lengths[0] = LIMIT
    group = np.repeat(np.arange(GROUPS), COMPLETIONS)
    columns = np.arange(PROMPT + LIMIT)
    prompts = group[:, None] * PROMPT + np.arange(PROMPT)
    completions = GROUPS * PROMPT + np.arange(rows * LIMIT).reshape(rows, LIMIT)
    vocabulary = GROUPS * PROMPT + rows * LIMIT
    mask = (columns >= PROMPT) & (columns < PROMPT + lengths[:, None])
    tokens = np.where(mask | (columns < PROMPT), np.concatenate([prompts, completions], axis=1), 0)
    returns = random.choice([0.5, 1.0, 2.5], rows)
    returns[-COMPLETIONS:] = 0.0
    last = columns == PROMPT + lengths[:, None] - 1
    tables = {name: random.normal(size=(vocabulary, vocabulary)) for name in ("table", "reference")}
    # Logits near each other, so that ratios are, too.
    tables["reference"] = tables["table"] + 0.2 * tables["reference"]
    previous = tokens[:, PROMPT - 1 : -1]
    completion_ids = tokens[:, PROMPT:]

    def log_probs_under(table: np.ndarray) -> np.ndarray:
        logits = table[previous]
        shifted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(shifted, completion_ids[..., None], -1)[..., 0]

    log_probs = log_probs_under(tables["table"])
    probs = np.exp(tables["table"][previous])
    probs /= probs.sum(-1, keepdims=True)
    arrays = {
        "table": tables["table"],
        "reference_table": tables["reference"],
        "previous": previous,
        "completion_ids": completion_ids,
        "mask": mask[:, PROMPT:].astype(np.float64),
        "rewards": (last * returns[:, None])[:, PROMPT:],
        "group": group,
        "old_log_probs": log_probs + 0.3 * random.normal(size=log_probs.shape),
        "near_log_probs": log_probs - 0.01,
        "log_probs": log_probs,
        "sum_pi_squared": np.square(probs).sum(-1),
        "reference_log_probs": log_probs_under(tables["reference"]),
    }
    lengths_and_scores = (jnp.asarray(returns), jnp.asarray(group), jnp.asarray(lengths))
    arrays["advantages"] = np.asarray(ADVANTAGES["group"](*lengths_and_scores))
    arrays["lengths"] = lengths
    arrays["returns"] = returns
    rollout = tiny.rollout(groups=[(PROMPT, [LIMIT] * COMPLETIONS)] * GROUPS)
    rollout = replace(
        rollout,
        tokens=jnp.asarray(tokens, jnp.int32),
        action_mask=jnp.asarray(mask),
        rewards=jnp.asarray(last * returns[:, None]),
        truncated=jnp.zeros(rows, bool),
    )
    return rollout, arrays


def table_roles() -> dict[str, Role]:
    """Return policy and reference, each a table of logits."""
    return {
        name: Role(
            lambda params, rows, name=name: params[name][rows.tokens],
            lambda params, hidden: hidden,
        )
        for name in ("policy", "reference")
    }


def our_batch(case: Case, rollout: Rollout, arrays: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """Return our algorithm, its params, its batch and the layout of that."""
    old = np.zeros(rollout.tokens.shape)
    old[:, PROMPT:] = arrays[case.old]
    old = jnp.where(rollout.action_mask, jnp.asarray(old), 0.0)
    rollout = replace(rollout, log_probs=old, behaviour_log_probs=old)
    experience = tiny.experience(rollout, row_length=48, micro_batch_rows=1)
    params = {
        "policy": jnp.asarray(arrays["table"]),
        "reference": jnp.asarray(arrays["reference_table"]),
    }
    sampling = Sampling(temperature=1.0, max_new_tokens=LIMIT)
    algorithm = FACTORIES[type(case.ours)](case.ours, table_roles(), sampling)
    batch, _ = algorithm.make_batch(experience, params, None)
    return algorithm, params, batch, experience[1]


def our_loss(case: Case, rollout: Rollout, arrays: dict[str, np.ndarray]) -> tuple[float, Any]:
    """Return our loss and its gradient for the policy's table."""
    algorithm, params, batch, _ = our_batch(case, rollout, arrays)

    def loss(table: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for number in range(batch.action_mask.shape[1]):
            micro_batch = jax.tree.map(lambda x, number=number: x[0, number], batch)
            total += algorithm.loss(params | {"policy": table}, micro_batch)[0]
        return total

    value, gradient = jax.value_and_grad(loss)(params["policy"])
    return float(value), np.asarray(gradient)


def our_advantages(case: Case, rollout: Rollout, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return our advantages at the completions' tokens."""
    _, _, batch, layout = our_batch(case, rollout, arrays)
    values = np.asarray(layout.unpack(batch.advantages))[:, PROMPT:]
    return np.where(arrays["mask"] > 0, values, 0.0)


def flags(case: Any) -> str:
    """Return the flags that differ from the defaults of our method."""
    config = case.ours
    method = FACTORIES[type(config)].__name__
    changed = [
        f"--algorithm.{name.replace('_', '-')} {'' if value is True else as_written(value)}".strip()
        for name, value in vars(config).items()
        if value != getattr(type(config)(), name)
    ]
    return f"`{' '.join([f'--algorithm {method}', *changed])}`"


def as_written(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def name_there(case: Case) -> str:
    """Return what the peer calls it, with its settings."""
    settings = case.settings | case.arguments
    nested = settings.pop("policy_loss", {})
    text = ", ".join(f"{key} {value}" for key, value in (settings | nested).items())
    kind = {"advantages": "adv_estimator ", "loss": "loss_mode "}[case.kind]
    name = case.name if case.peer == "trl" else f"{kind}{case.name}"
    details = [part for part in (f"`{text}`" if text else "", case.note) if part]
    return f"{'TRL' if case.peer == 'trl' else 'verl'} `{name}`" + "".join(
        f", {part}" for part in details
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trl", required=True, help="interpreter of an environment with trl")
    parser.add_argument("--verl", help="folder verl of verl's source")
    parser.add_argument("--to", type=Path, help="file that gets the table; default: print only")
    arguments = parser.parse_args()
    if arguments.verl and not Path(arguments.verl, "trainer/ppo/core_algos.py").exists():
        parser.error(f"--verl {arguments.verl}: no trainer/ppo/core_algos.py there")
    cases = [case for case in CASES if case.peer == "trl" or arguments.verl]
    rollout, arrays = make_rollout()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "arrays.npz", **arrays)
        sent = json.dumps([case.sent() for case in cases])
        (folder / "cases.json").write_text(sent, encoding="utf-8")
        program = str(HERE / "engines" / "peer_objectives.py")
        command = [arguments.trl, program, str(folder)]
        subprocess.run(command + ([arguments.verl] if arguments.verl else []), check=True)
        results = dict(np.load(folder / "results.npz"))
    lines = ["| there | here | value | gradient | of |", "|---|---|---|---|---|"]
    for number, case in enumerate(cases):
        there = results[f"{number}_value"]
        cells = [name_there(case), flags(case)]
        if case.kind == "advantages":
            ours = our_advantages(case, rollout, arrays)
            cells += [f"{np.abs(ours - there).max():.0e}", "", ""]
        else:
            gradient = results[f"{number}_gradient"]
            loss, our_gradient = our_loss(case, rollout, arrays)
            difference = np.abs(our_gradient - gradient).max()
            cells += [
                f"{abs(loss - there):.0e}",
                f"{difference:.0e}",
                f"{np.abs(gradient).max():.2g}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.to:
        arguments.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
