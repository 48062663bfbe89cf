"""codex, unchanged, with a model that a worker plays: it thinks, calls a tool, and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from .environments import CODEX
from .played_model import playing, prompts_of, run_agent

TEMPLATE: Final = (
    "{% for tool in tools %}{% if loop.first %}{{ tool.function.name }}{% endif %}{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call> #}'
    "{% for message in messages %}<{{ message.role }}>{% endfor %}{{ messages[-1].content[:200] }}"
)
"""Who speaks, and the end of the last one's words: a scripted worker has no room for more."""
CALL: Final = (
    "<think>\nA file is wanted.\n</think>\n\n"
    '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo made-by-codex > made.txt; '
    'cat made.txt"}}\n</tool_call>'
)
ANSWER: Final = "The file made.txt is there."
SETTINGS: Final = """
model = "counter"
model_provider = "here"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.here]
name = "here"
base_url = "http://{address}/v1"
wire_api = "responses"
env_key = "KVRELAY_TOKEN"
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_codex_calls_a_tool_and_answers(tmp_path: Path) -> None:
    program = CODEX.command("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    def says(prompt: str) -> str:
        return ANSWER if "made-by-codex" in prompt else CALL

    async with playing(tmp_path, TEMPLATE, says) as cluster:
        (home / "config.toml").write_text(SETTINGS.format(address=cluster.router.http_address))
        command = (program, "exec", "--skip-git-repo-check", "make a file")
        settings = {"CODEX_HOME": str(home), "KVRELAY_TOKEN": "any"}
        assert ANSWER in await run_agent(command, work, settings)
        assert (work / "made.txt").read_text() == "made-by-codex\n"
        first, second = prompts_of(cluster)
        assert first.startswith("exec_command<system><user>")
        assert "<assistant><tool>" in second
        assert await cluster.metric("kvrelay_http_left_out_total{") == 2, "the search, twice"
