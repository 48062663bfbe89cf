"""Who may come in by the HTTP door: tokens, TLS, the pages of browsers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.net import tls
from kvrelay.net.tls import TlsFiles
from kvrelay.router.config import RouterConfig
from tests.certificates import Authority

from ..scripted_worker import LENGTH
from .client import (
    HEAD,
    PROMPT,
    connection,
    counting,
    trusting,
    until_closed,
)

TOKENS = """
[[token]]
name = "alice"
token = "alpha"
max_live_requests = 1
max_queued_prompt_tokens = 3
[[token]]
name = "operator"
token = "omega"
rights = ["admin"]
"""


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_tokens(http_config: RouterConfig, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with counting(replace(http_config, auth_token_file=path)) as (_, http):

        async def call(token: str | None, **change: Any) -> httpx.Response:
            headers = {} if token is None else bearer(token)
            return await http.post("/v1/completions", json={**PROMPT, **change}, headers=headers)

        for token in (None, "beta"):
            refused = await call(token)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models", headers=bearer(token or "x"))).status_code == 401
            assert (await http.get("/metrics", headers=bearer(token or "x"))).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert (await call("alpha")).status_code == 200
        lacking = await call("omega")
        assert (lacking.status_code, lacking.json()["error"]["type"]) == (403, "permission_error")
        assert (await http.get("/v1/models", headers=bearer("omega"))).status_code == 200
        assert (await http.get("/metrics", headers=bearer("alpha"))).status_code == 403
        assert (await http.get("/metrics", headers=bearer("omega"))).status_code == 200
        assert (await call("alpha", priority=-1)).status_code == 403
        limited = await call("alpha", prompt=[[1], [2]])
        assert (limited.status_code, limited.json()["error"]["param"]) == (400, "prompt")
        assert "max_live_requests" in limited.json()["error"]["message"]
        long = await call("alpha", prompt=[[1, 2, 3, 4]])
        assert (long.status_code, long.json()["error"]["param"]) == (400, "prompt")
        assert "max_queued_prompt_tokens" in long.json()["error"]["message"]
        twice = [("authorization", "Bearer alpha"), ("authorization", "Bearer alpha")]
        assert (await http.get("/v1/models", headers=twice)).status_code == 401
        for key, status in (("alpha", 200), ("beta", 401), ("", 401)):
            keyed = await http.get("/v1/models", headers={"x-api-key": key})
            assert keyed.status_code == status
        both = {**bearer("alpha"), "x-api-key": "unused"}
        assert (await http.get("/v1/models", headers=both)).status_code == 200


async def test_tls_and_a_certificate_that_is_replaced(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)
    before, after = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    files = before.issue()
    shown = TlsFiles(files.cert, files.key)
    async with counting(replace(http_config, front_tls=shown)) as (cluster, plain):
        url = f"https://{cluster.router.http_address}/health"
        with pytest.raises(httpx.TransportError):
            await plain.get("/health")
        async with httpx.AsyncClient(verify=trusting(before)) as http:
            assert (await http.get(url)).status_code == 200
        new = after.issue()
        files.cert.write_bytes(new.cert.read_bytes())
        files.key.write_bytes(new.key.read_bytes())
        async with httpx.AsyncClient(verify=trusting(after)) as http:
            assert (await http.get(url)).status_code == 200
        files.cert.write_text("no certificate")
        async with httpx.AsyncClient(verify=trusting(after)) as http:
            assert (await http.get(url)).status_code == 200


async def test_a_body_that_nobody_reads_ends_its_connection(
    http_config: RouterConfig, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    config = replace(http_config, auth_token_file=path)
    for head in (HEAD, HEAD.replace(b"completions", b"nothing")):
        async with counting(config) as (cluster, _), connection(cluster) as (reader, writer):
            writer.write(head + b"content-length: 100\r\n\r\n{")
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 40")


async def test_a_page_whose_name_points_at_this_machine(http_config: RouterConfig) -> None:
    named = replace(http_config, http_origins="https://chat.example:8443")
    async with counting(named) as (cluster, http):
        port = str(cluster.router.http_address).rsplit(":", 1)[1]
        for host, status in (
            (f"evil.example:{port}", 403),
            ("[", 403),
            ("chat.example", 200),
            (f"localhost:{port}", 200),
            ("[::1]:80", 200),
            (f"127.0.0.1:{port}", 200),
        ):
            headers = {"host": host, "origin": f"http://{host}"}
            if host == "chat.example":
                headers["origin"] = "https://chat.example:8443"
            answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
            assert answer.status_code == status, host


async def test_pages_of_other_origins(http_config: RouterConfig) -> None:
    here, there = "https://chat.example", "https://evil.example"
    async with counting(http_config) as (cluster, http):
        own = f"http://{cluster.router.http_address}"
        for origin, status in ((there, 403), ("null", 403), (own, 200)):
            answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": origin})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers
        assert len(cluster.prefill.submits) == 1
    async with counting(replace(http_config, http_origins=f"https://a.b, {here}")) as (_, http):
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": here})
        assert answer.headers["access-control-allow-origin"] == here
        asked = {"origin": here, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        assert (await http.options("/v1/completions", headers=asked)).status_code == 200
        asked["origin"] = there
        assert (await http.options("/v1/completions", headers=asked)).status_code == 400
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": there})
        assert answer.status_code == 403
    async with counting(replace(http_config, http_origins="*")) as (_, http):
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": there})
        assert answer.headers["access-control-allow-origin"] == "*"


async def test_a_router_that_drains_is_not_healthy(http_config: RouterConfig) -> None:
    async with counting(replace(http_config, shutdown_grace_seconds=20.0)) as (cluster, http):
        cluster.decode.on_submit = None
        serving = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
        submit = await cluster.decode.submitted()
        assert (await http.get("/health")).status_code == 200
        stopping = asyncio.create_task(cluster.router.stop())
        async with asyncio.timeout(60):
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.05)
        cluster.decode.say(submit, 1, (5,) * 7, end=LENGTH)
        assert (await serving).status_code == 200
        await stopping
