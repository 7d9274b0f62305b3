"""Q#: its loss by hand, what it converges to, its rounds of data, and the program as a user runs it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import config, dataset, evaluate, q_examples, run
from launch.config import ExperimentConfig, Phase
from launch.q_examples import write
from tests import tiny
from tpu_rl import environments, guidance, tokenizers, training
from tpu_rl.algos import QSharpConfig, q_sharp
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.types import Model, QExamples

# --- the loss ----------------------------------------------------------------------------------------------------


def loss_of(settings: QSharpConfig, data: QExamples, roles, params) -> tuple[float, dict]:
    algorithm = q_sharp(settings, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    found = [jax.jit(algorithm.loss)(params, training.minibatch(training.minibatch(batch, 0), k)) for k in range(2)]
    metrics = training.add_up(jax.tree.map(lambda *x: jnp.stack(x), *[metrics for _, metrics in found]))
    return float(sum(value for value, _ in found)), training.reduce_metrics(metrics)


def plain_loss(settings: QSharpConfig, data: QExamples, model: Model, params) -> float:
    """A completion and a token at a time, from one forward a completion."""
    mask, returns, tokens = (np.asarray(x) for x in (data.action_mask, data.returns, data.tokens))
    learned = [np.flatnonzero(row)[: 1 if settings.prefixes == "single" else None] for row in mask]
    total, count = 0.0, sum(len(columns) > 0 for columns in learned)
    size = 1 if settings.histogram is None else settings.histogram.atoms
    positions = jnp.arange(tokens.shape[1])[None]
    for n, columns in enumerate(learned):
        hidden = model.hidden(params["q"], tokens[n : n + 1], positions, jnp.ones_like(positions), 0 * positions)
        outputs = np.asarray(model.logits(params["q"], hidden))[0]
        for t in columns:
            said = outputs[t] if settings.q_type == "v" else outputs[t - 1].reshape(-1, size)[tokens[n, t]]
            p, r = 1 / (1 + np.exp(-said[0])), returns[n, t]
            if settings.distribution == "bernoulli":
                loss = -r * np.log(p) - (1 - r) * np.log(1 - p)
            elif settings.distribution == "squared_error":
                loss = (p - r) ** 2
            else:
                loss = np.logaddexp.reduce(said) - said[round(r * (size - 1))]
            weight = 1 / (count * len(columns))
            if settings.weights == "token_mean":
                weight = 1 / sum(map(len, learned))
            total += weight * loss
    return total


@pytest.mark.parametrize(
    "settings",
    [
        QSharpConfig(),
        QSharpConfig(q_type="q", candidates=None, weights="token_mean"),
        QSharpConfig(distribution="squared_error", prefixes="single"),
        QSharpConfig(q_type="q", distribution="histogram", support=(0.0, 1.0, 5)),
    ],
)
def test_the_loss_is_its_formula(settings):
    with jax.enable_x64(True):
        roles, params = tiny.cast(settings.roles)
        spec = settings.roles["q"]
        model = tiny.attention_model(outputs=spec.outputs or (spec.outputs_per_token or 0) * tiny.VOCABULARY)
        data = tiny.q_examples()
        found, metrics = loss_of(settings, data, roles, params)
        np.testing.assert_allclose(found, plain_loss(settings, data, model, params), rtol=1e-6)
        assert float(metrics["q/loss"]) == pytest.approx(found, rel=1e-6)
        assert 0 < metrics["q/mean"] < 1
        assert 0 < metrics["q/accuracy"] < 1


def test_the_best_q_is_the_law_of_the_returns():
    """With an output for every token: at the share of ones among its labels the gradient is zero (token weights)."""
    data = tiny.q_examples()
    mask, tokens, returns = (np.asarray(x) for x in (data.action_mask, data.tokens, data.returns))
    ones, counts = (np.bincount(tokens[mask], weights=w, minlength=tiny.VOCABULARY) for w in (returns[mask], None))
    share = ones / np.maximum(counts, 1)
    mixed = (share > 0) & (share < 1)
    assert mixed.sum() >= 5
    logits = np.where(mixed, np.log(np.where(mixed, share, 0.5)) - np.log1p(-np.where(mixed, share, 0.5)), 0)

    def hidden(params, tokens, positions, segment_ids, branch_ids):
        del positions, segment_ids, branch_ids
        return params["table"][tokens]

    table = Model("table", None, hidden, lambda params, h: h, None, None, None)  # pyright: ignore
    algorithm = q_sharp(QSharpConfig(weights="token_mean"), {"q": tiny.role(table, "q")}, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), {}, ())
    micro_batches = [training.minibatch(training.minibatch(batch, 0), k) for k in range(2)]

    def gradient(logits: np.ndarray) -> np.ndarray:
        params = {"q": {"table": jnp.asarray(logits)[:, None]}}
        parts = [jax.grad(lambda p, b: algorithm.loss(p, b)[0])(params, b) for b in micro_batches]
        return np.asarray(sum(part["q"]["table"] for part in parts))[:, 0]

    with jax.enable_x64(True):
        assert np.abs(gradient(logits)[mixed]).max() < 1e-9
        assert np.abs(gradient(logits + 0.1)[mixed]).min() > 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"kl_coef": 0.0}, {"support": (1.0, 0.0, 11)}, {"support": (0.0, 1.0, 1)}, {"candidates": None}, {"prompts": 0}],
)
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(InputError, match="Q#"):
        QSharpConfig(**changes)


# --- the order of examples ---------------------------------------------------------------------------------------


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    places = np.arange(30)
    drawn = np.concatenate([q_examples.shuffled(places[i : i + 4], 10, (0, 1)) for i in range(0, 30, 4)])
    epochs = drawn[:30].reshape(3, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.broadcast_to(np.arange(10), (3, 10)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(q_examples.shuffled(places, 10, (0, 2)), drawn[:30])


# --- the program -------------------------------------------------------------------------------------------------


def small(run_dir: Path, **changes) -> ExperimentConfig:
    """Two rounds of two steps each, on few examples."""
    one = config.preset("arithmetic_q_sharp")
    algorithm = replace(one.algorithm, prompts=12, kl_coef=0.05)
    return replace(
        one,
        algorithm=algorithm,
        phases=(Phase(algorithm, until=2, forget=("q",)),),
        batch=replace(one.batch, prompts=2, completions=4, micro_batch_rows=4),
        evaluation=replace(one.evaluation, rows=8, every=2, greedy=False),
        sampling=replace(one.sampling, max_new_tokens=24),
        optimizer=replace(one.optimizer, learning_rate=1e-2, schedule="constant", warmup_steps=0),
        steps=4,
        checkpoint_every=1,
        run_dir=str(run_dir),
        **changes,
    )


def start(one: ExperimentConfig, *flags: str) -> int:
    """Runs the configuration as a user's config.yaml."""
    file = Path(one.run_dir).with_suffix(".yaml")
    config.save(one, file)
    return run.main([str(file), "--run-dir", one.run_dir, *flags])


