"""Ids beyond the embedding are refused, and runs that learned nothing do not end well."""

import dataclasses
import json

import pytest
from PIL import Image

from tests.fixtures.picture_model import picture_tokenizer
from tpu_rl import tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands import finish, roles
from tpu_rl.commands.checks import preflight, row_checks
from tpu_rl.commands.config import SamplingConfig
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import TokenizerConfig

TEMPLATE = "{% for m in messages %}<bos>{{ m.content }}<eos>{% endfor %}"


def with_template(template):
    tokenizer = tokenizers.characters("abc", chat_template=template)
    return tokenizers.configure(tokenizer, TokenizerConfig())


def test_tokens_without_a_row_in_the_embedding():
    tokenizer = with_template(TEMPLATE)
    assert preflight.check_embedding(tokenizer, 7) == []
    for rows, refused in ((1, "<eos>, <bos>"), (2, "<eos>")):
        with pytest.raises(InputError, match=f"{refused} lie beyond the model's embedding"):
            preflight.check_embedding(tokenizer, rows)
    with_pad = dataclasses.replace(tokenizer, control=tokenizer.control | {"<pad>": 99})
    assert preflight.check_embedding(with_pad, 7) == ["control tokens beyond the embedding: <pad>"]


def test_settings_of_a_model_that_its_samples_do_not_follow_are_named(tmp_path):
    def note(settings: dict, **flags: float) -> str:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        return preflight.ignored_generation_settings(tmp_path, SamplingConfig(**flags))

    qwen = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    assert "(temperature 0.7, top_p 0.8, repetition_penalty 1.05)" in note(qwen)
    assert note(qwen).endswith(
        "--sampling.temperature, --sampling.top-p, --sampling.repetition-penalty"
    )
    assert "(temperature 0.7, repetition_penalty 1.05)" in note(qwen, top_p=0.9)
    assert "(repetition_penalty 1.05)" in note(qwen | {"do_sample": False})
    assert note({"suppress_tokens": [3]}).endswith("(suppress_tokens)")
    assert note({"eos_token_id": 2, "temperature": 1.0, "top_k": 0, "top_p": 1}) == ""


def test_text_that_the_tokenizer_does_not_know_is_named(tmp_path):
    """Every character of it would be one token, and all prompts of a length the same."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1+2=", "1 + 2")))
    flags = ["--model.path", "builtin:arithmetic", "--data.path", str(file)]
    config = configuration.parse(["grpo", *flags])
    tokenizer = tokenizers.load(roles.model_path("builtin:arithmetic"))
    (warning,) = row_checks.check(config, tokenizer, 100)
    assert (
        "22.22% of the tokens of the first 2 rows are unknown to the tokenizer (<unk>)" in warning
    )


@pytest.mark.parametrize(
    ("reward", "flags", "unread"),
    [
        ("math", [], "context, id"),  # SQuAD: the passage that the question is about
        ("{file}:score", [], ""),
        ("majority(of=math)", [], ""),
        (
            "math",
            ["--rollout.likelihood.coef", "1", "--rollout.likelihood.column", "context"],
            "id",
        ),
    ],
)
def test_columns_that_built_in_rewards_do_not_read_are_named(
    tmp_path, capsys, reward, flags, unread
):
    file = tmp_path / "rows.jsonl"
    row = {"id": "a", "context": "Ann is here", "question": "Who?", "answer": "Ann"}
    file.write_text(json.dumps(row))
    data = ["--model.path", "builtin:arithmetic", "--data.path", str(file)]
    reward = reward.format(file=tmp_path / "mine.py")
    config = configuration.parse(
        ["grpo", *data, "--data.columns", "prompt=question", "--reward", reward, *flags]
    )
    row_checks.check(config, tokenizers.load(roles.model_path("builtin:arithmetic")), 100)
    said = capsys.readouterr().err
    assert (f"nothing reads: {unread}\n" in said) if unread else "nothing reads" not in said


TOOL = {"type": "function", "function": {"name": "get_price", "parameters": {}}}


@pytest.mark.parametrize(
    ("system", "tools", "repeats"),
    [
        (f"Use <tools>{json.dumps([TOOL])}</tools>", [TOOL], True),
        (f"Use <tools>{json.dumps([TOOL])}</tools>", None, False),
        ("Use get_price.", [TOOL], False),
        (f"Use {json.dumps([TOOL])}", [TOOL, {"function": {"name": "other"}}], False),
    ],
)
def test_tools_in_the_system_message_and_in_their_column_are_named(system, tools, repeats):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    row = {"messages": messages, "tools": tools}
    assert row_checks._repeats_tools(row) == repeats


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"optim/skipped": 1.0}] * 2, "every step was skipped"),
        ([{"optim/skipped": 0.0, "optim/grad_norm": 0.0}] * 10, "the gradient was 0"),
        ([{"optim/skipped": 0.0, "optim/grad_norm": 0.0}, {"optim/skipped": 1.0}] * 5, "gradient"),
        ([{"optim/skipped": 0.0, "optim/grad_norm": 0.0}] * 2, ""),
        ([{"optim/skipped": 1.0}, {"optim/skipped": 0.0, "optim/grad_norm": 0.1}], ""),
        ([{"eval/loss": 1.0}], ""),
    ],
)
def test_a_run_that_learned_nothing_fails(tmp_path, rows, reason):
    lines = [json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    if reason:
        with pytest.raises(InputError, match=reason):
            finish.require_learned(tmp_path)
    else:
        finish.require_learned(tmp_path)


def test_q_sharp_refuses_rows_with_images_before_the_run(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<image>red?", "images": ["a.png"], "answer": "1"}))
    flags = ["--model.path", "builtin:pictures", "--data.path", str(file), "--reward", "pictures"]
    tokenizer = picture_tokenizer()
    assert tokenizer.images is not None
    reader = dataclasses.replace(tokenizer.images, folder=str(tmp_path))
    tokenizer = dataclasses.replace(tokenizer, images=reader)
    with pytest.raises(InputError, match="images are not read") as error:
        row_checks.check(configuration.parse(["q_sharp", *flags]), tokenizer, 46)
    assert "rows.jsonl:1" in error.value.where
    row_checks.check(configuration.parse(["ppo", *flags]), tokenizer, 46)


def test_pictures_tags_and_choices_that_the_model_does_not_see_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "<image>which one?", "image_path": "a.png", "choices": ["red", "blue"]}
    file.write_text(json.dumps(row | {"answer": "A"}))
    flags = ["--model.path", "builtin:pictures", "--data.path", str(file), "--reward", "choice"]
    hiding, tags, pictures = row_checks.check(
        configuration.parse(["grpo", *flags]), picture_tokenizer(), 46
    )[-3:]
    assert "1 of 1 rows have choices that their prompt does not show" in hiding
    assert "the model reads tags of images as letters: <image> (1) of 1 rows" in tags
    assert "image_path (1) of 1 rows" in pictures
    assert "--data.columns images=image_path" in pictures
