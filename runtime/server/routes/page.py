"""The page to chat, at /."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

FILE = Path(__file__).parents[1] / "page.html"


async def page(request: Request) -> Response:
    """One file, which may run its own script and style, and talk to this server; nothing else."""
    text, policy = _loaded()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
    return HTMLResponse(text, headers=headers)


@cache
def _loaded() -> tuple[str, str]:
    """The page, and a policy that allows exactly its script and style, by their hashes."""
    text = FILE.read_text(encoding="utf-8")
    policy = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy.append(f"{kind}-src 'sha256-{digest}'")
    return text, "; ".join([*policy, "frame-ancestors 'none'"])
