"""The house's own rules notice what they are for, and the house keeps to them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from checks import docstrings, folders, host_waits, names
from checks.__main__ import CHECKS
from checks.sources import Source, read_sources

ROOT = Path(__file__).parents[2]
SMALL = '"""One thing."""\n'
LONG = SMALL + "\n" * folders.MIN_LINES


def use(*modules: str) -> str:
    return LONG + "".join(f"from kvrelay.{module} import Thing\n" for module in modules)


@pytest.mark.slow  # `make check` runs them
def test_the_house_keeps_to_its_rules():
    sources = read_sources(ROOT)
    assert len(sources) > 400, "the rooms were not found"
    for check in CHECKS.values():
        assert list(check(sources)) == []


@pytest.mark.parametrize("word", [*sorted(docstrings.HEADLESS), "Sends", "Takes"])
def test_a_docstring_without_a_subject_or_in_the_third_person_is_found(word: str):
    text = f'def f():\n    """{word} a worker."""\n'
    (line,) = docstrings.check([Source("router/one.py", text)])
    assert line.startswith("router/one.py:2:")
    assert word in line


def test_docstrings_below_fields_and_of_every_scope_are_read():
    fields = 'class A:\n    """Of A."""\n    y: int\n    """Of y."""\n'
    text = f'"""Of a module."""\nX = 1\n"""Of X."""\n{fields}'
    found = [kind for _, kind, _ in docstrings.find_docstrings(ast.parse(text))]
    assert sorted(found) == ["class", "field", "field", "module"]
    assert len(list(docstrings.check([Source("wire/one.py", text)]))) == 4


def test_a_long_sentence_is_found_and_lists_are_no_sentence():
    words = " ".join(["word"] * docstrings.MAX_WORDS)
    assert list(docstrings.find_faults("class", f"A {words}.")) != []
    assert list(docstrings.find_faults("class", f"{words}. Another {words[5:]}.")) == []
    assert (
        list(docstrings.find_faults("class", f"Args:\n    a: {words[5:]}.\n    b: {words[5:]}."))
        == []
    )


@pytest.mark.parametrize(
    "first", ["Tokens of a prompt.", "The worker.", "Send it.", "None: nobody."]
)
def test_a_noun_and_an_imperative_pass(first: str):
    assert list(docstrings.find_faults("function", first)) == []


def test_a_crowded_folder_is_found():
    crowd = [Source(f"net/file_{number}.py", LONG) for number in range(folders.MAX_FILES + 1)]
    (line,) = folders.check(crowd)
    assert line.startswith("net/: 26")
    assert list(folders.check(crowd[1:])) == []


def test_a_small_file_with_one_importer_is_found():
    small = Source("net/small.py", SMALL)
    one, other = Source("net/one.py", use("net.small")), Source("net/other.py", use("net.small"))
    (line,) = folders.check([small, one])
    assert "net/one.py" in line
    assert list(folders.check([small, one, other])) == []
    assert list(folders.check([Source("net/small.py", LONG), one])) == []


def test_members_of_a_family_may_be_small():
    small = Source("deploy/commands/small.py", SMALL)
    assert list(folders.check([small, Source("net/one.py", use("deploy.commands.small"))])) == []


def test_a_name_for_two_things_is_found():
    first, second = (Source(f"{room}/one.py", "class A: ...\n") for room in ("net", "router"))
    assert len(list(names.check([first, second]))) == 2
    assert (
        list(names.check([first, Source("router/two.py", "class B: ...\nclass _A: ...\n")])) == []
    )


def test_roles_and_the_ground_may_have_files_of_one_name():
    text = "class Scheduler: ...\n"
    roles = [Source(f"{room}/scheduler.py", text) for room in names.ROLES]
    assert (
        list(names.check([*roles, Source("net/errors.py", ""), Source("wire/errors.py", "")])) == []
    )
    assert list(names.check([*roles, Source("engine/scheduler.py", text)])) != []


@pytest.mark.parametrize(
    "call",
    [
        *("x.tolist()", "x.max().item()", "x.cpu()", "x.nonzero()", "torch.nonzero(x)"),
        *("torch.unique(x)", "torch.where(x > 0)"),
    ],
)
@pytest.mark.parametrize("folder", host_waits.FOLDERS)
def test_a_forward_that_waits_for_the_device_is_found(folder: str, call: str):
    source = Source(f"{folder}/one.py", f"def f():\n    return {call}\n")
    (line,) = host_waits.check([source])
    assert line.startswith(f"{folder}/one.py:2:")
    assert list(host_waits.check([Source("model_runner/sampling/one.py", source.text)])) == []


@pytest.mark.parametrize("call", ["torch.where(x > 0, x, 0)", "np.nonzero(x)"])
def test_what_the_device_or_the_host_does_by_itself_passes(call: str):
    assert list(host_waits.check([Source("model_runner/layers/one.py", f"{call}\n")])) == []


def test_a_file_that_waits_no_more_is_no_exception():
    path = min(host_waits.EXCEPTIONS)
    (line,) = host_waits.check([Source(path, "x = 1\n")])
    assert line.startswith(path)
    assert list(host_waits.check([Source(path, "x.item()\n")])) == []
