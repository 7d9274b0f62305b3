"""Public benchmarks: tasks of lm-evaluation-harness, whose model is our sampler and our log-probs.

The package `lm-eval` (0.4.13) reads tasks, makes prompts and judges answers. It asks the model for

    loglikelihood            log p(continuation | context), and whether it is what greedy decoding
                             writes
    loglikelihood_rolling    log p(text), in windows of the longest length that the model reads
    generate_until           a completion up to a stop string

Texts are encoded as its class HFLM does: a context that ends with spaces gives them to the
continuation, and both are encoded as one text. What is too long loses its beginning.

With chat templates, the harness makes conversations, few-shot examples as earlier turns. Their
texts are those of the model's template, in which control tokens are recognized, as HFLM does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_rl import sampler
from tpu_rl.errors import InputError, MachineError, did_you_mean, missing_file, refused
from tpu_rl.evaluation import intervals
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.rollout.prompts import stop_at
from tpu_rl.sampler import SamplerConfig, Score
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params, Policy, Purpose

MOST_NEW_TOKENS = 256
"""Tokens of a completion, if the task does not say."""
MOST_AT_ONCE = 32
"""Completions that are decoded at once."""
RESAMPLES = 1000
"""Of the harness, for the standard errors of measures that are no means."""


class HarnessModel(NamedTuple):
    """A model as the harness uses it."""

    policy: Policy
    params: Params
    """The params that the policy reads."""
    mesh: Mesh
    score: Score
    tokenizer: Tokenizer
    vocab_size: int
    """Rows of the embedding."""
    max_length: int
    """Tokens of a text."""


def load_tasks(names: Sequence[str]) -> Any:
    """Return the manager of the harness, which knows all these tasks, and their own names.

    Args:
        names: tasks of the harness, or YAML files of one task each.

    Raises:
        InputError: if there is no such task.
        MachineError: if lm-eval is not installed.
    """
    import yaml

    with refused(
        ImportError,
        "tasks of lm-evaluation-harness need the package lm-eval, which is not installed",
        fix='pip install "tpu_rl[lm-eval]"',
        kind=MachineError,
    ):
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    class Loader(yaml.SafeLoader):
        """Reads any tag, as !function, as nothing: only the name is wanted here."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    own_names = {}
    for file in files:
        if not file.is_file():
            raise missing_file("there is no such task file", file, f"--tasks {file}")
        about = yaml.load(file.read_text(encoding="utf-8"), Loader)
        if not isinstance(about, dict) or not isinstance(about.get("task"), str):
            raise InputError(
                "the file describes no task", where=str(file), fix="give it the key `task`, a name"
            )
        own_names[str(file)] = about["task"]
    folders = sorted({str(file.absolute().parent) for file in files})
    manager = TaskManager(include_path=folders or None)
    chosen = [own_names.get(name, name) for name in names]
    for name in chosen:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise InputError(
                f"lm-eval has no task {name!r}",
                where="--tasks",
                fix=f"{near} Or give a YAML file of your own".lstrip(),
            )
    return manager, chosen


def evaluate(
    model: HarnessModel,
    tasks: Any,
    limit: int | None = None,
    seed: int = 0,
    apply_chat_template: bool = False,
) -> dict[str, Estimate]:
    """Return each measure of each task, as "TASK MEASURE", with its 95 % interval.

    Args:
        limit: examples of a task; None is all of them.
        seed: of samples, for tasks that draw them.
        apply_chat_template: ask by conversations. Otherwise the model continues texts.

    Raises:
        InputError: if the data of a task cannot be read, or a task asks for what is not here.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]

    manager, names = tasks
    # What the library that reads data sets raises has no common type.
    with refused(
        Exception,
        "the data of a task cannot be read",
        where=f"--tasks {' '.join(names)}",
        fix="most tasks download their data: run once with a network, or use a YAML file of "
        "your own with `dataset_path: json`",
    ):
        manager.load(names)
    results = lm_eval.simple_evaluate(
        _as_lm(model, seed, apply_chat_template),
        tasks=names,
        task_manager=manager,
        limit=limit,
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=apply_chat_template,
        log_samples=False,
        bootstrap_iters=RESAMPLES,
    )
    assert results is not None
    return _estimates(results)


def _estimates(results: Mapping[str, Any]) -> dict[str, Estimate]:
    estimates = {}
    for task, values in results["results"].items():
        n = results["n-samples"].get(task, {}).get("effective", 0)
        for key, value in values.items():
            name, _, rule = key.partition(",")
            if name.endswith("_stderr") or isinstance(value, str) or not rule:
                continue
            error = values.get(f"{name}_stderr,{rule}")
            half = intervals.NORMAL_95 * error if isinstance(error, (int, float)) else math.nan
            low = value - half
            high = value + half
            # The standard error of a share of n: its interval is as everywhere here.
            if n > 1 and 0 <= value <= 1:
                of_share = math.sqrt(value * (1 - value) / (n - 1))
                if math.isclose(half, intervals.NORMAL_95 * of_share, rel_tol=1e-6, abs_tol=1e-9):
                    low, high = intervals.share_interval(value * n, n)
            label = " ".join([task, name, *([] if rule == "none" else [rule])])
            estimates[label] = Estimate(float(value), low, high, n)
    return estimates


def as_metrics(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return estimates as metrics, four of each."""
    metrics = {}
    for label, estimate in estimates.items():
        name = f"eval/{'/'.join(label.split())}"
        has_interval = math.isfinite(estimate.low)
        metrics |= estimate.as_metrics(name) if has_interval else {name: estimate.value}
    return metrics


