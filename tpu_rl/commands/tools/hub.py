"""Upload a model directory to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from tpu_rl.errors import MachineError, refused

REPLACED = ["*.safetensors", "*.safetensors.index.json"]
"""Files of the repository that an upload removes unless it has them itself: weights of an earlier
upload with other shards would be loaded in place of the new ones."""


def _http_error() -> type[Exception]:
    """Return the base of all errors of requests, whose package differs between versions."""
    from huggingface_hub import errors

    return errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]


def require_access(name: str) -> None:
    """Check the name of a repository, and that this machine is logged in to the hub.

    Raises:
        InputError: the name is none, or there is no valid login.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with refused(
        HFValidationError,
        f"{name!r} is no name of a repository",
        where="--push-to-hub",
        fix="use OWNER/NAME",
    ):
        validate_repo_id(name)
    # A missing token and offline mode are OSErrors; a connection that fails is none.
    with refused(
        (OSError, _http_error()),
        "the hub does not accept a login from this machine",
        where="--push-to-hub",
        fix="run hf auth login or set HF_TOKEN, check the network, and unset HF_HUB_OFFLINE",
    ):
        HfApi().whoami()


def push(directory: Path, name: str, private: bool = False) -> str:
    """Upload a model directory to a repository, which is created if it does not exist.

    Returns:
        the address of the repository.

    Raises:
        MachineError: the upload failed. The directory stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with refused(
        (OSError, _http_error()),
        f"the upload to {name} failed",
        where="--push-to-hub",
        fix=f"the model is complete in {directory}: run hf upload {name} {directory}",
        kind=MachineError,
    ):
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=directory,
            commit_message="Upload a model trained with tpu_rl",
            delete_patterns=REPLACED,
        )
    return str(repository)
