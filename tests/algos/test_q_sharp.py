"""Q#: its loss by hand, what it converges to, its rounds of data, and the program as a user runs
it."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures.runs import digest, small_q_sharp
from tpu_rl import tokenizers
from tpu_rl.algos import QSharpConfig, q_sharp
from tpu_rl.commands import config, run
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.evaluate import evaluate, evaluate_q_sharp
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.evaluation import intervals
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.sources import q_examples
from tpu_rl.losses.return_distributions import Support
from tpu_rl.proofs import tiny
from tpu_rl.sampler import guided_policy
from tpu_rl.studies import guided_accuracy
from tpu_rl.tasks import arithmetic
from tpu_rl.train import update_step
from tpu_rl.types import Array, Model, QExamples, Rollout

# --- the loss ---


def loss_of(settings: QSharpConfig, data: QExamples, roles, params) -> tuple[float, dict]:
    algorithm = q_sharp(settings, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    parts = [
        jax.jit(algorithm.loss)(params, update_step.minibatch(update_step.minibatch(batch, 0), k))
        for k in range(2)
    ]
    metrics = update_step.merge_metrics(
        jax.tree.map(lambda *x: jnp.stack(x), *[metrics for _, metrics in parts])
    )
    return float(sum(value for value, _ in parts)), update_step.reduce_metrics(metrics)


def plain_loss(settings: QSharpConfig, data: QExamples, model: Model, params) -> float:
    """A completion and a token at a time, from one forward a completion."""
    language = tiny.attention_model()
    mask, returns, tokens = (np.asarray(x) for x in (data.action_mask, data.returns, data.tokens))
    end = 1 if settings.prefixes == "single" else None
    learned = [np.flatnonzero(row)[settings.unlabeled_tokens :][:end] for row in mask]
    total, count = 0.0, sum(len(columns) > 0 for columns in learned)
    written = [np.flatnonzero(row)[1:] for row in mask]
    num_writers = sum(len(columns) > 0 for columns in written)
    size = 1 if settings.histogram is None else settings.histogram.atoms
    positions = jnp.arange(tokens.shape[1])[None]
    for n, columns in enumerate(learned):
        hidden = model.hidden(
            params["q"], tokens[n : n + 1], positions, jnp.ones_like(positions), 0 * positions
        )
        outputs = np.asarray(model.logits(params["q"], hidden))[0]
        for t in columns:
            said = (
                outputs[t]
                if settings.q_type == "v"
                else outputs[t - 1].reshape(-1, size)[tokens[n, t]]
            )
            p, r = 1 / (1 + np.exp(-said[0])), returns[n, t]
            if settings.distribution == "bernoulli":
                loss = -r * np.log(p) - (1 - r) * np.log(1 - p)
            elif settings.distribution == "squared_error":
                loss = (p - r) ** 2
            else:
                loss = np.logaddexp.reduce(said) - said[round(r * (size - 1))]
            weight = 1 / (count * len(columns))
            if settings.loss_aggregation == "token_mean":
                weight = 1 / sum(map(len, learned))
            total += weight * loss
        # What follows the first labeled token is predicted too, by the reference's unembedding.
        logits = np.asarray(language.logits(params["policy"], hidden))[0]
        for t in written[n]:
            loss = np.logaddexp.reduce(logits[t - 1]) - logits[t - 1, tokens[n, t]]
            weight = 1 / (num_writers * len(written[n]))
            if settings.loss_aggregation == "token_mean":
                weight = 1 / sum(map(len, written))
            for distance in range(2, settings.next_token_horizon + 1):
                head = tiny.attention_model(
                    outputs=tiny.VOCABULARY * (settings.next_token_horizon - 1)
                )
                every = np.asarray(head.logits(params["ahead"], hidden))[0]
                ahead = np.split(every, settings.next_token_horizon - 1, axis=-1)[distance - 2]
                state = ahead[max(t - distance, 0)]
                loss += np.logaddexp.reduce(state) - state[tokens[n, t]]
            total += settings.next_token_coef * weight * loss
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        QSharpConfig(loss_aggregation="sequence_mean", next_token_coef=0.3),
        QSharpConfig(q_type="q", candidates=None),
        QSharpConfig(roll_in="none", next_token_coef=0.3, next_token_horizon=3, unlabeled_tokens=1),
        QSharpConfig(distribution="squared_error", prefixes="single", next_token_coef=0.3),
        QSharpConfig(q_type="q", distribution="histogram", support=(0.0, 1.0, 5)),
    ],
)
def test_the_loss_is_its_formula(settings):
    with jax.enable_x64(True):
        roles, params = tiny.cast(settings.roles)
        spec = settings.roles["q"]
        model = tiny.attention_model(
            outputs=spec.outputs or (spec.outputs_per_token or 0) * tiny.VOCABULARY
        )
        data = tiny.q_examples()
        actual, metrics = loss_of(settings, data, roles, params)
        np.testing.assert_allclose(actual, plain_loss(settings, data, model, params), rtol=1e-6)
        of_next_tokens = settings.next_token_coef * sum(
            value for name, value in metrics.items() if name.startswith("q/next_token_loss")
        )
        assert float(metrics["q/loss"] + of_next_tokens) == pytest.approx(actual, rel=1e-6)
        assert 0 < metrics["q/mean"] < 1
        assert 0 < metrics["q/accuracy"] < 1


def test_the_best_q_is_the_law_of_the_returns():
    """With an output for every token: at the share of ones among its labels the gradient is zero
    (token weights)."""
    data = tiny.q_examples()
    mask, tokens, returns = (np.asarray(x) for x in (data.action_mask, data.tokens, data.returns))
    ones, counts = (
        np.bincount(tokens[mask], weights=w, minlength=tiny.VOCABULARY)
        for w in (returns[mask], None)
    )
    share = ones / np.maximum(counts, 1)
    mixed = (share > 0) & (share < 1)
    assert mixed.sum() >= 5
    logits = np.where(
        mixed, np.log(np.where(mixed, share, 0.5)) - np.log1p(-np.where(mixed, share, 0.5)), 0
    )

    def hidden(params, tokens, positions, segment_ids, branch_ids):
        del positions, segment_ids, branch_ids
        return params["table"][tokens]

    table = Model("table", None, hidden, lambda params, h: h, None, None, None)  # pyright: ignore
    algorithm = q_sharp(QSharpConfig(), {"q": tiny.role(table, "q")}, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), {}, ())
    micro_batches = [update_step.minibatch(update_step.minibatch(batch, 0), k) for k in range(2)]

    def gradient(logits: np.ndarray) -> np.ndarray:
        params = {"q": {"table": jnp.asarray(logits)[:, None]}}
        parts = [jax.grad(lambda p, b: algorithm.loss(p, b)[0])(params, b) for b in micro_batches]
        return np.asarray(sum(part["q"]["table"] for part in parts))[:, 0]

    with jax.enable_x64(True):
        assert np.abs(gradient(logits)[mixed]).max() < 1e-9
        assert np.abs(gradient(logits + 0.1)[mixed]).min() > 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.0},
        {"support": (1.0, 0.0, 11)},
        {"support": (0.0, 1.0, 1)},
        {"candidates": None},
        {"prompts": 0},
        {"next_token_coef": -0.1},
        {"next_token_horizon": 2},
        {"unlabeled_tokens": 1},
        {"candidate_mass": 0.0},
        {"candidate_mass": 1.5},
        {"candidate_mass": 0.9, "q_type": "q"},
    ],
)
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(InputError, match="Q#|must be|next_token_coef|roll_in|q_type|V-type"):
        QSharpConfig(**changes)


def test_a_next_token_loss_needs_the_references_own_layers():
    with pytest.raises(InputError, match="starts as another model"):
        QSharpConfig(next_token_coef=0.1, q_model="other/model")


# --- q against exact values ---


class AnswerTree:
    """A reference whose answers are the paths of a random tree, 2 to 7 tokens long.

    Node n is written as token n, so a token says which prefix it ends and q can be a table. A
    prompt is the root, token 0. Long answers earn more often, so weights that favor short ones are
    seen. It samples as a `Decoding` does.
    """

    DEPTH = 7

    def __init__(self, seed: int):
        random = np.random.default_rng(seed)
        self.children: list[list[int]] = [[]]
        self.chances: list[np.ndarray] = []
        self.rewards: list[float] = []
        depths = [0]
        # The list grows as it is read.
        for node, depth in enumerate(depths):
            is_leaf = depth == self.DEPTH or (depth > 1 and random.random() < 0.3)
            first = len(depths)
            self.children[node] = [] if is_leaf else [first, first + 1]
            depths += [depth + 1] * len(self.children[node])
            self.children += [[] for _ in self.children[node]]
            self.chances.append(random.dirichlet([4.0, 4.0]))
            self.rewards.append(float(random.random() < 0.2 + 0.6 * depth / self.DEPTH))
        self.config = SimpleNamespace(pad_id=len(depths), max_new_tokens=self.DEPTH)
        self.seed = seed

    def values(self) -> np.ndarray:
        """Return the exact mean return of each node."""
        values = np.array(self.rewards)
        for node in reversed(range(len(values))):
            if self.children[node]:
                values[node] = self.chances[node] @ values[self.children[node]]
        return values

    def sample(self, params, prompts, step, row_ids, limits=None) -> Rollout:
        """Continue each prompt to a leaf; a leaf is continued by itself once."""
        del params, limits
        random = np.random.default_rng([self.seed, step, int(row_ids[0])])
        tokens = np.full((len(prompts), 2 + self.DEPTH), self.config.pad_id, np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, prompt in enumerate(prompts):
            path = list(prompt)
            while len(path) == len(prompt) or self.children[path[-1]]:
                children = self.children[path[-1]] or [path[-1]]
                path.append(
                    children[int(random.random() > self.chances[path[-1]][0]) % len(children)]
                )
            tokens[row, : len(path)] = path
            mask[row, len(prompt) : len(path)] = True
        count = len(prompts)
        flags = np.zeros(count, bool)
        numbers = np.arange(count, dtype=np.int32)
        keys = np.zeros((count, 2), np.uint32)
        arrays: Any = (tokens, mask, mask, mask, mask, numbers, numbers, keys, flags, ~flags)
        return Rollout(*arrays)

    def examples(self, count: int) -> QExamples:
        """Return examples as the product makes them: an answer, cut, and continued."""
        decoding: Any = self
        row_ids = np.arange(count)
        answers = self.sample({}, [[0]] * count, 1, row_ids)
        texts, cuts = q_examples.cut_and_continue(decoding, {}, answers, 1, row_ids)
        tokens = np.asarray(texts.tokens)
        ends = np.sum(tokens != self.config.pad_id, axis=1)
        returns = np.array(self.rewards, np.float32)[tokens[row_ids, ends - 1]]
        nothing = np.asarray("")
        made = q_examples.Round(tokens, cuts, ends, returns, nothing, nothing)
        return q_examples.take(made, row_ids)


def trained_tables(
    aggregations: Sequence[Any], data: QExamples, num_tokens: int
) -> list[np.ndarray]:
    """Return the q of each token, [num_tokens]: a table of logits, trained with the loss.

    One table for each weighting of the tokens; all else is as by default.
    """

    def hidden(params, tokens, positions, segment_ids, branch_ids):
        del positions, segment_ids, branch_ids
        return params["table"][tokens]

    table = Model("table", None, hidden, lambda params, h: h, None, None, None)  # pyright: ignore
    roles = {"q": tiny.role(table, "q")}
    optimizer = optax.adam(optax.cosine_decay_schedule(0.5, 100))

    @jax.jit
    def train(batch) -> Array:
        loss = q_sharp(QSharpConfig(), roles, tiny.SAMPLING).loss

        def update(carry, _):
            params, state = carry
            gradient = jax.grad(lambda p: loss(p, batch)[0])(params)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        first: Any = {"q": {"table": jnp.zeros((num_tokens, 1))}}
        last: Any = jax.lax.scan(update, (first, optimizer.init(first)), length=100)[0]
        return jax.nn.sigmoid(last[0]["q"]["table"][:, 0])

    experience = tiny.experience(data, row_length=512, micro_batch_rows=128, minibatches=1)
    tables = []
    for aggregation in aggregations:
        settings = QSharpConfig(loss_aggregation=aggregation)
        batch, _ = q_sharp(settings, roles, tiny.SAMPLING).make_batch(experience, {}, ())
        assert batch.returns.shape[:2] == (1, 1)
        tables.append(np.asarray(train(jax.tree.map(lambda leaf: leaf[0, 0], batch))))
    return tables


@pytest.mark.slow
def test_q_is_exact_within_two_standard_errors_where_lengths_vary():
    """With the defaults. With the paper's weights a third of the nodes are further off."""
    tree = AnswerTree(seed=2)
    data = tree.examples(6000)
    values = tree.values()
    labeled = np.asarray(data.tokens)[np.asarray(data.action_mask)]
    counts = np.bincount(labeled, minlength=len(values))
    uncertain = (values > 0.02) & (values < 0.98) & (counts >= 100)
    assert uncertain.sum() >= 20

    deviations = np.sqrt(values * (1 - values) / np.maximum(counts, 1))[uncertain]
    aggregations = [QSharpConfig().loss_aggregation, "sequence_mean"]
    exact, biased = (
        np.abs(table[: len(values)] - values)[uncertain] / deviations
        for table in trained_tables(aggregations, data, len(values) + 1)
    )
    assert exact.max() < 2
    assert np.mean(biased > 2) > 0.25
    assert biased.max() > 4


