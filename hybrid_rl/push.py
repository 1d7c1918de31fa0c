"""Push a run's exported model to the Hugging Face hub: python -m hybrid_rl.push FOLDER USER/NAME.

FOLDER is a run's, whose final/ is pushed, or any exported model's. A repository that does not exist is made, private
without --public. The token is that of `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Push the folder, print the address, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_rl.push", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a finished run, or of an exported model")
    parser.add_argument("repo", metavar="USER/NAME", help="the model repository on the hub")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    given = parser.parse_args(arguments)
    try:
        print(push(given.folder, given.repo, private=not given.public))
    except PushError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


class PushError(RuntimeError):
    """There is no model to push, or the hub did not take it."""


def push(folder: Path, repo: str, private: bool = True) -> str:
    """Upload the model, to a new repository if there is none, and return the commit's address. Raises PushError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    model = folder / "final" if (folder / "final").is_dir() else folder
    if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        raise PushError(
            f"{model} holds no exported model (config.json and *.safetensors); name a finished run's folder"
        )
    try:
        api = HfApi(library_name="hybrid_rl")
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=name, folder_path=model, commit_message=f"{folder.resolve().name} by hybrid_rl"
        )
    except HFValidationError as error:
        raise PushError(f"{repo}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise PushError("there is no token; log in with `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # whichever HTTP library the hub's client uses
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PushError(f"{repo}: the hub did not take it: {reason}") from error
    return str(commit.commit_url)


if __name__ == "__main__":
    sys.exit(main())
