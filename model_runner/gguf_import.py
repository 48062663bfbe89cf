"""A .gguf file made into an ordinary checkpoint folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.options import parse_dtype


def convert_gguf(gguf_path: Path, out_dir: Path, dtype: str = "bfloat16") -> None:
    """Dequantize `gguf_path` into `out_dir`: weights (in `dtype`), configurations, tokenizer.

    The folder appears whole or not at all; one that is there already must be
    empty. Reading the format is left to transformers, imported here because
    that takes seconds.

    Raises:
        CheckpointError: one line; the file is missing, corrupt, or of an
            architecture that transformers cannot read from GGUF.
        UnsupportedOptionError: `dtype` is unknown.
        FileExistsError: `out_dir` has something in it.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} is not empty")
    if not gguf_path.is_file():
        raise CheckpointError(f"{gguf_path}: file not found")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename does not cross file systems.
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        model, tokenizer = _read(gguf_path, parse_dtype(dtype))
        model.save_pretrained(staging)
        # One file says all about the tokenizer, its chat template included.
        tokenizer.save_pretrained(staging, save_jinja_files=False)
        staging.chmod(0o755)
        staging.rename(out_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _read(gguf_path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The file's model and tokenizer, as transformers objects."""
    from transformers import AutoTokenizer

    try:
        model = _read_model(gguf_path, dtype)
        return model, AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    except CheckpointError:
        raise
    # The readers raise whatever their parsing meets: index, key, value errors and more.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{gguf_path}: not readable as GGUF: {reason}") from error


def _read_model(gguf_path: Path, dtype: torch.dtype) -> Any:
    """What `from_pretrained(gguf_file=...)` does, which insists on accelerate for no need here."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    read = load_gguf_checkpoint(
        str(gguf_path), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )
    _, unexpected = model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent or unexpected:
        raise CheckpointError(
            f"{gguf_path}: tensors do not match its architecture:"
            f" missing {absent}, unexpected {unexpected}"
        )
    return model