# --- the order of examples ---


def test_examples_that_share_a_prompt_are_drawn_together_and_packed_once():
    spec = q_examples.RoundSpec(1, 1, 0, 6, (0.0, 1.0), "", together=3)
    drawn = np.concatenate([q_examples.drawn_rows(step, 12, spec) for step in range(2)])
    np.testing.assert_array_equal(np.sort(drawn), np.arange(12))
    assert all(np.array_equal(block % 3, [0, 1, 2]) for block in drawn.reshape(4, 3))
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 4], [1, 2, 6, 4], [1, 2, 7, 4]])
    first = np.array([3, 3, 3, 2, 2])
    np.testing.assert_array_equal(q_examples.prefix_ids(tokens, first), [0, 0, 1, 2, 2])


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    places = np.arange(30)
    drawn = np.concatenate(
        [q_examples.shuffled(places[i : i + 4], 10, (0, 1)) for i in range(0, 30, 4)]
    )
    epochs = drawn[:30].reshape(3, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.broadcast_to(np.arange(10), (3, 10)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(q_examples.shuffled(places, 10, (0, 2)), drawn[:30])


# --- the program ---


def start(experiment: ExperimentConfig, *flags: str) -> int:
    """Return the exit code of a run whose configuration is in a file."""
    file = Path(experiment.run_dir).with_suffix(".yaml")
    config.save(experiment, file)
    return run.main([str(file), "--run-dir", experiment.run_dir, *flags])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> ExperimentConfig:
    """A finished run that was not interrupted."""
    experiment = small_q_sharp(tmp_path_factory.mktemp("q_sharp") / "whole")
    assert start(experiment) == 0
    return experiment


def round_path(experiment: ExperimentConfig, number: int) -> Path:
    return Path(experiment.run_dir) / "examples" / f"round_{number}.npz"


def round_of(experiment: ExperimentConfig, number: int) -> q_examples.Round:
    return q_examples.read(round_path(experiment, number))[0]


@pytest.mark.nightly
def test_examples_are_cut_continued_and_scored(whole):
    """Each text ends as sampled completions do, its return is its reward, and the examples of a
    prompt differ in return."""
    tokenizer = tokenizers.load(str(Path(whole.run_dir) / "model"))
    for number in (1, 2):
        examples = round_of(whole, number)
        returns = {}
        assert len(examples.ends) % 4 == 0
        for tokens, first, end, value in zip(*examples[:4], strict=True):
            text = tokenizer.decode(tokens[:end].tolist())
            prompt, _, completion = text.partition("=")
            assert arithmetic.split_of(prompt) == "train"
            assert value == (arithmetic.parse_answer(completion) == arithmetic.evaluate(prompt))
            prompt_length = len(tokenizer.encode_prompt(prompt + "="))
            assert prompt_length <= first < end
            assert number == 2 or first == prompt_length
            assert tokens[end - 1] in tokenizer.eos_ids or end - prompt_length == 24
            assert not np.any(tokens[end:] != tokenizer.pad_id)
            returns.setdefault(prompt, []).append(value)
        assert all(0 < np.mean(values) < 1 for values in returns.values())
        metrics = json.loads(str(examples.metrics))
        assert metrics["q/dropped_groups"] == 12 - len(returns)


@pytest.mark.nightly
def test_metrics_of_a_run(whole):
    run_dir = Path(whole.run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("q/round") for row in rows] == [None, 1, None, 2, None]
    names = {"q/loss", "q/mean", "q/accuracy", "q/examples", "q/epoch"}
    assert all(names <= row.keys() for row in rows[1:])
    assert [("q/next_token_loss" in row) for row in rows] == [False, True, True, False, False]
    assert rows[3]["q/examples"] == len(round_of(whole, 1).ends) + len(round_of(whole, 2).ends)
    # The second round begins with a new head, which predicts one half everywhere.
    assert rows[3]["q/loss"] == pytest.approx(np.log(2), abs=0.05)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {"accuracy", "low", "high", "n"} <= summary["eval"]["before"].keys()


@pytest.mark.nightly
def test_resume_is_bit_exact_before_and_inside_the_second_round(whole, tmp_path, monkeypatch):
    """The examples of the second round are sampled with what the first one learned."""
    parts = small_q_sharp(tmp_path / "parts")
    collect = q_examples.collect
    heads = {}

    def interrupt_second_round(engine, rows, params, spec):
        heads[spec.number] = np.array(params["q"]["score"])
        if spec.number == 2:
            # Step 2 is saved in the background. In a single process nothing else waits for it.
            saved = Path(parts.run_dir) / "checkpoints" / "2"
            deadline = time.monotonic() + 60
            while not saved.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise KeyboardInterrupt
        return collect(engine, rows, params, spec)

    with monkeypatch.context() as patch:
        patch.setattr(q_examples, "collect", interrupt_second_round)
        assert start(parts) == run.INTERRUPTED
    assert not round_path(parts, 2).exists()
    # The head of the first round is forgotten only after the second has been sampled.
    assert np.abs(heads[2] - heads[1]).max() > 1e-3
    assert start(parts, "--steps", "3") == 0
    with monkeypatch.context() as patch:
        # A run that is resumed inside a round does not collect it again.
        patch.setattr(q_examples, "collect", interrupt_second_round)
        assert start(parts, "--steps", "4") == 0
    for number in (1, 2):
        jax.tree.map(
            np.testing.assert_array_equal, round_of(parts, number), round_of(whole, number)
        )
    assert digest(Path(parts.run_dir)) == digest(Path(whole.run_dir))

    file = round_path(parts, 1)
    original = round_of(parts, 1)
    q_examples.write(file, original._replace(returns=1 - original.returns))
    assert start(parts, "--steps", "5") == DamagedDataError.code
    file.write_bytes(file.read_bytes()[:200])
    assert start(parts, "--steps", "5") == DamagedDataError.code


@pytest.mark.nightly
def test_evaluate_guides_a_model_at_each_coefficient(whole, capsys):
    flags = [
        "--guide",
        whole.run_dir,
        "--kl-coef",
        "inf",
        "0.05",
        "--baseline",
        "cd",
        "--rows",
        "12",
        "--candidate-mass",
        "0.9",
    ]
    assert evaluate.main(["builtin:arithmetic", *flags, "--samples", "3"]) == 0
    printed = capsys.readouterr().out
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in printed.splitlines()
        if "│" in line
    ]
    actual = {(line[0], line[1]): line[2:] for line in lines}
    assert list(actual) == [
        ("reference", ""),
        ("Q#", "inf"),
        ("Q#", "0.05"),
        ("CD", "inf"),
        ("CD", "0.05"),
    ]
    # Without guidance the completions are the same, hence the same figures, at KL 0.
    assert actual["reference", ""] == actual["Q#", "inf"] == actual["CD", "inf"]
    assert float(actual["Q#", "inf"][3]) == 0
    assert float(actual["Q#", "0.05"][3]) > 0
    assert "before any truncation" in " ".join(printed.split())
    assert "best of 3 by q" in printed
    assert "maj@3 weighted by q" in printed
    guided = json.loads((Path(whole.run_dir) / "guided.json").read_text())
    assert [line["name"] for line in guided["lines"]] == ["reference", "Q#", "Q#", "CD", "CD"]
    for line in guided["lines"]:
        assert len(line["problem_accuracy"]) == len(line["problem_kl"]) == 12
        assert np.mean(line["problem_accuracy"]) == pytest.approx(line["accuracy"][0])
        assert np.mean(line["problem_kl"]) == pytest.approx(line["kl"], abs=1e-6)
    assert "<h2>Guidance</h2>" in (Path(whole.run_dir) / "report.html").read_text()


@pytest.mark.parametrize("is_graded", [True, False])
def test_the_mean_of_a_graded_reward_is_shown(is_graded, capsys):
    accuracy = intervals.Estimate(0.4, 0.3, 0.5, 8)
    reward = intervals.Estimate(0.62, 0.55, 0.69, 8) if is_graded else accuracy
    line = guided_accuracy.Line("reference", None, accuracy, reward, None, 0.0, 5.0, [], [])
    evaluate_q_sharp.report("title", [line], [], 1)
    printed = capsys.readouterr().out
    assert ("mean reward" in printed) == is_graded
    assert ("0.620" in printed) == is_graded
    assert "40.0 %" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--guide", "no/such/run"], "not a run folder"),
        (["--guide", "RUN", "--kl-coef", "0"], "above 0"),
        (["--guide", "RUN", "--candidate-mass", "0"], "above 0 and at most 1"),
        (["--candidate-mass", "0.9"], "without guide"),
    ],
)
@pytest.mark.nightly
def test_bad_guides_are_one_message_and_code_2(whole, capsys, flags, message):
    flags = [flag.replace("RUN", whole.run_dir) for flag in flags]
    assert evaluate.main(["builtin:arithmetic", *flags]) == 2
    assert message in capsys.readouterr().err


