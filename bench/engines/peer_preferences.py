"""The losses of preferences of TRL on arrays of bench/preferences_against_trl.py.

    python bench/engines/peer_preferences.py FOLDER

It runs in an environment with torch and trl. FOLDER holds arrays.npz and cases.json; it gets
results.npz. The functions are methods of TRL's trainers, on objects that were not initialized.
"""

from __future__ import annotations

import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_objectives import distributions


class Outputs(types.SimpleNamespace):
    """What a model of TRL returns: values of the tokens after the first, [B, T]."""


def outputs_of(table: torch.Tensor, arrays: Any) -> Outputs:
    """Return log-probs of completions, 0 elsewhere, and the log of the sum of squares."""
    mask = torch.tensor(arrays["mask"])
    log_probs, _ = distributions(table, arrays)
    logits = torch.log_softmax(table[torch.tensor(arrays["previous"])], -1)
    squares = torch.logsumexp(2 * logits, -1)
    # The others are read for metrics only.
    zeros = dict.fromkeys(("entropy", "mean_logits", "is_top1"), torch.zeros_like(mask).bool())
    return Outputs(log_probs=log_probs * mask, log_sum_sq_probs=squares, **zeros)


def trainer_of(kind: type, settings: dict[str, Any], **attributes: Any) -> Any:
    """Return a trainer with these attributes, which was not initialized."""
    trainer = object.__new__(kind)
    one = {"gather": lambda x: x, "gather_for_metrics": lambda x: x}
    accelerator = types.SimpleNamespace(device="cpu", **one)
    vars(trainer).update(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        beta=0.1,
        label_smoothing=0.0,
        **attributes,
    )
    vars(trainer).update(settings)
    return trainer


def inputs_of(arrays: Any, order: np.ndarray) -> dict[str, torch.Tensor]:
    """Return a batch with one column before the completions."""
    mask = torch.nn.functional.pad(torch.tensor(arrays["mask"][order]), (1, 0)).long()
    return {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}


def dpo(case: dict[str, Any], arrays: Any, table: torch.Tensor) -> torch.Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    settings = dict(case["settings"])
    names = settings.pop("loss_type")
    trainer = trainer_of(
        DPOTrainer,
        settings,
        loss_types=names,
        loss_weights=settings.pop("loss_weights", [1.0] * len(names)),
        args=types.SimpleNamespace(discopop_tau=0.05),
        ld_alpha=settings.pop("ld_alpha", None),
        f_divergence_type=settings.pop("f_divergence_type", "reverse_kl"),
        f_alpha_divergence_coef=settings.pop("f_alpha_divergence_coef", 0.5),
        use_weighting=settings.pop("use_weighting", False),
    )
    chosen, rejected = arrays["chosen"], arrays["rejected"]
    order = np.concatenate([chosen, rejected])
    outputs = outputs_of(table, {name: arrays[name][order] for name in TOKENS})
    counts = np.ones_like(arrays["mask"])
    if trainer.ld_alpha is not None:
        # TRL's own precomputed sums have the tail's weight, too.
        shorter = np.minimum(arrays["lengths"][chosen], arrays["lengths"][rejected])
        is_tail = np.arange(counts.shape[1]) >= np.repeat(shorter, 2)[:, None]
        counts = np.where(is_tail, trainer.ld_alpha, 1.0)
    sums = (arrays["reference_log_probs"] * arrays["mask"] * counts).sum(-1)
    inputs = inputs_of(arrays, order) | {
        "ref_chosen_logps": torch.tensor(sums[chosen]),
        "ref_rejected_logps": torch.tensor(sums[rejected]),
    }
    return trainer._compute_loss(lambda **_: outputs, inputs, False)


def kto(case: dict[str, Any], arrays: Any, table: torch.Tensor) -> torch.Tensor:
    from trl.trainer.kto_trainer import KTOTrainer

    settings = {"desirable_weight": 1.0, "undesirable_weight": 1.0} | case["settings"]
    settings["calculate_KL"] = settings["loss_type"] == "kto"
    outputs = outputs_of(table, arrays)
    sums = (arrays["reference_log_probs"] * arrays["mask"]).sum(-1)
    mismatched = {**arrays, **{name: arrays[f"other_{name}"] for name in TOKENS}}
    others = [
        outputs_of(t, mismatched).log_probs.sum(-1).detach()
        for t in (table, torch.tensor(arrays["reference_table"]))
    ]
    trainer = trainer_of(KTOTrainer, settings, _compute_kl_logps=lambda *_: others[0])
    inputs = inputs_of(arrays, np.arange(len(sums))) | {
        "label": torch.tensor(arrays["label"]),
        "ref_logps": torch.tensor(sums),
        "ref_KL_logps": others[1],
    }
    return trainer._compute_loss(lambda **_: outputs, inputs, False)


def without_reference(case: dict[str, Any], arrays: Any, table: torch.Tensor) -> torch.Tensor:
    """Return the mean of CPO's or ORPO's loss of pairs."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    settings = {"alpha": 0.0, "simpo_gamma": 0.5, "loss_type": "sigmoid"} | case["settings"]
    kind = {"CPOTrainer": CPOTrainer, "ORPOTrainer": ORPOTrainer}[case["name"]]
    trainer = trainer_of(kind, settings)
    sums = outputs_of(table, arrays).log_probs.sum(-1)
    if settings["loss_type"] in ("simpo", "ipo") or kind is ORPOTrainer:
        sums = sums / torch.tensor(arrays["lengths"])
    pair = (sums[arrays["chosen"]], sums[arrays["rejected"]])
    if kind is ORPOTrainer:
        # ORPO's trainer subtracts this from the chosen completions' likelihood.
        return -pair[0].mean() - trainer.odds_ratio_loss(*pair)[0].mean()
    return trainer.cpo_loss(*pair)[0].mean()


TOKENS = ("previous", "completion_ids", "mask")
TRAINERS = {"DPOTrainer": dpo, "KTOTrainer": kto}


def main() -> None:
    folder = Path(sys.argv[1])
    arrays = dict(np.load(folder / "arrays.npz"))
    results = {}
    for number, case in enumerate(json.loads((folder / "cases.json").read_text(encoding="utf-8"))):
        table = torch.tensor(arrays["table"], requires_grad=True)
        loss = TRAINERS.get(case["name"], without_reference)(case, arrays, table)
        loss.backward()
        results[f"{number}_value"] = loss.detach().numpy()
        results[f"{number}_gradient"] = table.grad.numpy()
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main()