def require_chat_template(tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer cannot render conversations."""
    if not tokenizer.has_chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            where="--apply-chat-template",
            why="only a chat template turns the examples of a task into conversations",
            fix="leave the flag out, or give --tokenizer.chat-template FILE",
        )


def _as_lm(model: HarnessModel, seed: int, is_chat: bool) -> Any:
    """Return the model as the class that the harness asks."""
    from lm_eval import utils  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

    tokenizer = model.tokenizer

    class Harness(TemplateLM):
        """Answers the harness."""

        eot_token_id = tokenizer.eos_ids[0]  # pyright: ignore[reportAssignmentType]
        prefix_token_id = [tokenizer.eos_ids[0], *tokenizer.prefix_ids][-1]
        tokenizer_name = "tpu_rl"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            if is_chat:  # The template writes the beginning of the sequence.
                return tokenizer.encode(string, special=True)
            prefix = [] if add_special_tokens is False else tokenizer.prefix_ids
            return [*prefix, *tokenizer.encode(string)]

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            messages = [dict(message) for message in chat_history]
            prefill = "" if add_generation_prompt else messages.pop()["content"]
            return tokenizer.render_text(messages, prefill)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return tokenizer.chat_template or ""

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
        ) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return likelihoods(model, pairs)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            results = []
            for request in requests:
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=model.max_length,
                    context_len=1,
                )
                pairs = [utils.make_disjoint_window(window) for window in windows]
                results.append(sum(value for value, _ in likelihoods(model, pairs)))
            return results

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts: list[str] = [""] * len(requests)
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(index)
            for indices in groups.values():
                prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
                settings = dict(requests[indices[0]].args[1])
                completions = complete(model, prompts, settings, seed)
                for index, text in zip(indices, completions, strict=True):
                    texts[index] = text
            return texts

    return Harness()


def likelihoods(
    model: HarnessModel, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Return log p(continuation | context) of pairs of token ids, and whether it is greedy.

    The model reads all tokens but the last. Longer contexts lose their beginning.
    """
    texts = [
        [*context, *continuation][-(model.max_length + 1) :] for context, continuation in pairs
    ]
    results = []
    for text, scores, (_, continuation) in zip(texts, model.score(texts, 1), pairs, strict=True):
        count = len(continuation)
        if count >= len(text) or not count:
            raise InputError(
                f"a continuation has {count} tokens after a text of {len(text) - count}",
                where="--tasks",
                why=f"the model reads at most {model.max_length} tokens",
                fix="give a larger --max-length, or leave the task out",
            )
        is_greedy = scores.top_ids[-count:, 0].tolist() == text[-count:]
        results.append((float(scores.log_probs[-count:].sum(dtype=np.float64)), is_greedy))
    return results


def complete(
    model: HarnessModel, prompts: Sequence[list[int]], settings: dict[str, Any], seed: int
) -> list[str]:
    """Return a completion of each prompt, up to the first stop string.

    Args:
        prompts: token ids. Long ones lose their beginning.
        settings: the keys of a task's `generation_kwargs`.
        seed: of samples.
    """
    tokenizer = model.tokenizer
    until = settings.pop("until", None) or []
    stops = [until] if isinstance(until, str) else [text for text in until if text]
    most_tokens = settings.pop("max_gen_toks", settings.pop("max_new_tokens", MOST_NEW_TOKENS))
    limit = min(int(most_tokens), model.max_length - 1)
    temperature = float(settings.pop("temperature", 0.0) or 0.0)
    if not settings.pop("do_sample", temperature > 0):
        temperature = 0.0
    cuts = {name: settings.pop(name, None) for name in ("top_k", "top_p", "min_p")}
    if settings:
        raise InputError(
            f"a task asks for {next(iter(settings))} when it samples",
            where="--tasks, generation_kwargs",
            why="only until, max_gen_toks, do_sample, temperature, top_k, top_p and min_p are here",
            fix="leave the task out, or the key out of a copy of its YAML file",
        )
    read = [prompt[-(model.max_length - limit) :] for prompt in prompts]
    longest = 1 << (max(map(len, read)) - 1).bit_length()
    config = SamplerConfig(
        max_new_tokens=limit,
        temperature=temperature,
        top_k=cuts["top_k"] or None,
        top_p=None if cuts["top_p"] in (None, 1) else cuts["top_p"],
        min_p=cuts["min_p"] or None,
        logit_bias=tuple((i, -math.inf) for i in range(tokenizer.vocab_size, model.vocab_size)),
        stop_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        max_num_seqs=MOST_AT_ONCE,
        prompt_length=min(longest, model.max_length - limit),
    )
    key = sampler.run_key(seed, Purpose.EVALUATION, 0)
    at_stop = stop_at(tokenizer, stops)
    with jax.set_mesh(model.mesh):
        rollout = sampler.sample(
            model.policy, model.params, read, key, config, mesh=model.mesh, stop_at=at_stop
        )
    texts = []
    for tokens, sampled in zip(rollout.tokens, rollout.action_mask, strict=True):
        text = tokenizer.decode(tokens[sampled].tolist())
        places = [text.index(stop) for stop in stops if stop in text]
        texts.append(text[: min(places, default=None)])
    return texts