def collect_with_chance(chance: float, drop_equal_returns: bool, monkeypatch) -> np.ndarray:
    """Return the returns that a round keeps of 3,000 prompts, each solved with one chance."""
    prompts, group_size = 3000, 16
    rewards = np.random.default_rng(0).random(prompts * group_size) < chance
    count = len(rewards)
    rollout = SimpleNamespace(
        group_id=np.repeat(np.arange(prompts), group_size),
        action_mask=np.ones((count, 1), bool),
        tokens=np.zeros((count, 1), np.int32),
        episode_id=None,
    )
    scored = SimpleNamespace(rollout=rollout, rewards=rewards.astype(np.float32))
    sampled = SimpleNamespace(columns={q_examples.CUTS: np.zeros(count, np.int32)})
    engine: Any = SimpleNamespace(generate=lambda *_: sampled, score=lambda _: scored)
    monkeypatch.setattr(q_examples.records, "metrics", lambda _: {})
    spec = q_examples.RoundSpec(1, 1, 0, 8, (0.0, 1.0), "", drop_equal_returns)
    return q_examples.collect(engine, [{}] * prompts, {}, spec).returns


@pytest.mark.parametrize("chance", [0.02, 0.98])
def test_the_papers_filter_pulls_returns_to_the_middle_and_the_default_does_not(
    chance, monkeypatch
):
    returns = collect_with_chance(chance, False, monkeypatch)
    assert abs(returns.mean() - chance) < 3 * (chance * (1 - chance) / len(returns)) ** 0.5
    filtered = collect_with_chance(chance, True, monkeypatch)
    expected = (chance - chance**16) / (1 - chance**16 - (1 - chance) ** 16)
    assert abs(expected - chance) > 0.05
    assert abs(filtered.mean() - expected) < 0.01