def digest(one: ExperimentConfig) -> str:
    return json.loads((Path(one.run_dir) / "summary.json").read_text())["params_digest"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> ExperimentConfig:
    """A finished run that nothing interrupted."""
    one = small(tmp_path_factory.mktemp("q_sharp") / "whole")
    assert start(one) == 0
    return one


def round_of(one: ExperimentConfig, number: int) -> q_examples.Round:
    return q_examples.read(Path(one.run_dir) / "examples" / f"round_{number}.npz")[0]


def test_examples_are_cut_completed_and_scored(whole):
    """Each ends as the sampler ends completions, its return is its text's reward, and no prompt earns one return."""
    tokenizer = tokenizers.load(str(Path(whole.run_dir) / "model"))
    for number in (1, 2):
        found, earned = round_of(whole, number), {}
        assert len(found.ends) % 4 == 0
        for tokens, first, end, value in zip(*found[:4], strict=True):
            text = tokenizer.decode(tokens[:end].tolist())
            prompt, _, completion = text.partition("=")
            assert environments.split_of(prompt) == "train"
            assert value == (environments.parse(completion) == environments.evaluate(prompt))
            assert len(tokenizer.encode_prompt(prompt + "=")) <= first < end
            assert tokens[end - 1] in tokenizer.eos_ids or end - len(tokenizer.encode_prompt(prompt + "=")) == 24
            assert not np.any(tokens[end:] != tokenizer.pad_id)
            earned.setdefault(prompt, []).append(value)
        assert all(0 < np.mean(values) < 1 for values in earned.values())
        measured = json.loads(str(found.metrics))
        assert measured["q/dropped_groups"] == 12 - len(earned)


def test_metrics_of_a_run(whole):
    rows = [json.loads(line) for line in (Path(whole.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("q/round") for row in rows] == [None, 1, None, 2, None]
    assert all({"q/loss", "q/mean", "q/accuracy", "q/examples", "q/epoch"} <= row.keys() for row in rows[1:])
    assert rows[3]["q/examples"] == len(round_of(whole, 1).ends) + len(round_of(whole, 2).ends)
    # Begun again: a new head says one half of everything.
    assert rows[3]["q/loss"] == pytest.approx(np.log(2), abs=0.05)
    assert {"accuracy", "low", "high", "n"} <= json.loads((Path(whole.run_dir) / "summary.json").read_text())["eval"][
        "before"
    ].keys()


@pytest.mark.slow
def test_a_run_interrupted_at_and_after_the_border_of_rounds_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    """Before the second round is collected, and inside it; what it is rolled in with is what the first one learned."""
    apart = small(tmp_path / "apart")
    collect, heads = q_examples.collect, {}

    def interrupted(setup, stage, params, number):
        heads[number] = np.array(params["q"]["score"])
        if number == 2:
            # The save of step 2 goes on in the background; within one process nothing else would wait for it.
            saved, deadline = Path(apart.run_dir) / "checkpoints" / "2", time.monotonic() + 60
            while not saved.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise KeyboardInterrupt
        return collect(setup, stage, params, number)

    with monkeypatch.context() as patch:
        patch.setattr(q_examples, "collect", interrupted)
        assert start(apart) == run.INTERRUPTED
    assert not (Path(apart.run_dir) / "examples" / "round_2.npz").exists()
    assert np.abs(heads[2] - heads[1]).max() > 1e-3  # forgotten only after the roll-in
    assert start(apart, "--steps", "3") == 0
    with monkeypatch.context() as patch:
        patch.setattr(q_examples, "collect", interrupted)  # inside the round nothing is collected again
        assert start(apart, "--steps", "4") == 0
    for number in (1, 2):
        jax.tree.map(np.testing.assert_array_equal, round_of(apart, number), round_of(whole, number))
    assert digest(apart) == digest(whole)

    file = Path(apart.run_dir) / "examples" / "round_1.npz"
    other = round_of(apart, 1)
    q_examples.write(file, other._replace(returns=1 - other.returns))
    assert start(apart, "--steps", "5") == DamagedDataError.code
    file.write_bytes(file.read_bytes()[:200])
    assert start(apart, "--steps", "5") == DamagedDataError.code


@pytest.mark.slow
def test_evaluate_guides_a_model_at_each_coefficient(whole, capsys):
    flags = ["--guide", whole.run_dir, "--kl-coef", "inf", "0.05", "--baseline", "cd", "--rows", "12"]
    assert evaluate.main(["builtin:arithmetic", *flags, "--samples", "3"]) == 0
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    found = {(line[0], line[1]): line[2:] for line in lines}
    assert list(found) == [("reference", ""), ("Q#", "inf"), ("Q#", "0.05"), ("CD", "inf"), ("CD", "0.05")]
    # Without guidance the same completions, hence the same figures, at KL 0.
    assert found["reference", ""] == found["Q#", "inf"] == found["CD", "inf"]
    assert float(found["Q#", "inf"][3]) == 0
    assert float(found["Q#", "0.05"][3]) > 0
    assert "before any truncation" in " ".join(printed.split())
    assert "best of 3 by q" in printed
    assert "maj@3 weighted by q" in printed
    guided = json.loads((Path(whole.run_dir) / "guided.json").read_text())
    assert [line["name"] for line in guided["lines"]] == ["reference", "Q#", "Q#", "CD", "CD"]
    assert "<h2>Guided</h2>" in (Path(whole.run_dir) / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--guide", "no/such/run"], "not a run folder"),
        (["--guide", "RUN", "--kl-coef", "0"], "above 0"),
    ],
)
def test_bad_guides_are_one_message_and_code_2(whole, capsys, flags, message):
    flags = [flag.replace("RUN", whole.run_dir) for flag in flags]
    assert evaluate.main(["builtin:arithmetic", *flags]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_learn_from_is_said(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def same(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n")
    one = small(tmp_path / "run", reward=(f"{tmp_path / 'reward.py'}:same",))
    assert start(one) == 2
    assert "nothing to learn from in round 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_round_that_no_checkpoint_rests_on_is_collected_again_where_a_reward_was_mended(tmp_path, monkeypatch):
    file = tmp_path / "reward.py"
    text = "def parity(prompts, completions, **columns):\n    return [float(len(c) % 2 == {}) for c in completions]\n"
    file.write_text(text.format(0))
    one = small(tmp_path / "run", reward=(f"{file}:parity",))

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.states, "save", stopped)  # after the first step's metrics
        assert start(one) == run.INTERRUPTED
    first = round_of(one, 1)
    collected = []
    monkeypatch.setattr(q_examples, "write", lambda path, round_: collected.append(path.name) or write(path, round_))
    with monkeypatch.context() as patch:
        patch.setattr(run.states, "save", stopped)
        assert start(one) == run.INTERRUPTED
    assert not collected
    file.write_text(text.format(1))
    assert start(one, "--steps", "3") == 0
    assert collected == ["round_1.npz", "round_2.npz"]
    np.testing.assert_array_equal(round_of(one, 1).returns, 1 - first.returns)


def test_a_file_of_prompts_is_enough(tmp_path):
    """The model's own completions are learned from: none are asked of the data."""
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(20)))
    one = replace(config.preset("arithmetic_q_sharp"), data=config.FileData(path=str(file)))
    rows = dataset.train_rows(one, one.algorithm.needs)
    assert rows[3] == {"prompt": "3+1=", "answer": "4"}


def test_returns_beyond_what_the_distribution_knows_are_refused():
    with pytest.raises(InputError, match="beyond 0 to 1"):
        q_examples.check_returns(QSharpConfig(), np.array([0.0, 2.0]))
    q_examples.check_returns(QSharpConfig(distribution="histogram", support=(-1, 2, 4)), np.array([-1.0, 2.0]))


def test_q_as_a_reward_model_reads_the_last_token():
    """The same number as one forward of q over each text, V- and Q-type."""
    tokens, ends = np.array([[3, 1, 4, 1, 5, 0], [9, 2, 6, 0, 0, 0]]), np.array([5, 3])
    for reads, support in (("own", None), ("previous", guidance.Support(0, 1, 3))):
        size = 1 if support is None else 3 * tiny.VOCABULARY
        model = tiny.attention_model(outputs=size)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), model.init(jax.random.key(0)))
        q = tiny.Policy(model.init_cache, model.extend)
        found = guidance.last_return(q, support, reads, params, jnp.asarray(tokens), jnp.asarray(ends))
        positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(positions), 0 * positions)
        outputs = model.logits(params, hidden)
        for row in range(2):
            if reads == "own":
                expected = jax.nn.sigmoid(outputs[row, ends[row] - 1, 0])
            else:
                law = outputs[row, ends[row] - 2].reshape(-1, 3)[tokens[row, ends[row] - 1]]
                expected = jax.nn.softmax(law) @ jnp.array([0, 0.5, 1])
            assert found[row] == pytest.approx(float(expected), abs=1e-5)
