"""Public benchmarks: likelihoods equal transformers', and tasks of a file run without a network."""

import json
import math
from functools import partial

import numpy as np
import pytest

from tpu_rl import models, sampler, tokenizers
from tpu_rl.commands import compose
from tpu_rl.commands.config import MeshConfig
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.errors import InputError, MachineError
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.sampler import Scores
from tpu_rl.studies import harness

TOKENIZER = tokenizers.characters("abcdefgh .")
SIZE = TOKENIZER.vocab_size


def scored(texts, top):
    """Log-probs of a model that writes the next letter with probability 1 / 2."""
    found = []
    for text in texts:
        following = np.array(text[:-1]) + 1
        log_probs = np.where(np.array(text[1:]) == following, -1.0, -3.0)
        found.append(Scores(log_probs.astype("f4"), following[:, None], log_probs[:, None]))
    return found


def made(max_length=8):
    nothing: dict = {}
    return harness.HarnessModel(None, nothing, None, scored, TOKENIZER, SIZE, max_length)


def test_likelihoods_are_sums_over_the_continuation():
    a, b, c, d = TOKENIZER.encode("abcd")
    pairs = [([a], [b, c]), ([a, b], [d]), ([a, d], [a, b])]
    assert harness.likelihoods(made(), pairs) == [(-2.0, True), (-3.0, False), (-4.0, False)]


def test_long_contexts_lose_their_beginning_and_long_continuations_are_named():
    seen = []
    model = made(3)._replace(score=lambda texts, top: seen.extend(texts) or scored(texts, top))
    harness.likelihoods(model, [([5, 6, 7, 8, 9], [10])])
    assert seen == [[7, 8, 9, 10]]
    with pytest.raises(InputError, match="4 tokens"):
        harness.likelihoods(model, [([5], [6, 7, 8, 9])])


def test_estimates_have_intervals():
    found = {
        "results": {
            "t": {
                "alias": "t",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "f1,strict": 0.25,
                "f1_stderr,strict": "N/A",
                "share,none": 1.0,
                "share_stderr,none": 0.0,
            }
        },
        "n-samples": {"t": {"original": 20, "effective": 10}},
    }
    estimates = harness._estimates(found)
    half = 1.959963984540054 * 0.1
    assert estimates["t acc"] == Estimate(0.5, 0.5 - half, 0.5 + half, 10)
    assert math.isnan(estimates["t f1 strict"].low)
    # Ten of ten, by Wilson: n / (n + z^2).
    assert estimates["t share"].low == pytest.approx(10 / (10 + 1.959963984540054**2))
    metrics = harness.as_metrics(estimates)
    assert metrics["eval/t/f1/strict"] == 0.25
    assert metrics["eval/t/acc_high"] == 0.5 + half


def test_settings_of_samples_that_are_not_here_are_named():
    with pytest.raises(InputError, match="num_beams"):
        harness.complete(made(), [[5]], {"until": ["."], "num_beams": 4}, 0)


def test_flags_that_a_task_does_not_read_are_refused(capsys):
    flags = ["builtin:arithmetic", "--tasks", "arc_easy"]
    assert evaluate.main([*flags, "--samples", "4"]) == 2
    assert "tasks does not go with samples" in capsys.readouterr().err
    assert evaluate.main(["builtin:arithmetic", "--max-length", "64"]) == 2


TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]


def test_a_conversation_of_a_task_is_its_text_by_the_template():
    tokenizer = tokenizers.characters("abcdefgh<>u.", TEMPLATE)
    assert tokenizer.render_text(CHAT) == "<u>ab<eos><a>cd<eos><a>"
    assert tokenizer.render_text(CHAT[:1], "ef") == "<u>ab<eos><a>ef"
    ids = tokenizer.encode(tokenizer.render_text(CHAT[:1]), special=True)
    assert ids == tokenizer.encode_prompt(CHAT[:1])


def test_a_chat_template_needs_tasks_and_a_template(capsys):
    assert evaluate.main(["builtin:arithmetic", "--apply-chat-template"]) == 2
    assert "without tasks" in capsys.readouterr().err
    with pytest.raises(InputError, match="no chat template"):
        harness.require_chat_template(TOKENIZER)


def test_the_harness_asks_by_conversations():
    pytest.importorskip("lm_eval")
    tokenizer = tokenizers.characters("abcdefgh<>u.", TEMPLATE)
    asked = harness._as_lm(made()._replace(tokenizer=tokenizer), 0, is_chat=True)
    assert asked.chat_template(True) == TEMPLATE
    text = asked.apply_chat_template(CHAT, add_generation_prompt=False)
    assert text == "<u>ab<eos><a>cd"
    context, continuation = asked._encode_pair(text, "ef")
    assert tokenizer.decode(context, skip_special=False) == text
    assert continuation == tokenizer.encode("ef")


def test_without_the_package_its_name_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(MachineError, match="lm-eval"):
        harness.load_tasks(["arc_easy"])


@pytest.mark.slow
def test_scores_and_completions_are_those_of_transformers(tmp_path):
    """log-probs to 1e-4, the likeliest tokens, and greedy completions of a tiny random model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    theirs = transformers.LlamaForCausalLM(settings).eval()
    theirs.save_pretrained(tmp_path)
    model, params = models.load(tmp_path)
    mesh = compose.make_mesh(MeshConfig())
    score = partial(sampler.text_scorer(models.role(model, lambda tree: tree), mesh), params)
    random = np.random.default_rng(0)
    texts = [random.integers(4, SIZE, length).tolist() for length in (2, 5, 9, 40)]
    for text, scores in zip(texts, score(texts, 2), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([text])).logits[0, :-1]
        wanted = torch.log_softmax(logits, -1)
        chosen = wanted[range(len(text) - 1), text[1:]].numpy()
        np.testing.assert_allclose(scores.log_probs, chosen, atol=1e-4)
        values, ids = wanted.topk(2)
        np.testing.assert_array_equal(scores.top_ids, ids.numpy())
        np.testing.assert_allclose(scores.top_log_probs, values.numpy(), atol=1e-4)


TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
{more}
"""


@pytest.mark.slow
def test_a_task_of_a_file_runs_on_the_built_in_model(tmp_path, capsys, monkeypatch):
    """Sums that the shipped model answers: multiple choice and completions."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}+1=", "answer": 0, "choices": [str(n + 1), "0"]} for n in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    more = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
    file = tmp_path / "letters.yaml"
    file.write_text(TASK.format(data=data, kind="multiple_choice", more=more))
    assert evaluate.main(["builtin:arithmetic", "--tasks", str(file)]) == 0
    assert "letters acc" in capsys.readouterr().out