def test_only_the_papers_filter_needs_groups():
    assert QSharpConfig().experience.smallest_group == 1
    assert QSharpConfig(drop_equal_returns=True).experience.smallest_group == 2


def test_examples_of_which_all_earn_the_same_are_refused(monkeypatch):
    for drop_equal_returns in (False, True):
        with pytest.raises(InputError, match="nothing to learn from"):
            collect_with_chance(0.0, drop_equal_returns, monkeypatch)


@pytest.mark.slow
def test_round_without_differing_rewards_is_an_input_error(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "def same(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n"
    )
    experiment = small_q_sharp(tmp_path / "run", reward=(f"{tmp_path / 'reward.py'}:same",))
    assert start(experiment) == 2
    printed = capsys.readouterr().err
    assert f"sampling examples of {experiment.algorithm.prompts} prompts for round 1" in printed
    assert "nothing to learn from in round 1" in printed


@pytest.mark.nightly
def test_round_without_a_checkpoint_is_collected_again_if_its_reward_changed(tmp_path, monkeypatch):
    file = tmp_path / "reward.py"
    program = (
        "def parity(prompts, completions, **columns):\n"
        "    return [float(len(c) % 2 == {}) for c in completions]\n"
    )
    file.write_text(program.format(0))
    experiment = small_q_sharp(tmp_path / "run", reward=(f"{file}:parity",))

    def interrupt(*arguments):
        raise KeyboardInterrupt

    def start_without_checkpoint() -> int:
        """Interrupt the run after the metrics of its first step."""
        with monkeypatch.context() as patch:
            patch.setattr(run.train_state_io, "save", interrupt)
            return start(experiment)

    assert start_without_checkpoint() == run.INTERRUPTED
    first = round_of(experiment, 1)
    write = q_examples.write
    written = []

    def write_and_note(path, round_):
        written.append(path.name)
        write(path, round_)

    monkeypatch.setattr(q_examples, "write", write_and_note)
    assert start_without_checkpoint() == run.INTERRUPTED
    assert not written
    file.write_text(program.format(1))
    assert start(experiment, "--steps", "3") == 0
    assert written == ["round_1.npz", "round_2.npz"]
    np.testing.assert_array_equal(round_of(experiment, 1).returns, 1 - first.returns)


