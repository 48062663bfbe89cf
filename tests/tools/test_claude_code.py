"""claude-code, unchanged, with a model that a worker plays: it thinks, calls a tool, answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from .environments import CLAUDE_CODE
from .played_model import playing, prompts_of, run_agent

TEMPLATE: Final = (
    "{% for tool in tools or [] %}{% if tool.function.name == 'Bash' %}Bash{% endif %}{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call> #}'
    "{% for message in messages %}<{{ message.role }}>{% endfor %}{{ messages[-1].content[-200:] }}"
)
"""Who speaks, and the end of the last one's words: a scripted worker has no room for more."""
MODEL: Final = "claude-sonnet-4-5"
CALL: Final = (
    "<think>\nA file is wanted.\n</think>\n\nI make it.\n"
    '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo made-by-claude > made.txt; '
    'cat made.txt", "description": "Make a file"}}\n</tool_call>'
)
ANSWER: Final = "The file made.txt is there."


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_claude_code_calls_a_tool_and_answers(tmp_path: Path) -> None:
    program = CLAUDE_CODE.command("claude")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "agent"\ntoken = "secret"\n')

    def says(prompt: str) -> str:
        return ANSWER if "made-by-claude" in prompt else CALL

    names = {"model_aliases": (MODEL,), "auth_token_file": tokens}
    async with playing(tmp_path, TEMPLATE, says, **names) as cluster:
        asked = ("-p", "make a file", "--model", MODEL, "--output-format", "json")
        settings = {
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": f"http://{cluster.router.http_address}",
            "ANTHROPIC_API_KEY": "secret",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        said = await run_agent((program, *asked, "--allowed-tools", "Bash"), work, settings)
        result = json.loads(said.splitlines()[-1])
        assert (result["result"], result["is_error"]) == (ANSWER, False)
        assert (work / "made.txt").read_text() == "made-by-claude\n"
        first, second = prompts_of(cluster)
        assert first.startswith("Bash<system><user>")
        assert "<assistant><tool>" in second
