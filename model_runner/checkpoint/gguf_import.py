"""The conversion of a .gguf file to an ordinary checkpoint folder."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kvrelay.model_runner.checkpoint.gguf_fields import ROPE_FACTORS, complete_config
from kvrelay.model_runner.errors import CheckpointError, DependencyError
from kvrelay.model_runner.torch_options import parse_dtype


def convert_gguf(gguf_path: Path, out_dir: Path, dtype: str = "bfloat16") -> None:
    """Dequantize `gguf_path` into `out_dir`: weights (in `dtype`), configurations, tokenizer.

    A file that cannot be read leaves nothing behind. The caller removes what a failed write leaves.
    The format is read by transformers, which is imported here because that takes seconds.

    Raises:
        CheckpointError: one line; the file is missing, corrupt, or of an
            architecture that transformers cannot read from GGUF.
        DependencyError: this version of transformers reads GGUF in another way.
        UnsupportedOptionError: `dtype` is unknown.
        FileExistsError: `out_dir` has something in it.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} is not empty")
    if not gguf_path.is_file():
        raise CheckpointError(f"{gguf_path}: file not found")
    torch_dtype, load_gguf_checkpoint = parse_dtype(dtype), _gguf_loader()
    with _no_progress_bars(), _parsed_once():
        model, tokenizer = _read(gguf_path, torch_dtype, load_gguf_checkpoint)
        model.save_pretrained(out_dir)
        # One file says all about the tokenizer, its chat template included.
        tokenizer.save_pretrained(out_dir, save_jinja_files=False)


def _gguf_loader() -> Callable[..., Any]:
    """The inner function of transformers for the format, if it still has the known form."""
    import transformers

    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        signature = inspect.signature(load_gguf_checkpoint)
        signature.bind("", return_tensors=True, model_to_load=None, torch_dtype=None)
    except (ImportError, TypeError) as error:
        raise DependencyError(
            f"transformers {transformers.__version__} reads GGUF in another way than 5.23,"
            f" which kvrelay is made for: {error}"
        ) from error
    return cast("Callable[..., Any]", load_gguf_checkpoint)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Show no progress bars on the user's terminal while a model is read and written."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as writer

    # The public switch does not reach the reader's bar, and does reach huggingface_hub's.
    modules: list[Any] = [reader, writer]
    bars = [module.tqdm for module in modules]
    for module in modules:
        module.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parse a file once, as ordinary arrays, and name its tensors by one table.

    transformers parses it for the configuration, the weights and the tokenizer, and makes the
    table for each tensor: half of the time. Numpy takes long for each slice of an array that is a
    file; a vocabulary has half a million.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, *args: Any, **options: Any) -> Any:
            self.data: Any = np.asarray(self.data)
            return super()._get(*args, **options)

    parse, make_names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(Reader), functools.cache(make_names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = parse, make_names


def _read(
    gguf_path: Path, dtype: torch.dtype, load_gguf_checkpoint: Callable[..., Any]
) -> tuple[Any, Any]:
    """The file's model and tokenizer, as transformers objects."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        # What `from_pretrained(gguf_file=...)` does, which insists on accelerate for no need here.
        config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        _complete(gguf_path, config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        read = load_gguf_checkpoint(
            str(gguf_path), return_tensors=True, model_to_load=model, torch_dtype=dtype
        )
        _, unexpected = model.load_state_dict(read["tensors"], strict=False, assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    except CheckpointError:
        raise
    # The readers raise whatever their parsing meets: index, key, value errors and more.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{gguf_path}: not readable as GGUF: {reason}") from error
    _refuse_left_over(gguf_path, model, read["tensors"])
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent or unexpected:
        raise CheckpointError(
            f"{gguf_path}: tensors do not match its architecture:"
            f" missing {absent}, unexpected {unexpected}"
        )
    return model, tokenizer


def _complete(gguf_path: Path, config: Any) -> None:
    """Give `config` what transformers' reader leaves out; `CheckpointError`: it has no place."""
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"{gguf_path}: {kind} is no causal language model")
    known = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(kind.removesuffix("_text"), {})
    metadata, _ = read_gguf_metadata(str(gguf_path))
    factors = [one.data for one in _stored(gguf_path) if one.name == ROPE_FACTORS]
    complete_config(gguf_path, metadata, known, factors[0] if factors else None, config)


def _refuse_left_over(gguf_path: Path, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a file with tensors that transformers' reader has not taken."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    stored = [one for one in _stored(gguf_path) if one.name != ROPE_FACTORS]
    if sum(int(one.n_elements) for one in stored) == sum(one.numel() for one in tensors.values()):
        return
    taken = get_gguf_hf_weights_map(model, TensorProcessor())
    left = [one.name for one in stored if one.name not in taken and "_exps." not in one.name]
    raise CheckpointError(f"{gguf_path}: transformers' reader of GGUF leaves out {left}")


def _stored(gguf_path: Path) -> list[Any]:
    """The tensors of a file, which is parsed once."""
    import gguf

    return list(gguf.GGUFReader(str(gguf_path)).tensors)