def test_data_need_no_completions(tmp_path):
    """Q# learns from the model's own completions."""
    file = tmp_path / "problems.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(20))
    )
    experiment = replace(config.preset("arithmetic_q_sharp"), data=config.FileData(path=str(file)))
    rows = tasks.train_rows(
        experiment.data,
        experiment.algorithm.experience,
        seed=experiment.seed,
        num_held_out=experiment.evaluation.rows,
    )
    assert rows[3] == {"prompt": "3+1=", "answer": "4"}


def test_returns_beyond_what_the_distribution_knows_are_refused():
    with pytest.raises(InputError, match="beyond 0 to 1"):
        q_examples.check_returns(np.array([0.0, 2.0]), QSharpConfig().return_range)
    histogram = QSharpConfig(distribution="histogram", support=(-1, 2, 4))
    q_examples.check_returns(np.array([-1.0, 2.0]), histogram.return_range)


@pytest.mark.slow
def test_q_as_a_reward_model_reads_the_last_token():
    """The same number as one forward of q over each text, V- and Q-type."""
    tokens, ends = np.array([[3, 1, 4, 1, 5, 0], [9, 2, 6, 0, 0, 0]]), np.array([5, 3])
    for reads, support in (("own", None), ("previous", Support(0, 1, 3))):
        size = 1 if support is None else 3 * tiny.VOCABULARY
        model = tiny.attention_model(outputs=size)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), model.init(jax.random.key(0)))
        q = tiny.Policy(model.init_cache, model.extend)
        actual = guided_policy.last_return(
            q, support, reads, params, jnp.asarray(tokens), jnp.asarray(ends)
        )
        positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(positions), 0 * positions)
        outputs = model.logits(params, hidden)
        for row in range(2):
            if reads == "own":
                expected = jax.nn.sigmoid(outputs[row, ends[row] - 1, 0])
            else:
                law = outputs[row, ends[row] - 2].reshape(-1, 3)[tokens[row, ends[row] - 1]]
                expected = jax.nn.softmax(law) @ jnp.array([0, 0.5, 1])
            assert actual[row] == pytest.approx(float(expected), abs=1e-5)
