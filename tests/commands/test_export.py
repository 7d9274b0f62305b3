"""launch/export.py: the dtype and the size of files, the model card, and the upload to the hub."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
import yaml
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from tpu_rl import models, tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands import finish, run
from tpu_rl.commands.config import FileData
from tpu_rl.commands.tools import export, model_card
from tpu_rl.errors import InputError
from tpu_rl.tasks import arithmetic

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of one step on a model whose files are in bfloat16. Its rows and reward are files."""
    path = tmp_path_factory.mktemp("secret-place")
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | SIZES)
    params = jax.jit(model.init)(jax.random.key(0))
    models.save(path / "tiny-base", model, params, tokenizer, dtype="bfloat16")
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(1, 40)]
    data = path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "odd.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [len(text) % 2 for text in completions]\n"
    )
    flags = [
        "sft",
        f"--model.path={path / 'tiny-base'}",
        f"--data.path={data}",
        f"--run-dir={path / 'run'}",
        "--steps=1",
        "--batch.prompts=2",
        "--batch.row-length=128",
        "--sampling.max-prompt-tokens=16",
        "--sampling.max-new-tokens=8",
        "--reward",
        f"{path / 'odd.py'}:length",
        "--evaluation.rows=6",
        "--optimizer.learning-rate=1e-2",
        "--optimizer.warmup-steps=0",
    ]
    assert run.main(flags) == 0
    return path / "run"


def metadata_of(card: str) -> dict[str, Any]:
    """Return the metadata at the top of a card."""
    start, text, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(text)


def cells_of(card: str) -> dict[str, list[str]]:
    """Return first cell -> other cells of the rows of all tables."""
    rows = [line.strip("|").split("|") for line in card.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.nightly
def test_the_dtype_is_that_of_the_base_unless_another_is_given(run_dir, tmp_path, capsys):
    trained = models.load(run_dir / "model")[1]
    for flags, dtype in (([], "bfloat16"), (["--dtype", "float32"], "float32")):
        target = tmp_path / dtype
        assert export.main([str(run_dir), "--to", str(target), *flags]) == 0
        assert f"in {dtype}" in capsys.readouterr().out
        assert models.file_dtype(target) == dtype
        for loaded, leaf in zip(
            jax.tree.leaves(models.load(target)[1]), jax.tree.leaves(trained), strict=True
        ):
            np.testing.assert_array_equal(loaded, leaf.astype(dtype).astype("float32"))


@pytest.mark.nightly
def test_random_weights_have_no_dtype_but_their_own(run_dir):
    config = configuration.load(run_dir / "config.yaml")
    assert export.base_dtype(config, "policy") == "bfloat16"
    random = replace(config, model=replace(config.model, random_init=True))
    assert export.base_dtype(random, "policy") == "float32"


@pytest.mark.slow
def test_files_are_at_most_as_large_as_wanted(run_dir, tmp_path):
    target = tmp_path / "parts"
    flags = ["--dtype", "float32", "--max-shard-size", "0.02MB"]
    assert export.main([str(run_dir), "--to", str(target), *flags]) == 0
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 24_000
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    expected = models.load(run_dir / "model")[1]
    jax.tree.map(np.testing.assert_array_equal, models.load(target)[1], expected)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("2GiB", 2**31), ("1.5 mb", 1_500_000), ("300KB", 300_000)],
)
def test_sizes(text, size):
    assert export.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5", "-1GB", "0GB", "5 elephants", "1e3MB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="is no size of a file"):
        export.parse_size(text)


# --- the model card ---


@pytest.mark.slow
def test_the_card_tells_what_the_run_was(run_dir, tmp_path):
    target = tmp_path / "model"
    assert export.main([str(run_dir), "--to", str(target)]) == 0
    card = (target / "README.md").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    cells = cells_of(card)
    assert card.count("# tiny-base, trained with supervised fine-tuning") == 1
    assert metadata_of(card) == {"library_name": "transformers", "tags": ["tpu_rl", "sft"]}
    assert cells["base model"] == ["tiny-base"]
    assert cells["data"] == ["rows.jsonl"]
    assert cells["rewards"] == ["odd.py:length"]
    assert cells["steps"] == ["1"]
    assert cells["optimizer"] == ["adamw, learning rate 0.01"]
    assert cells["weights"] == ["bfloat16"]
    for name, read in (
        ("accuracy, sampled", lambda result: result),
        ("accuracy, greedy", lambda result: result["greedy"]),
    ):
        before, after, problems = cells[name]
        for cell, when in ((before, "before"), (after, "after")):
            result = read(summary["eval"][when])
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            wanted = [100 * result[key] for key in ("accuracy", "low", "high")]
            np.testing.assert_allclose(numbers, wanted, atol=0.051)
        assert problems == str(read(summary["eval"]["after"])["n"])
    assert cells["jax"] == [jax.__version__] == [summary["versions"]["jax"]]
    assert "AutoModelForCausalLM" in card
    assert "secret-place" not in card


