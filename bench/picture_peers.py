"""GRPO on prompts with pictures by tpu_rl and by TRL: equal losses, and the time of a step.

    python bench/picture_peers.py --trl PYTHON --to FOLDER [--rounds 3] [--steps 5]
        [--parts loss step] [--pixels 32 112] [--arms ours trl "trl one thread"]

PYTHON is the interpreter of an environment with trl==1.16.0, torch and Pillow. Both libraries read
one Hugging Face directory: the model of the presets `pictures_sft` and `pictures_grpo` (LLaVA,
0.4 M parameters, CLIP tower included) with random weights and a chat template. Everything is
float32.

    loss  The same random completions of 3 to 12 tokens, 8 for each of 4 prompts, one of which has
          two pictures, with old log-probs near the policy's. Ours goes through the packed rows,
          where a prompt and its pictures stand once; TRL's through its own methods
          `_generate_and_score_completions` and `_compute_loss`, where they stand once for each
          completion. Advantages are not divided by the standard deviation, because TRL adds 1e-4
          to it and this library 1e-6. Prints the largest difference of log-probs, of the loss, and
          of the gradients of text, projector and tower, with their norms.
    step  GRPO, 8 prompts with a picture x 8 completions of 32 tokens; the time from step to step.
          Pictures of 32 pixels have 16 features in the text, and those of 112 pixels 196. In each
          round the arms run one after the other, in rotating order, each in its own process. The
          first two steps compile and do not count. Ours is launch/run.py itself, with logging.
          TRL runs with torch's threads as they are, and with one thread, which is faster if other
          work needs the cores. Prints medians, and the ratio of the medians of each round with
          its spread.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import arms
import jax
import numpy as np
import side_by_side
from safetensors.numpy import load_file

from tpu_rl import data, models
from tpu_rl.commands import compose, config, roles
from tpu_rl.data.messages import IMAGE_MARK
from tpu_rl.experience.layout import pack_experience
from tpu_rl.losses.log_probs import frozen_log_probs
from tpu_rl.rollout.prompts import encode_with_images
from tpu_rl.tasks.pictures import PicturesData, PicturesSource
from tpu_rl.types import Rollout

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
PAD, END, IMAGE, FIRST_LETTER = 0, 2, 4, 5
"""Ids of the tokenizer of `builtin:pictures`."""
GROUP = 8
LOSS_PROMPTS, LOSS_TOKENS = 4, 12
STEP_PROMPTS, STEP_TOKENS = 8, 32
WARMUP = 2
ONE_THREAD = "trl one thread"
ARMS = (side_by_side.OURS, "trl", ONE_THREAD)
REWARD = """
def count_digits(completions):
    return [float(sum(map(str.isdigit, text))) for text in map(str, completions)]
