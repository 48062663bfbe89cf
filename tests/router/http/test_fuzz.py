"""Bodies that nobody has thought of."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.router.config import RouterConfig

from .client import (
    CHAT,
    counting,
    is_served,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


FIELDS = [
    "prompt",
    "messages",
    "model",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
    "return_token_ids",
    "priority",
    "cache_salt",
    "user",
    "metadata",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "guided_regex",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "tokens",
    "suffix",
]


PLAUSIBLE: dict[str, list[Any]] = {
    "prompt": [[1, 2], "hi", ["a", [3]], []],
    "messages": [CHAT["messages"], [{"role": "x", "content": [{"type": "text", "text": "a"}]}]],
    "n": [1, 3],
    "stream": [True, False],
    "echo": [True],
    "logprobs": [0, 2, True],
    "prompt_logprobs": [0, 1],
    "max_tokens": [1, 3],
    "tokens": [[1, 2]],
    "structured_outputs": [{"json": {}}, {"choice": ["a"]}, {"regex": "("}, {"grammar": "x"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
}


BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2).flatmap(
    lambda body: st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(list(values)) for name, values in PLAUSIBLE.items()}
    ).map(lambda known: {**known, **body})
)


@pytest.mark.parametrize("bodies", [40, pytest.param(150, marks=pytest.mark.slow)])
async def test_fuzzed_bodies(http_config: RouterConfig, bodies: int) -> None:
    """No body makes the router fail, and none leaves a request behind."""
    async with counting(http_config) as (cluster, http):
        loop = asyncio.get_running_loop()

        @settings(
            max_examples=bodies,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            body=BODIES,
            path=st.sampled_from(
                ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
            ),
        )
        def send(body: dict[str, Any], path: str) -> None:
            answer = asyncio.run_coroutine_threadsafe(
                http.post(path, content=json.dumps(body).encode()), loop
            ).result(30)
            assert answer.status_code in {200, 400, 404}, (answer.status_code, answer.text)
            assert "event: error" not in answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

        await asyncio.to_thread(send)
        assert (await cluster.server_info()).live_requests == 0
        await is_served(http)
