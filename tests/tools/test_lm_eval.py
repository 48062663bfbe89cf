"""lm-eval, unchanged, scores the model through our server as it does through transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import MODEL, Served
from .environments import LM_EVAL

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
SUMS = 20
CLOZES = (
    ("The capital of France is", ["Paris", "London", "Rome"]),
    ("The sun rises in the", ["east", "west", "north"]),
    ("Water freezes at zero degrees", ["Celsius", "dollars", "metres"]),
    ("A week has seven", ["days", "months", "hours"]),
    ("Bees make", ["honey", "steel", "paper"]),
    ("The opposite of hot is", ["cold", "warm", "loud"]),
    ("Cats chase", ["mice", "planets", "rivers"]),
    ("The largest planet is", ["Jupiter", "Mercury", "Pluto"]),
    ("Two plus two equals", ["four", "nine", "green"]),
    ("She opened the door with a", ["key", "cloud", "number"]),
    ("Bread is baked in an", ["oven", "ocean", "engine"]),
    ("The colour of grass is", ["green", "red", "purple"]),
    ("Fish live in", ["water", "fire", "books"]),
    ("A triangle has three", ["sides", "wheels", "names"]),
    ("The Earth goes around the", ["Sun", "Moon", "Mars"]),
    ("We see with our", ["eyes", "ears", "knees"]),
    ("Winter is followed by", ["spring", "autumn", "lunch"]),
    ("The first month of the year is", ["January", "June", "Monday"]),
    ("Ice is frozen", ["water", "sand", "wood"]),
    ("The author of Hamlet is", ["Shakespeare", "Newton", "Mozart"]),
)
LOGLIKELIHOOD_SLACK = 1e-2


def sums() -> list[tuple[str, list[str]]]:
    """Sums with their right result and two wrong ones."""
    rng = random.Random(7)
    items = []
    for _ in range(SUMS):
        left, right = rng.randint(1, 40), rng.randint(1, 40)
        results = [left + right, left + right + rng.randint(1, 9), abs(left - right)]
        items.append((f"{left} + {right} =", [str(one) for one in results]))
    return items


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions, asked by choice and by generation."""
    folder = tmp_path_factory.mktemp("tasks")
    items = [{"question": q, "choices": c} for q, c in (*CLOZES, *sums())]
    (folder / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    both = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choice = {
        **both,
        "task": "kvrelay_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    generated = {
        **both,
        "task": "kvrelay_generate",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choice, generated):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


async def score(
    served: Served, tasks: Path, folder: Path, task: str, model: str, told: str, *more: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What lm-eval says of a model: the task's results, and each sample."""
    command: Sequence[str | Path] = [LM_EVAL.command("lm-eval"), "run", "--model", model]
    command = [*command, "--model_args", told, "--tasks", task, "--include_path", tasks]
    command = [*command, "--log_samples", "--output_path", folder, *more]
    await served.run(command, folder)
    return read(folder, task)


def read(folder: Path, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results and samples that lie in a folder."""
    [results] = folder.rglob("results_*.json")
    [samples] = folder.rglob("samples_*.jsonl")
    scored: dict[str, Any] = json.loads(results.read_text())["results"][task]
    each = [json.loads(line) for line in samples.read_text().splitlines()]
    return scored, sorted(each, key=lambda one: int(one["doc_id"]))


def fresh(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def loglikelihoods(samples: list[dict[str, Any]]) -> list[float]:
    return [float(choice[0][0]) for one in samples for choice in one["resps"]]


def is_greedy(samples: list[dict[str, Any]]) -> list[bool]:
    return [str(choice[0][1]) == "True" for one in samples for choice in one["resps"]]


async def test_choices_by_loglikelihood(served: Served, tasks: Path, tmp_path: Path) -> None:
    """It needs no tokenizer of its own: the server tells what it must know."""
    ours, our_samples = await score(
        served, tasks, fresh(tmp_path, "ours"), "kvrelay_choice", "local-completions",
        f"model={MODEL},base_url={served.http}/v1/completions,num_concurrent=4",
    )  # fmt: skip
    theirs, their_samples = await score(
        served, tasks, fresh(tmp_path, "theirs"), "kvrelay_choice", "hf",
        f"pretrained={served.model_path},dtype=float32", "--device", "cpu",
    )  # fmt: skip
    expected = loglikelihoods(their_samples)
    assert len(expected) == 3 * (len(CLOZES) + SUMS)
    assert loglikelihoods(our_samples) == pytest.approx(expected, abs=LOGLIKELIHOOD_SLACK)
    assert is_greedy(our_samples) == is_greedy(their_samples)
    assert any(is_greedy(our_samples))
    assert ours["acc,none"] == theirs["acc,none"] > 1 / 3
    await served.assert_at_baseline()


@pytest.mark.parametrize(
    ("model", "path", "more"),
    [
        ("local-completions", "/v1/completions", []),
        ("local-chat-completions", "/v1/chat/completions", ["--apply_chat_template"]),
    ],
)
async def test_generation(
    served: Served, tasks: Path, tmp_path: Path, model: str, path: str, more: list[str]
) -> None:
    """In a chat, the server applies the template that lm-eval's `hf` applies itself."""
    ours, our_samples = await score(
        served, tasks, fresh(tmp_path, "ours"), "kvrelay_generate", model,
        f"model={MODEL},base_url={served.http}{path},num_concurrent=4", *more,
    )  # fmt: skip
    theirs, their_samples = await score(
        served, tasks, fresh(tmp_path, "theirs"), "kvrelay_generate", "hf",
        f"pretrained={served.model_path},dtype=float32", "--device", "cpu", *more,
    )  # fmt: skip
    said, expected = ([one["resps"][0][0] for one in each] for each in (our_samples, their_samples))
    assert len(expected) == len(CLOZES) + SUMS
    assert said == expected
    assert len(set(said)) > len(CLOZES), "it answers the question that it is asked"
    assert ours["exact_match,none"] == theirs["exact_match,none"]
    await served.assert_at_baseline()
