"""The losses and advantages of TRL and verl on arrays of bench/objectives_against_peers.py.

    python bench/engines/peer_objectives.py FOLDER [VERL]

It runs in an environment with torch and trl. FOLDER holds arrays.npz and cases.json; it gets
results.npz. The functions are the peers' own: methods of TRL's trainers on an object that was not
initialized, and verl's `core_algos` from the folder VERL of its source, with its own helpers, and
with stand-ins for what it imports beyond them (Ray, tensordict, configurations).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

HELPERS = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")


class Settings(dict):
    """Attributes and items, None where there are none."""

    __getattr__ = dict.get


class ActorConfig(Settings):
    """Stands for verl's class of that name."""


class AlgoConfig(Settings):
    """Stands for verl's class of that name."""


def load(path: Path, name: str, functions: tuple[str, ...] = ()) -> types.ModuleType:
    """Run a file as a module, or only some of its functions."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if functions:
        vars(module).update(torch=torch)
        tree.body = [
            part
            for part in tree.body
            if isinstance(part, ast.FunctionDef) and part.name in functions
        ]
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def stand_in(name: str, **attributes: Any) -> types.ModuleType:
    """Register a package with these attributes."""
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def load_verl(folder: Path) -> types.ModuleType:
    """Load verl/trainer/ppo/core_algos.py from the folder verl/."""

    def undeprecated(*_: Any, **__: Any) -> Any:
        return lambda function: function

    utils = stand_in("verl.utils")
    stand_in("verl", utils=utils)
    stand_in("verl.utils.device", get_device_name=lambda: "cpu")
    stand_in("verl.utils.import_utils", deprecated=undeprecated)
    stand_in("verl.trainer")
    stand_in("verl.trainer.config", AlgoConfig=AlgoConfig)
    stand_in("verl.workers")
    stand_in("verl.workers.config", ActorConfig=ActorConfig)
    if importlib.util.find_spec("omegaconf") is None:
        stand_in("omegaconf", DictConfig=Settings)
    groupwise = load(folder / "utils" / "groupwise.py", "verl.utils.groupwise")
    utils.as_torch_index = groupwise.as_torch_index
    utils.group_mean_std = groupwise.group_mean_std
    functional = folder / "utils" / "torch_functional.py"
    utils.torch_functional = load(functional, "verl.utils.torch_functional", HELPERS)
    return load(folder / "trainer" / "ppo" / "core_algos.py", "verl_core_algos")


def distributions(table: torch.Tensor, arrays: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of the completions' tokens and the entropies, [B, C]."""
    logits = torch.log_softmax(table[torch.tensor(arrays["previous"])], -1)
    ids = torch.tensor(arrays["completion_ids"])[..., None]
    return logits.gather(-1, ids)[..., 0], -(logits.exp() * logits).sum(-1)


def trl_loss(case: dict[str, Any], arrays: Any, table: torch.Tensor) -> torch.Tensor:
    """Return the loss of a TRL trainer's `_compute_loss`."""
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
    } | case.get("settings", {})
    arguments = {
        "delta": None,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    } | case.get("arguments", {})
    one_process = types.SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    trainer = object.__new__(GMPOTrainer if case["name"] == "GMPOTrainer" else GRPOTrainer)
    vars(trainer).update(
        settings,
        args=types.SimpleNamespace(**arguments),
        accelerator=one_process,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=arrays["completion_ids"].shape[1],
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (*distributions(table, arrays), None),
    )
    mask = torch.tensor(arrays["mask"])
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.tensor(arrays["completion_ids"]),
        "completion_mask": mask,
        "advantages": torch.tensor(arrays["advantages"]),
        "old_per_token_logps": torch.tensor(arrays[case["old"]]),
        "ref_per_token_logps": torch.tensor(arrays["reference_log_probs"]),
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(None, inputs)


def verl_loss(
    verl: types.ModuleType, case: dict[str, Any], arrays: Any, table: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a function of verl's registry."""
    settings = dict(case.get("settings", {}))
    aggregation = settings.pop("loss_agg_mode", "token-mean")
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}
    policy_loss = Settings(settings.pop("policy_loss", {}))
    config = ActorConfig(clip | settings, policy_loss=policy_loss)
    # Divides in the aggregation seq-mean-token-sum-norm, and nowhere else.
    config["global_batch_info"] = {"loss_scale_factor": arrays["completion_ids"].shape[1]}
    log_probs, _ = distributions(table, arrays)
    mask = torch.tensor(arrays["mask"])
    advantages = torch.tensor(arrays["advantages"])[:, None] * mask
    function = verl.get_policy_loss_fn(case["name"])
    old_log_probs = torch.tensor(arrays[case["old"]])
    torch.manual_seed(0)
    return function(old_log_probs, log_probs, advantages, mask, aggregation, config, None)[0]


def verl_advantages(verl: types.ModuleType, case: dict[str, Any], arrays: Any) -> torch.Tensor:
    """Return the advantages of an estimator of verl, [B, C]."""
    mask = torch.tensor(arrays["mask"])
    settings = dict(case.get("settings", {}))
    function = verl.get_adv_estimator_fn(case["name"])
    extra = {name: torch.tensor(arrays[array]) for name, array in case["arrays"].items()}
    rewards = torch.tensor(arrays["rewards"])
    index = arrays["group"]
    config = AlgoConfig(settings)
    keywords = {} if "config" in case else settings
    return function(rewards, mask, index=index, config=config, **keywords, **extra)[0]


def main() -> None:
    folder = Path(sys.argv[1])
    verl = load_verl(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    arrays = dict(np.load(folder / "arrays.npz"))
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    results = {}
    for number, case in enumerate(cases):
        if case["peer"] == "verl" and verl is None:
            continue
        table = torch.tensor(arrays["table"], requires_grad=True)
        if case["kind"] == "advantages":
            assert verl is not None
            results[f"{number}_value"] = verl_advantages(verl, case, arrays).numpy()
            continue
        if case["peer"] == "trl":
            loss = trl_loss(case, arrays, table)
        else:
            assert verl is not None
            loss = verl_loss(verl, case, arrays, table)
        loss.backward()
        results[f"{number}_value"] = loss.detach().numpy()
        results[f"{number}_gradient"] = table.grad.numpy()
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main()
