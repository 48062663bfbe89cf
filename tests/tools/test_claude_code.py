"""claude-code, unchanged, with a model that a worker plays: it thinks, calls a tool, and answers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final

import pytest

from kvrelay.router.config import PlacementMode, ReasoningFormat, RouterConfig
from kvrelay.v1 import worker_pb2
from tests.router.cluster import running
from tests.router.http.test_tools import saying
from tests.router.scripted_worker import ScriptedWorker
from tests.router.toy_tokenizers import byte_level_tokenizer

from .environments import CLAUDE_CODE

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
    tokenizer = byte_level_tokenizer()
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "agent"\ntoken = "secret"\n')
    config = RouterConfig(
        model_name="counter",
        model_aliases=(MODEL,),
        model_path=tmp_path,
        dtype="float32",
        placement=PlacementMode.DISAGGREGATED,
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        auth_token_file=tokens,
        chat_template=template,
        reasoning_parser=ReasoningFormat.THINK,
        max_message_bytes=4 << 20,
        shutdown_grace_seconds=0.0,
    )

    async def play(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        prompt = tokenizer.decode(list(submit.input_ids))
        await saying(ANSWER if "made-by-claude" in prompt else CALL, tokenizer)(worker, submit)

    async with running(config, "aggregated-0") as cluster:
        cluster.workers[0].on_submit = play
        settings = {
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": f"http://{cluster.router.http_address}",
            "ANTHROPIC_API_KEY": "secret",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        process = await asyncio.create_subprocess_exec(
            program,
            *("-p", "make a file", "--model", MODEL, "--output-format", "json"),
            *("--allowed-tools", "Bash"),
            cwd=work,
            env={**os.environ, **settings},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said = (await process.communicate())[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said
        result = json.loads(said.splitlines()[-1])
        assert (result["result"], result["is_error"]) == (ANSWER, False)
        assert (work / "made.txt").read_text() == "made-by-claude\n"
        prompts = [tokenizer.decode(list(one.input_ids)) for one in cluster.workers[0].submits]
        print(prompts)
        assert any(one.startswith("Bash<system><user>") for one in prompts)
        assert any("<assistant><tool>" in one for one in prompts)
