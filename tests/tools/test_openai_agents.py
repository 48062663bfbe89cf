"""openai-agents, unchanged, with a model that a worker plays: it thinks, calls a tool, and answers.

Its default way is the Responses API.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from .environments import OPENAI_AGENTS
from .played_model import playing, prompts_of, run_agent

PROGRAM: Final = Path(__file__).parent / "clients" / "agents_of_openai.py"
TEMPLATE: Final = (
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call> #}'
    "{% for message in messages %}<{{ message.role }}>{{ message.reasoning_content }}|"
    "{{ message.content }}{% endfor %}"
)
CALL: Final = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
ANSWER: Final = "It is sunny."


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_agent_calls_a_tool_and_answers(tmp_path: Path) -> None:
    """The answer is the same whole and streamed, and the reasoning comes back with the history."""
    python = OPENAI_AGENTS.command("python")

    def says(prompt: str) -> str:
        return ANSWER if "Köln: sunny" in prompt else CALL

    async with playing(tmp_path, TEMPLATE, says) as cluster:
        address = f"http://{cluster.router.http_address}/v1"
        printed = await run_agent([python, PROGRAM, address], tmp_path, {})
        assert printed.splitlines() == [ANSWER] * 2
        _, second, _, fourth = prompts_of(cluster)
        for prompt in (second, fourth):
            assert prompt.endswith("<assistant>Hm.|I look.<tool>|Köln: sunny")
