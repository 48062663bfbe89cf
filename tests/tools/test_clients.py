"""Clients, unchanged, with a model that a worker plays: tools, streams and forms.

LiteLLM, LangChain, Pydantic AI, Instructor and the AI SDK call the APIs of OpenAI and Anthropic.
"""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from .environments import AI_SDK, CLIENTS, INSTRUCTOR, Environment
from .played_model import playing, prompts_of, run_agent

PROGRAMS: Final = Path(__file__).parent / "clients"
TEMPLATE: Final = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call> #}'
    "{% for message in messages %}<{{ message.role }}>{{ message.reasoning_content }}|"
    "{{ message.content[-100:] }}{% endfor %}"
)
"""The tools' names and the end of what was said: a scripted worker has no room for more."""
THOUGHT: Final = "Hm."
ARGUMENTS: Final = {"city": "Köln"}
ANSWER: Final = "It is sunny."
RIVER: Final[dict[str, Any]] = {"name": "Rhine", "bridges": [1, 2]}
ALL: Final = {"thought", "call", "answer", "river"}
WAYS: Final = ("whole", "streamed")
OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
}


def calling(name: str, arguments: object) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def says(prompt: str) -> str:
    """Thinks, then calls a tool that a prompt has, answers its result, or writes a form."""
    if "Köln: sunny" in prompt:
        return ANSWER
    tool = re.search(r"\[(\w+)\]", prompt)
    if "Name a river." not in prompt:
        assert tool
        said = "I look.\n" + calling(tool[1], ARGUMENTS)
    else:
        said = calling(tool[1], RIVER) if tool else json.dumps(RIVER)
    return f"<think>\n{THOUGHT}\n</think>\n\n{said}"


async def told_by(folder: Path, *command: str | Path) -> set[tuple[str, str]]:
    """Runs a client's program; what it told is right. Returns in which way it told what."""
    expected = {"thought": THOUGHT, "call": ARGUMENTS, "answer": ANSWER, "river": RIVER}
    aliases = {"default_max_tokens": 200, "model_aliases": ("claude-sonnet-4-5",)}
    async with playing(folder, TEMPLATE, says, **aliases) as cluster:
        url = f"http://{cluster.router.http_address}"
        printed = await run_agent([*command, url], folder, OFFLINE)
    # Libraries warn, too.
    told = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    for way, kind, value in told:
        assert value == expected[kind], (way, kind)
    kinds = {kind for _, kind, _ in told}
    came_back = [prompt for prompt in prompts_of(cluster) if f"<assistant>{THOUGHT}|" in prompt]
    assert bool(came_back) == ("thought" in kinds)
    return {(way, kind) for way, kind, _ in told}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("environment", "program", "kinds"),
    [
        (CLIENTS, "by_openai.py", ALL),
        (CLIENTS, "by_anthropic.py", ALL),
        (CLIENTS, "by_litellm.py", ALL),
        (CLIENTS, "by_langchain.py", ALL),
        (CLIENTS, "by_pydantic_ai.py", ALL),
        (INSTRUCTOR, "by_instructor.py", {"call", "river"}),
    ],
)
async def test_a_client_of_python(
    tmp_path: Path, environment: Environment, program: str, kinds: set[str]
) -> None:
    told = await told_by(tmp_path, environment.command("python"), PROGRAMS / program)
    assert told == set(product(WAYS, kinds))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_ai_sdk(tmp_path: Path) -> None:
    """It imports from a folder beside it."""
    (tmp_path / "node_modules").symlink_to(AI_SDK.packages())
    program = shutil.copy(PROGRAMS / "by_ai_sdk.mjs", tmp_path)
    assert await told_by(tmp_path, "node", program) == set(product(WAYS, ALL))
