"""Every command of docs/kubernetes.md, as far as it can be tried without a Kubernetes."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")

import click
import yaml

from kvrelay.deploy.cli import main
from tests.kubernetes.chart import CHART, NAME, RELEASE, ROOT, Pod, one, pods, render, selects
from tests.kubernetes.image import DOCKERFILE, MODEL_PACKAGE

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
LAPTOP = yaml.safe_load((CHART / "values-laptop.yaml").read_text())


def commands(program: str) -> list[list[str]]:
    """The words of each command line of a program, in the page's blocks."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE):
            parts = re.split(r"&&|&$", line.replace("\\\n", " "))
            found += [shlex.split(part, comments=True) for part in parts]
    return [words for words in found if words and words[0] == program]


def in_pods() -> Iterator[tuple[Pod, str, list[str]]]:
    """Each command that runs in a container: the pod, the container's name, and its words."""
    for words in commands("kubectl"):
        if words[1] == "exec":
            assert "$HEAD" in words
            container = words[words.index("-c") + 1]
            yield pods(render(LAPTOP))["head"], container, words[words.index("--") + 1 :]


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of one of kvrelay's command lines. Raises click's errors."""
    program, name, *arguments = words
    assert program == "kvrelay"
    command = main.get_command(click.Context(main), name)
    assert command is not None, name
    return command.make_context(name, arguments).params


def values_set(words: list[str]) -> dict[str, Any]:
    """The values of a `helm` command line."""
    values = {**LAPTOP}
    for option, given in itertools.pairwise(words):
        if option == "--set":
            path, _, value = given.partition("=")
            outer, _, inner = path.partition(".")
            values[outer] = {**values.get(outer, {}), inner: yaml.safe_load(value)}
        elif option == "-f":
            assert yaml.safe_load((ROOT / given).read_text()) == LAPTOP
    return values


def test_kvrelay_takes_each_command_line():
    every = [words for _, _, words in in_pods()] + commands("kvrelay")
    assert {words[1] for words in every} >= {"status", "drain", "doctor", "scale", "roll", "down"}
    controllers = []
    for words in every:
        given = parsed(words)
        controllers += [str(given["address"])] if "--controller" in words else []
        assert given.get("cluster_name", NAME) in (NAME, "default")
    service = one(render(LAPTOP), "Service", f"{NAME}-controller")
    assert set(controllers) == {f"{service['metadata']['name']}:50052"}


def test_containers_that_are_named_are_there():
    for pod, container, _ in in_pods():
        assert pod.container(container)


@pytest.mark.parametrize(
    "words", [one for one in commands("helm") if "kuberay-operator" not in one]
)
def test_helm_takes_each_command_line(words: list[str]):
    program, verb, release, chart, *rest = words
    assert (program, release, ROOT / chart) == ("helm", RELEASE, CHART)
    assert verb == "install" or "--reuse-values" in rest, "else what was given before is forgotten"
    render(values_set(rest))


def test_selectors_find_pods():
    every = pods(render(LAPTOP)).values()
    asked = re.findall(r"-l ([\w./-]+=[\w.-]+(?:,[\w./-]+=[\w.-]+)*)", PAGE)
    assert len(asked) >= 5
    for selector in asked:
        wanted = dict(pair.split("=") for pair in selector.split(","))
        assert any(selects(wanted, pod) for pod in every), selector


def test_the_build_knows_each_argument_and_target():
    text = DOCKERFILE.read_text()
    builds = commands("docker")
    assert builds
    for words in builds:
        for option, given in itertools.pairwise(words):
            if option == "--build-arg":
                assert re.search(rf"^ARG {given.partition('=')[0]}$", text, re.MULTILINE), given
            elif option == "--target":
                assert re.search(rf"^FROM \S+ AS {given}$", text, re.MULTILINE), given
    assert f"MODEL_PACKAGE={MODEL_PACKAGE}" in PAGE


def test_files_that_are_named_are_there():
    for words in commands("helm"):
        for option, given in itertools.pairwise(words):
            assert option != "-f" or Path(ROOT / given).is_file()