"""
PARTS = {"tower": "vision_tower", "projector": "multi_modal_projector", "text": "language_model"}


@dataclass(frozen=True)
class Shape:
    """Pictures, and how a batch of them is cut."""

    pixels: int
    prompt_tokens: int
    """At most."""
    our_micro_batches: int
    trl_micro_batches: int
    """Of a step. TRL's have at most 2,600 padded tokens, and ours at most 2,600 slots: larger ones
    are slower on CPUs."""


SHAPES = {32: Shape(32, 64, 1, 2), 112: Shape(112, 240, 8, 8)}
LOSS_SHAPE = Shape(32, 96, 2, 1)


def write_model(folder: Path, pixels: int) -> None:
    """Write random weights, the tokenizer and the processor for both libraries."""
    source = Path(roles.model_path("builtin:pictures"))
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings["vision_config"]["image_size"] = pixels
    settings["image_seq_length"] = (pixels // settings["vision_config"]["patch_size"]) ** 2
    model = models.from_config(settings)
    params = model.init(jax.random.key(0))
    # Features as large as embeddings, so that pictures matter to log-probs.
    params["vision"]["projector_out"] = params["vision"]["projector_out"] * 30
    models.save(folder, model, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    processor = json.loads((source / "preprocessor_config.json").read_text(encoding="utf-8"))
    processor["size"] = {"shortest_edge": pixels}
    processor["crop_size"] = {"height": pixels, "width": pixels}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


def write_rows(folder: Path, pixels: int, count: int, two_pictures: bool = False) -> Path:
    """Write pictures and rows in TRL's format; with `two_pictures` the last row has two."""
    folder.mkdir(parents=True, exist_ok=True)
    source = PicturesSource(PicturesData(pixels=pixels), rows=count + 1)
    lines = []
    for index in range(count):
        drawn = [source[index]] + [source[count]] * (two_pictures and index == count - 1)
        names = [f"{index}_{number}.png" for number in range(len(drawn))]
        for name, row in zip(names, drawn, strict=True):
            (folder / name).write_bytes(row["images"][0])
        message = {"role": "user", "content": drawn[0]["prompt"].strip(IMAGE_MARK)}
        lines.append(json.dumps({"prompt": [message], "images": names}) + "\n")
    path = folder / "rows.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def flags_of(model: Path, rows: Path, shape: Shape, prompts: int, new_tokens: int) -> list[str]:
    """Return flags of launch/run.py that do what the engine of TRL does."""
    reward = rows.parent / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    return [
        *("grpo", "--model.path", str(model), "--data.path", str(rows)),
        *("--reward", f"{reward}:count_digits", "--algorithm.advantages", "centered"),
        *("--batch.prompts", str(prompts), "--batch.group-size", str(GROUP)),
        *("--batch.row-length", str(shape.prompt_tokens + GROUP * new_tokens)),
        *(
            "--batch.micro-batch-rows",
            str(prompts // shape.our_micro_batches),
            "--model.remat",
            "none",
        ),
        *("--sampling.max-prompt-tokens", str(shape.prompt_tokens)),
        *("--sampling.max-new-tokens", str(new_tokens)),
        *("--sampling.max-num-seqs", str(prompts * GROUP)),
        # Completions of one length, without the token of images: TRL forbids that, too.
        *("--sampling.logit-bias", str(END), "-1000.0", str(IMAGE), "-1000.0"),
        *("--optimizer.learning-rate", "1e-6", "--optimizer.warmup-steps", "0"),
        *("--evaluation.rows", "0", "--checkpoint.interval", "1000"),
    ]


def run_trl(python: str, folder: Path, one_thread: bool = False, **work: Any) -> None:
    """Run TRL's engine, which reads FOLDER/work.json."""
    file = folder / "work.json"
    file.write_text(json.dumps({"folder": str(folder), "group": GROUP} | work), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1"} if one_thread else {}
    script = str(HERE / "engines" / "trl_pictures.py")
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        command = [python, script, str(file)]
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


# --- equal losses ---


def compare_loss(python: str, folder: Path, model: Path) -> None:
    """Print the differences between our loss of some completions and TRL's."""
    path = write_rows(folder / "rows", LOSS_SHAPE.pixels, LOSS_PROMPTS, two_pictures=True)
    flags = flags_of(model, path, LOSS_SHAPE, LOSS_PROMPTS, LOSS_TOKENS)
    settings = config.parse([*flags, "--steps", "1"])
    mesh = compose.make_mesh(settings.mesh)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        context, params = compose.make_context(settings, folder / "unused", mesh)
        ours = our_loss(context, params, path, folder)
    work = {"kind": "loss", "model": str(model), "rows": str(path), "steps": 1}
    work |= {"prompts": LOSS_PROMPTS, "new_tokens": LOSS_TOKENS}
    run_trl(python, folder, **work)
    theirs = dict(np.load(folder / "theirs.npz"))
    for index, prompt in enumerate(ours["prompts"]):
        seen = theirs["prompts"][index * GROUP]
        expected = [IMAGE if token >= ours["first_id"] else token for token in prompt]
        if expected != seen[seen >= 0].tolist():
            sys.exit(f"error: prompt {index} has other tokens in TRL")
    mask = ours["mask"][:, : theirs["log_probs"].shape[1]]
    gap = np.abs(ours["log_probs"][:, : mask.shape[1]] - theirs["log_probs"])[mask].max()
    arms.print_heading("quantity", "tpu_rl", "TRL", "largest difference")
    arms.print_row("advantages", "", "", f"{gap_of(ours, theirs, 'advantages'):.0e}")
    arms.print_row(f"log-probs of {mask.sum()} tokens", "", "", f"{gap:.0e}")
    loss, their_loss = float(ours["loss"]), float(theirs["loss"])
    arms.print_row("loss", f"{loss:.7f}", f"{their_loss:.7f}", f"{abs(loss - their_loss):.0e}")
    gradients = [load_file(folder / name / "model.safetensors") for name in ("ours", "gradient")]
    for part, name in PARTS.items():
        mine, other = (
            {key: value for key, value in tensors.items() if name in key} for tensors in gradients
        )
        norms = [np.sqrt(sum(np.square(x).sum() for x in tree.values())) for tree in (mine, other)]
        # A weight that only one of them has (an unread pooling head) has no gradient.
        names = mine.keys() | other.keys()
        difference = max(np.abs(mine.get(key, 0.0) - other.get(key, 0.0)).max() for key in names)
        cells = [f"{norm:.7f}" for norm in norms]
        arms.print_row(f"gradient of the {part}: norm", *cells, f"{difference:.0e}")


def gap_of(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    return float(np.abs(ours[name] - theirs[name]).max())


def our_loss(context: Any, params: Any, path: Path, folder: Path) -> dict[str, Any]:
    """Return our log-probs and loss, and write the completions and the gradient."""
    tokenizer = context.language.tokenizer
    prompts, pieces = encode_with_images(data.read(path), tokenizer, LOSS_SHAPE.prompt_tokens)
    random = np.random.default_rng(0)
    count = len(prompts) * GROUP
    lengths = random.integers(3, LOSS_TOKENS + 1, count)
    ids = random.integers(FIRST_LETTER, tokenizer.vocab_size, (count, LOSS_TOKENS))
    tokens = np.full((count, LOSS_SHAPE.prompt_tokens + LOSS_TOKENS), PAD, np.int32)
    mask = np.zeros(tokens.shape, bool)
    images = np.zeros((count, 2, *np.shape(pieces[0])[1:]), np.float32)
    for row in range(count):
        prompt, shown = prompts[row // GROUP], pieces[row // GROUP]
        end = len(prompt) + lengths[row]
        tokens[row, :end] = [*prompt, *ids[row, : lengths[row]]]
        mask[row, len(prompt) : end] = True
        images[row, : len(shown)] = shown
    texts = [tokenizer.decode(list(tokens[row, mask[row]])) for row in range(count)]
    returns = np.array([sum(map(str.isdigit, text)) for text in texts], np.float32)
    rewards = np.zeros(tokens.shape, np.float32)
    rewards[np.arange(count), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)] = returns
    zeros = np.zeros(tokens.shape, np.float32)
    rollout = Rollout(
        tokens=tokens,
        action_mask=mask,
        log_probs=zeros,
        behaviour_log_probs=zeros,
        rewards=rewards,
        group_id=np.repeat(np.arange(len(prompts), dtype=np.int32), GROUP),
        policy_step=np.zeros(count, np.int32),
        birth_key=np.zeros((count, 2), np.uint32),
        truncated=np.zeros(count, bool),
        scored=np.ones(count, bool),
        images=images,
    )
    packed = pack_experience(
        context.config.batch, rollout, context.mesh, context.attention_index, tokenizer.images
    )
    layout = packed.layout
    policy = jax.jit(
        lambda p: frozen_log_probs(context.role("policy"), p, layout.rows(packed.data.tokens))
    )
    log_probs = np.asarray(layout.unpack(policy(params)))
    noise = 0.3 * random.normal(size=log_probs.shape).astype(np.float32)
    old = np.where(mask, log_probs + noise, 0)
    known = replace(packed.data, log_probs=old, behaviour_log_probs=old)
    (stage,) = context.config.stages
    algorithm = compose.build_algorithm(context, stage)
    batch, _ = algorithm.make_batch(packed._replace(data=known), params, None)

    @jax.jit
    def value_and_gradient(params: Any) -> Any:
        def total(policy: Any) -> Any:
            micro_batches = (
                jax.tree.map(lambda leaf, k=k: leaf[0, k], batch)
                for k in range(batch.action_mask.shape[1])
            )
            tree = params | {"policy": policy}
            return sum(algorithm.loss(tree, micro_batch)[0] for micro_batch in micro_batches)

        return jax.value_and_grad(total)(params["policy"])

    loss, gradient = value_and_gradient(params)
    models.save(folder / "ours", context.models["policy"], gradient)
    actions = np.arange(LOSS_TOKENS) < lengths[:, None]
    starts = np.array([len(prompt) for prompt in prompts]).repeat(GROUP)[:, None]
    columns = starts + np.arange(LOSS_TOKENS)
    old, log_probs, advantages = (
        np.take_along_axis(np.asarray(x), columns, 1)
        for x in (old, log_probs, layout.unpack(batch.advantages))
    )
    np.savez(folder / "completions.npz", ids=ids, lengths=lengths, old_log_probs=old)
    first_id = tokenizer.images.first_id
    return {"prompts": prompts, "first_id": first_id, "log_probs": log_probs, "mask": actions} | {
        "loss": loss,
        "advantages": advantages[:, 0],
    }


# --- the time of a step ---


def compare_steps(
    python: str,
    folder: Path,
    model: Path,
    shape: Shape,
    arms_: Sequence[str],
    rounds: int,
    steps: int,
) -> None:
    """Print the seconds of steps of all arms, and their ratios."""
    total = WARMUP + steps
    path = write_rows(folder / "rows", shape.pixels, STEP_PROMPTS * total)
    samples: dict[str, list[side_by_side.Sample | None]] = {arm: [] for arm in arms_}
    loads = []
    for round_ in range(rounds):
        for arm in side_by_side.rotated(arms_, round_):
            run_folder = folder / f"{arm.replace(' ', '_')}_{round_}"
            run_folder.mkdir(parents=True, exist_ok=True)
            loads.append(os.getloadavg()[0])
            if arm == side_by_side.OURS:
                seconds, tokens = our_steps(run_folder / "run", model, path, shape, total)
            else:
                work = {"kind": "step", "model": str(model), "rows": str(path), "steps": total}
                work |= {"prompts": STEP_PROMPTS, "new_tokens": STEP_TOKENS}
                work |= {"micro_batches": shape.trl_micro_batches}
                run_trl(python, run_folder, arm == ONE_THREAD, **work)
                answer = json.loads((run_folder / "theirs.json").read_text(encoding="utf-8"))
                seconds, tokens = answer["seconds"], answer["tokens"]
            counted = slice(WARMUP, None)
            sample = side_by_side.Sample(tuple(seconds[counted]), tuple(tokens[counted]))
            samples[arm].append(sample)
            taken = side_by_side.summary([sample])
            print(f"round {round_ + 1} {arm}: {taken} s, load {loads[-1]:.1f}", flush=True)
    print(f"pictures of {shape.pixels} pixels, load {min(loads):.1f} to {max(loads):.1f}")
    heading = ["arm", "step, s: median (least to most)", "TRL's time over ours (rounds)"]
    print(side_by_side.markdown(heading, side_by_side.rows(samples)), flush=True)


def our_steps(
    run_dir: Path, model: Path, rows: Path, shape: Shape, steps: int
) -> tuple[list[float], list[int]]:
    """Return the seconds from step to step, and the sampled tokens of each step."""
    flags = flags_of(model, rows, shape, STEP_PROMPTS, STEP_TOKENS)
    arms.run(run_dir, [*flags, "--steps", str(steps)])
    metrics = arms.read_metrics(run_dir)
    stamps = [row["time"] for row in metrics]
    tokens = [round(row["rollout/tokens"]) for row in metrics if row["step"] > 0]
    return np.diff(stamps).tolist(), tokens


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--trl", required=True, help="interpreter of an environment with trl")
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="counted steps in each round")
    parser.add_argument("--parts", nargs="+", default=["loss", "step"], choices=["loss", "step"])
    parser.add_argument("--pixels", type=int, nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS)
    flags = parser.parse_args()
    folder = flags.to.absolute()
    for pixels in {LOSS_SHAPE.pixels, *flags.pixels}:
        if not (folder / f"model_{pixels}").exists():
            write_model(folder / f"model_{pixels}", pixels)
    if "loss" in flags.parts:
        compare_loss(flags.trl, folder / "loss", folder / f"model_{LOSS_SHAPE.pixels}")
    for pixels in flags.pixels if "step" in flags.parts else []:
        work = (flags.trl, folder / f"step_{pixels}", folder / f"model_{pixels}", SHAPES[pixels])
        compare_steps(*work, flags.arms, flags.rounds, flags.steps)


if __name__ == "__main__":
    main()
