"""codex, unchanged, with a model that a worker plays: it thinks, calls a tool, and answers."""

from __future__ import annotations

import asyncio
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

from .environments import CODEX

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
    tokenizer = byte_level_tokenizer()
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    config = RouterConfig(
        model_name="counter",
        model_path=tmp_path,
        dtype="float32",
        placement=PlacementMode.DISAGGREGATED,
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        chat_template=template,
        reasoning_parser=ReasoningFormat.THINK,
        max_message_bytes=1 << 20,
        shutdown_grace_seconds=0.0,
    )

    async def play(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        prompt = tokenizer.decode(list(submit.input_ids))
        await saying(ANSWER if "made-by-codex" in prompt else CALL, tokenizer)(worker, submit)

    async with running(config, "aggregated-0") as cluster:
        cluster.workers[0].on_submit = play
        (home / "config.toml").write_text(SETTINGS.format(address=cluster.router.http_address))
        process = await asyncio.create_subprocess_exec(
            *(program, "exec", "--skip-git-repo-check", "make a file"),
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "KVRELAY_TOKEN": "any"},
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
        assert ANSWER in said
        assert (work / "made.txt").read_text() == "made-by-codex\n"
        prompts = [tokenizer.decode(list(one.input_ids)) for one in cluster.workers[0].submits]
        first, second = prompts
        assert first.startswith("exec_command<system><user>")
        assert "<assistant><tool>" in second
        assert await cluster.metric("kvrelay_http_left_out_total{") == 2, "the search, twice"
