"""Packaging. `pip install -e .` for the CPU; see the README for one line per accelerator."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
JAX = ">=0.7.2,<0.13"
"""Both ends are tested: constraints/colab.txt and constraints/newest.txt. Differences between the
versions are in tpu_rl/jax_versions.py."""

EXTRAS = {
    # CUDA 13 needs driver 580 or newer, CUDA 12 needs 525.
    "cuda": [f"jax[cuda13]{JAX}"],
    "cuda12": [f"jax[cuda12]{JAX}"],
    "tpu": [f"jax[tpu]{JAX}"],
    # For launch/plan.py on any machine: the TPU compiler, libtpu, in the version that each jax
    # names.
    "plan": [f"jax[tpu]{JAX}"],
    "math": ["math-verify[antlr4_13_2]>=0.9"],
    "parquet": ["pyarrow"],
    "datasets": ["datasets", "pyarrow"],
    "wandb": ["wandb"],
    "trackio": ["trackio"],
    "mlflow": ["mlflow"],
    # For launch/serve.py and --agent: the server itself, of three small packages.
    "serve": ["uvicorn>=0.30", "starlette>=0.40", "protobuf>=5"],
    # For the tests of launch/serve.py --tinker with the real client.
    "tinker": ["tinker==0.38.0"],
    # Environments of other packages: tpu_rl/tasks/adapters.
    "environments": [
        "reasoning-gym>=0.1.25",
        "textarena>=0.7.4",
        "gymnasium>=1",
        "websockets",
        "bm25s>=0.2",
    ],
    # For evaluate --tasks and --evaluation.tasks: lm-evaluation-harness without torch.
    "lm-eval": ["lm-eval>=0.4.13"],
    # For --environment mcp:COMMAND.
    "mcp": ["mcp>=1.10"],
    # For recipes/smollm2.py and recipes/gemma3.py.
    "recipes": ["gguf"],
    "test": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "jaxtyping>=0.2.36",
        "ruff>=0.12",
        "pyright[nodejs]>=1.1.400",
        "pyarrow",
        "uvicorn>=0.30",
        "starlette>=0.40",
        "protobuf>=5",
        "openai",
        # For bench/plots.py and docs/colab.ipynb.
        "matplotlib>=3.9",
    ],
    # The documentation site, mkdocs.yml.
    "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1.0,<2"],
    # Parity with the torch models of transformers and PEFT; the quick tests skip those cases where
    # torch is absent.
    "parity": ["torch==2.13.0", "peft==0.21.2"],
}


# The address of the repository, where one stands: CONTRIBUTING.md, "Publish".
REPOSITORY = re.findall(
    r"^repository-code: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
)


class BuildWithRecipes(build_py):
    """Puts recipes/ into the wheel as tpu_rl/recipes, for `tpu-rl recipe --copy-to`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                ROOT / "recipes",
                Path(self.build_lib) / "tpu_rl" / "recipes",
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(
    name="tpu_rl",
    cmdclass={"build_py": BuildWithRecipes},
    version="0.1.0",
    description="JAX/TPU-native reinforcement-learning post-training of language models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Source": REPOSITORY[0]} if REPOSITORY else {},
    python_requires=">=3.11",
    packages=find_packages(include=["tpu_rl", "tpu_rl.*"]),
    package_data={
        "tpu_rl": [
            "py.typed",
            "pretrained/*/*",
            "commands/plan/*.json",
            "commands/flags/*.yaml",
            "commands/presets/*.yaml",
            "report/templates/*",
            "models/attention/*.tsv",
            "models/hf/*.yaml",
            "models/vision/*.yaml",
            "serving/*.html",
        ]
    },
    entry_points={"console_scripts": ["tpu-rl = tpu_rl.commands.cli:main"]},
    install_requires=[
        f"jax{JAX}",
        "flax>=0.11.2,<0.13",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.4",
        "tensorstore",
        "grain>=0.2.18",
        "transformers>=5.0",
        "tokenizers",
        "sentencepiece",
        "safetensors>=0.5",
        "jinja2>=3.1",  # transformers needs it for chat templates and does not pull it in
        "tyro>=1.0",
        "PyYAML",
        "packaging",
        "filelock",
        "rich",
        "tensorboardX>=2.6",
    ],
    extras_require=EXTRAS,
)
