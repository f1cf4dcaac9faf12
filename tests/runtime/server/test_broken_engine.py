"""The server around an engine that fails or hangs: what the probes say, and with what it exits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.errors import ResourceError
from llmc.runtime.request import SamplingParams
from llmc.runtime.server import shapes
from llmc.runtime.server.admin import reload_all
from llmc.runtime.server.engine_loop import MAX_FAILED_STEPS
from llmc.runtime.server.job import TicketOptions
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.models import Models
from llmc.runtime.server.serve import Server
from llmc.runtime.server.settings import Settings


def around(llm: Any, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]], **values: Any) -> None:
    """Serve the LLM while the work is done, then until the server ends by itself."""

    async def main() -> None:
        settings = Settings(port=0, **values)
        server = Server(Models({"m": Path("m")}, lambda path: llm, settings, Metrics()), settings)
        serving = asyncio.create_task(server.run())
        url = f"http://127.0.0.1:{server._socket.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await until(http, "/readyz", 200)
            await work(http)
        server._stop()
        await asyncio.wait_for(serving, 60)

    asyncio.run(main())


async def until(http: httpx.AsyncClient, path: str, status: int) -> None:
    for _ in range(3000):
        try:
            if (await http.get(path)).status_code == status:
                return
        except httpx.ConnectError:
            pass
        await asyncio.sleep(0.02)
    raise AssertionError(f"{path} never said {status}")


def test_an_engine_that_fails_ends_the_server_with_5(kit: Any) -> None:
    """R11."""
    llm = kit.llm()

    def fail(batch: Any) -> Any:
        raise RuntimeError("the device is gone")

    llm.executor.step = fail

    async def work(http: httpx.AsyncClient) -> None:
        for number in range(MAX_FAILED_STEPS):
            body = {"prompt": [7], "stream": number % 2 == 0}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 500 and "device" not in answer.text

    with pytest.raises(ResourceError) as caught:
        around(llm, work)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_api_03_a_failure_within_a_stream_is_its_last_event(kit: Any, path: str) -> None:
    """Valid events, then the error, then the end of the connection: no [DONE], no second head."""
    tokenizer = kit.tokenizer(chat_template="{{ messages[0].content }}")
    llm = kit.llm(kit.scripted({tuple(kit.ids("a")): kit.ids("bcdefghij")}), tokenizer=tokenizer)
    llm.executor.fail_at = 4
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}

    async def work(http: httpx.AsyncClient) -> None:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        body = json.dumps(prompt | {"max_tokens": 9, "ignore_eos": True, "stream": True})
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        received = await asyncio.wait_for(reader.read(), 60)  # to the end of the connection
        writer.close()
        assert received.count(b"HTTP/1.1") == 1 and b"[DONE]" not in received and b"launch" not in received
        events = [json.loads(line[6:]) for line in received.split(b"\r\n") if line.startswith(b"data: ")]
        assert len(events) > 3 and all("choices" in event for event in events[:-1])
        assert events[-1]["error"]["code"] == "generation_failed"
        assert (await http.post(path, json=prompt | {"max_tokens": 2})).status_code == 200

    around(llm, work)


def test_answers_of_many_numbers_are_made_beside_the_event_loop(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may want a million; probes and streams go on meanwhile."""
    makers: list[str] = []
    for name in ("CompletionLogprobs", "chat_logprobs"):
        make = getattr(shapes, name)

        def watched(*arguments: Any, make: Callable[..., Any] = make) -> Any:
            makers.append(threading.current_thread().name.rstrip("_0123456789"))
            return make(*arguments)

        monkeypatch.setattr(shapes, name, watched)
    tokenizer = kit.tokenizer(chat_template="{{ messages[0].content }}")

    async def work(http: httpx.AsyncClient) -> None:
        body = {"max_tokens": 2, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body | {"prompt": [7], "logprobs": 2})
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 2
        messages = [{"role": "user", "content": "a"}]
        answer = await http.post("/v1/chat/completions", json=body | {"messages": messages, "logprobs": True})
        assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 2

    around(kit.llm(tokenizer=tokenizer), work)
    assert set(makers) == {"encode"}


def test_an_engine_that_hangs_is_not_ready(kit: Any) -> None:
    """R9: it is alive but not ready; once it goes on, it is ready again and has lost nothing."""
    llm, release = kit.llm(), threading.Event()
    step = llm.executor.step
    llm.executor.step = lambda batch: (release.wait(60), step(batch))[1]

    async def work(http: httpx.AsyncClient) -> None:
        request = asyncio.create_task(http.post("/v1/completions", json={"prompt": [7], "max_tokens": 2}))
        await until(http, "/readyz", 503)
        assert (await http.get("/livez")).status_code == 200
        release.set()
        assert (await request).status_code == 200
        await until(http, "/health", 200)

    around(llm, work, stall_timeout=1.5)


def test_a_reload_in_place_of_an_engine_that_hangs(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is given up after the stall timeout; the old engine stays, and a reload after its step goes well."""
    llm, release = kit.llm(), threading.Event()
    step = llm.executor.step
    llm.executor.step = lambda batch: (release.wait(60), step(batch))[1]
    settings = Settings(reload_in_place=True, stall_timeout=0.3)

    async def main() -> None:
        engines = iter([llm, kit.llm()])
        models = Models({"m": Path("m")}, lambda path: next(engines), settings, Metrics())
        models.on_failure = lambda: pytest.fail("nothing has failed")
        (model,) = models.all.values()
        await models.load(model)
        job = models.submit(model, [[7]], SamplingParams(max_tokens=2), TicketOptions())
        while model.running.is_alive(0.2):
            await asyncio.sleep(0.02)
        old = model.running
        assert not await asyncio.wait_for(reload_all(models), 20)
        assert model.running is old and not models._retired
        assert "m: can't be reloaded, the old engine goes on: its requests can't end: a step has taken" in caplog.text
        assert "longer than --stall-timeout, 0.3 s; if it hangs, start the server anew" in caplog.text
        release.set()
        assert await asyncio.wait_for(reload_all(models), 20)
        assert model.running is not old
        job.close()
        await models.close()

    with caplog.at_level("ERROR", "llmc.serve"):
        asyncio.run(main())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_reload_for_which_there_is_no_room(kit: Any, in_place: bool, caplog: pytest.LogCaptureFixture) -> None:
    happened: list[str] = []

    def load(path: Path) -> Any:
        happened.append("load")
        if happened.count("load") == 3:
            raise ResourceError("no room")
        llm = kit.llm()
        llm.close = lambda: happened.append("close")
        return llm

    async def main() -> None:
        models = Models({"m": Path("m")}, load, Settings(reload_in_place=in_place), Metrics())
        models.on_failure = lambda: happened.append("failure")
        (model,) = models.all.values()
        await models.load(model)
        await models.load(model)
        await asyncio.gather(*models._retired)
        assert happened == (["load", "close", "load"] if in_place else ["load", "load", "close"])
        assert not await reload_all(models)
        if in_place:
            assert happened[3:] == ["close", "load", "failure"]
            assert "there is no engine any more: no room" in caplog.text
        else:
            assert happened[3:] == ["load"]
            assert "the old engine goes on: no room; for a moment there are two: start the server with" in caplog.text
        await models.close()

    with caplog.at_level("ERROR", "llmc.serve"):
        asyncio.run(main())
