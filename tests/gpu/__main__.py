"""Run the tests that are marked `gpu` on the GPU: python -m tests.gpu [arguments of pytest]. `make test-gpu` does this.

Without a GPU it says so in one line and ends with code 0.
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> int:
    try:
        import torch
    except ImportError:
        print(f"test-gpu: {sys.executable} has no torch; choose another Python with RUN=")
        return 1
    if not torch.cuda.is_available():
        built = torch.version.cuda and f"torch {torch.__version__} for CUDA {torch.version.cuda} finds none"
        print(f"test-gpu: no GPU ({built or f'torch {torch.__version__} is built without CUDA'}); nothing was tested")
        return 0
    os.environ["TEST_DEVICE"] = "cuda"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-rs",
        "--durations=15",
        *arguments,
    ]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
