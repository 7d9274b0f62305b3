"""Presets on star graphs, where a model that imitates paths learns a shortcut."""

from __future__ import annotations

from dataclasses import replace

from tpu_rl import algos
from tpu_rl.commands.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.tasks.star_graph import StarGraph, StarGraphData
from tpu_rl.train.optimizers import OptimizerConfig

GRAPH = StarGraph(degree=2, length=4, nodes=20)


def star_graph_pretrain() -> ExperimentConfig:
    """Pretraining for the star_graph presets: a small model learns from scratch to imitate paths.

    It learns a shortcut with them: it guesses the first step and follows edges, so one path in two
    is right and the loss stays at ln 2 per path. The other star_graph presets post-train this
    model.
    """
    return ExperimentConfig(
        algorithm=algos.SftConfig(),
        data=StarGraphData(graph=GRAPH, split="train"),
        model=ModelConfig(path="builtin:star_graph", random_init=True),
        reward=("star_graph",),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            schedule="cosine",
            warmup_steps=100,
            final_share=0.05,
            weight_decay=0.1,
            beta2=0.98,
        ),
        batch=BatchConfig(prompts=256, group_size=1, row_length=108, micro_batch_rows=32),
        sampling=SamplingConfig(max_prompt_tokens=22, max_new_tokens=8, max_num_seqs=512),
        evaluation=EvaluationConfig(rows=500, interval=250),
        steps=1800,
        checkpoint=CheckpointConfig(300),
    )


def star_graph_sft() -> ExperimentConfig:
    """More imitation of right paths, on new graphs, from the model of star_graph_pretrain.

    This is the fair baseline of methods that see right paths (DPO, Q# on gold pairs).
    """
    return replace(
        star_graph_pretrain(),
        data=replace(star_graph_pretrain().data, split="post"),
        model=ModelConfig(path="runs/star_graph_pretrain/model"),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, schedule="cosine", warmup_steps=20, beta2=0.98
        ),
        evaluation=EvaluationConfig(rows=500, interval=100),
        steps=400,
        checkpoint=CheckpointConfig(100),
    )


def star_graph_grpo() -> ExperimentConfig:
    """GRPO on star graphs, from the model of star_graph_pretrain: can a policy method leave the
    shortcut?"""
    return replace(
        star_graph_pretrain(),
        algorithm=algos.GrpoConfig(),
        data=replace(star_graph_pretrain().data, split="post"),
        model=ModelConfig(path="runs/star_graph_pretrain/model"),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
        batch=BatchConfig(prompts=64, group_size=8, row_length=128, micro_batch_rows=16),
        evaluation=EvaluationConfig(rows=500, interval=20),
        steps=200,
        checkpoint=CheckpointConfig(50),
    )


def star_graph_reinforce() -> ExperimentConfig:
    """REINFORCE on star graphs, with advantages whitened over the batch, on as many paths as
    star_graph_grpo."""
    return replace(star_graph_grpo(), algorithm=algos.ReinforceConfig())


def star_graph_dpo() -> ExperimentConfig:
    """DPO on star graphs: of the pretrained model's own paths, a right one is preferred to a wrong
    one.

    RPO adds the likelihood of the right path to the loss: `--algorithm.rpo-coef 1`.
    """
    return replace(star_graph_grpo(), algorithm=algos.DpoConfig(pairs="reference"))


def star_graph_q_sharp() -> ExperimentConfig:
    """Q# on star graphs: a q that starts as the pretrained model learns which of that model's own
    paths end at the goal.

    The first node after the center tells nothing about the end until edges have been followed from
    it, so q's loss on it stays flat for long. Hence q starts with all pretrained layers and keeps
    their next-token loss, all tokens of a path are labeled, and each graph is new. The two paths
    of a graph are learned from together.

    It then guides the model, with CD and FUDGE on the same q for comparison:

        python launch/evaluate.py runs/star_graph_pretrain/model --guide runs/star_graph_q_sharp
            --baseline cd fudge

    Four candidates are enough: in a graph of degree 2 the model knows at most two next nodes.
    """
    base = star_graph_grpo()
    return replace(
        base,
        algorithm=algos.QSharpConfig(
            candidates=4, prompts=262_144, roll_in="none", next_token_coef=0.1
        ),
        data=replace(base.data, rows=1_000_000),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, beta2=0.98),
        # A row of 128 tokens holds four graphs with two paths each.
        batch=BatchConfig(prompts=128, group_size=2, row_length=128, micro_batch_rows=32),
        evaluation=EvaluationConfig(rows=500, interval=250),
        steps=4000,
        checkpoint=CheckpointConfig(250),
    )
