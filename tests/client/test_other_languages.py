"""The protos, as clients in other languages use them: reflection without any code, k6, and generated JavaScript."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from router_fakes import decode, prefill, reference_ids
from router_harness import harness

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")
K6 = Path(sys.executable).with_name("k6")
K6_SCRIPT = Path(__file__).with_name("k6") / "generate.js"
PROMPT = "once upon a time"


async def run(*command: str | Path, cwd: Path | None = None, timeout_s: float = 60.0) -> str:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(timeout_s):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("token", ["", "secret"])
async def test_buf_curl_needs_nothing_but_reflection(token: str) -> None:
    shown = ("-H", f"authorization: Bearer {token}", "--reflect-header", "*") if token else ()
    async with harness(prefill(), decode(), tokens=(token,) if token else ()) as h:
        url = f"http://{h.router.address}/graftline.v1.RouterService/Generate"
        asked = json.dumps({"text": PROMPT, "max_tokens": 7, "seed": 5})
        out = await run(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *shown, "-d", asked, url)
    decoder, messages = json.JSONDecoder(), []
    while out.strip():
        message, end = decoder.raw_decode(out.lstrip())
        messages.append(message)
        out = out.lstrip()[end:]
    expected = reference_ids(list(PROMPT.encode()), 7, 5)
    assert [token for message in messages for token in message.get("tokenIds", [])] == expected
    assert messages[-1]["finish"]["usage"]["completionTokens"] == 7


@pytest.mark.parametrize("token", ["", "secret"])
async def test_k6_finds_every_answer_of_many_users_right(token: str) -> None:
    async with harness(prefill(), decode(), tokens=(token,) if token else ()) as h:
        settings = {"ROUTER": h.router.address, "USERS": 64, "SECONDS": 1, "TOKEN": token}
        variables = [part for name, value in settings.items() for part in ("-e", f"{name}={value}")]
        summary = await run(K6, "run", "--no-usage-report", "--quiet", *variables, K6_SCRIPT)
    assert "rate=100.00%" in summary
    assert int(re.search(r"iterations\.*: (\d+)", summary)[1]) >= 64  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node.js here")
async def test_generated_javascript_streams_an_answer(tmp_path: Path) -> None:
    """npm's packages are fetched; generator and transport are Connect's, in JavaScript alone."""
    folder = tmp_path / "javascript"
    shutil.copytree(Path(__file__).with_name("javascript"), folder)
    await run("npm", "install", "--silent", "--no-audit", "--no-fund", cwd=folder, timeout_s=300)
    await run(BUF, "generate", ROOT / "proto", "--template", "buf.gen.yaml", cwd=folder)
    async with harness(prefill(), decode()) as h:
        answer = json.loads(await run("node", "smoke.mjs", h.router.address, PROMPT, "9", cwd=folder))
    expected = reference_ids(list(PROMPT.encode()), 9, 5)
    assert answer == {"tokens": expected, "text": bytes(expected).decode(), "output": 9, "workers": 2}