def test_the_card_of_an_unfinished_run_has_the_evaluations_so_far(tmp_path):
    rows = [
        {"step": step} | {f"eval/{name}": step / 100 for name in ("accuracy", "accuracy_low")}
        for step in (0, 4, 8)
    ]
    for row in rows:
        row |= {"eval/accuracy_high": 0.5, "eval/n": 10.0}
    lines = [json.dumps(row) + "\n" for row in (*rows[:2], {"step": 6}, rows[2])]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    results = model_card.read_results(tmp_path, 6)
    assert results["eval"]["before"]["accuracy"] == 0
    assert results["eval"]["after"] == {"accuracy": 0.04, "low": 0.04, "high": 0.5, "n": 10}
    assert results["versions"] == finish.versions()
    # A summary of another step does not count.
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 8, "eval": {}}))
    assert model_card.read_results(tmp_path, 6) == results
    assert model_card.read_results(tmp_path, 8)["eval"] == {}


def test_a_card_without_evaluations_says_so():
    assert model_card.results_of({}) == "The run was not evaluated on held-out problems."


def test_names_of_the_hub_are_in_the_metadata(run_dir):
    config = configuration.load(run_dir / "config.yaml")
    public = replace(
        config,
        model=replace(config.model, path="Qwen/Qwen2.5-0.5B"),
        data=FileData(path="openai/gsm8k", config="main"),
    )
    card = model_card.write_card(public, run_dir, 1, "policy", "bfloat16", adapter=True)
    assert metadata_of(card) == {
        "library_name": "peft",
        "tags": ["tpu_rl", "sft"],
        "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["openai/gsm8k"],
    }
    assert cells_of(card)["data"] == ["openai/gsm8k"]
    assert "AutoPeftModelForCausalLM" in card
    # A file of a folder that is not here looks like a name of the hub otherwise.
    assert not model_card.is_hub_name("data/train.jsonl")
    assert not model_card.is_hub_name("a/b/c")


def test_every_algorithm_has_a_name():
    for name in configuration.preset_names():
        config = configuration.preset(name)
        key = type(config.algorithm).__name__.removesuffix("Config")
        assert key in model_card.NAMES, name


# --- the hub ---


class FakeHub:
    """What huggingface_hub.HfApi would do, recorded."""

    calls: list[tuple[str, Any]] = []
    login_error: Exception | None = None
    upload_error: Exception | None = None

    def whoami(self) -> dict[str, str]:
        if self.login_error is not None:
            raise self.login_error
        return {"name": "owner"}

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        self.calls.append(("create_repo", (name, private)))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> None:
        if self.upload_error is not None:
            raise self.upload_error
        files = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload_folder", (repo_id, files, options["delete_patterns"])))


@pytest.fixture
def fake_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [])
    return FakeHub


@pytest.mark.slow
def test_a_model_is_uploaded_as_it_was_written(run_dir, tmp_path, fake_hub, capsys):
    target = tmp_path / "model"
    flags = ["--push-to-hub", "owner/tiny", "--private"]
    assert export.main([str(run_dir), "--to", str(target), *flags]) == 0
    assert "uploaded to https://huggingface.co/owner/tiny" in capsys.readouterr().out
    files = sorted(path.name for path in target.iterdir())
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert fake_hub.calls == [
        ("create_repo", ("owner/tiny", True)),
        # Weights of an earlier upload with other shards go.
        ("upload_folder", ("owner/tiny", files, ["*.safetensors", "*.safetensors.index.json"])),
    ]


@pytest.mark.parametrize("error", [OfflineModeIsEnabled("offline"), HTTPError("refused")])
def test_a_missing_login_is_noticed_before_anything_is_written(
    error, run_dir, tmp_path, fake_hub, monkeypatch, capsys
):
    monkeypatch.setattr(fake_hub, "login_error", error)
    target = tmp_path / "model"
    command = [str(run_dir), "--to", str(target), "--push-to-hub", "owner/tiny"]
    assert export.main(command) == 2
    assert "hf auth login" in capsys.readouterr().err
    assert not target.exists()
    assert not fake_hub.calls


@pytest.mark.slow
def test_a_failed_upload_leaves_the_model(run_dir, tmp_path, fake_hub, monkeypatch, capsys):
    monkeypatch.setattr(fake_hub, "upload_error", HTTPError("connection lost"))
    target = tmp_path / "model"
    command = [str(run_dir), "--to", str(target), "--push-to-hub", "owner/tiny"]
    assert export.main(command) == 3
    error = capsys.readouterr().err
    assert "connection lost" in error
    assert f"hf upload owner/tiny {target}" in error
    models.load(target)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--push-to-hub", "a/b/c"], "is no name of a repository"),
        (["--push-to-hub", "owner/na me"], "is no name of a repository"),
        (["--private"], "private does nothing without push_to_hub"),
        (["--max-shard-size", "large"], "'large' is no size of a file"),
        (["--adapter", "--dtype", "bfloat16"], "dtype does not go with adapter"),
        (["--adapter", "--max-shard-size", "1GB"], "max_shard_size does not go with adapter"),
    ],
)
def test_flags_are_checked_before_anything_is_loaded(
    flags, message, run_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(export, "load_run", None)
    assert export.main([str(run_dir), "--to", str(tmp_path / "model"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_of_a_local_base_is_not_uploaded(run_dir):
    config = configuration.load(run_dir / "config.yaml")
    lora = replace(config.model.lora, rank=2)
    adapted = replace(config, model=replace(config.model, lora=lora))
    with pytest.raises(InputError, match="a directory of this machine") as error:
        export.require_public_base(adapted, "policy")
    assert "drop --adapter" in error.value.fix
