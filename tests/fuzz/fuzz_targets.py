"""Readers of bytes that nobody vouches for: each takes any bytes, or refuses them with an error of ours.

`TARGETS` maps a name to a function of bytes that raises on what must not happen. The corpus beside this file holds
inputs to begin with, among them those that once broke something.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h11
import numpy as np
import uvicorn
from pydantic import BaseModel, ValidationError

from llmc.compiler.gguf_file import GgufFile
from llmc.compiler.model_directory import ModelDirectory
from llmc.errors import LlmcError
from llmc.runtime import plan_file
from llmc.runtime.adapter_file import CONFIG, WEIGHTS, read_adapter
from llmc.runtime.batch import Batch
from llmc.runtime.batch_file import run_lines, to_line
from llmc.runtime.chat_template import ChatTemplate
from llmc.runtime.constraints import ConstraintSpec, compile_constraint
from llmc.runtime.detokenizer import ByteDecoder, TextStream
from llmc.runtime.engine import load_engine
from llmc.runtime.llm import LLM
from llmc.runtime.manifest import Manifest
from llmc.runtime.safetensors_file import read_header
from llmc.runtime.scheduler import SchedulerConfig
from llmc.runtime.server.app import ENDPOINTS, make_app
from llmc.runtime.server.body import parse_json
from llmc.runtime.server.errors import ApiError, from_validation
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.models import Models
from llmc.runtime.server.protocol import protocol_class
from llmc.runtime.server.settings import Keys, Settings
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.tool_calls.base import ToolCallParser, joined
from llmc.runtime.tool_calls.choice import FORMATS

CORPUS = Path(__file__).parent / "corpus"
VOCAB = 384
GOLDEN = Path(__file__).parents[1] / "golden/format-1/engine"
TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": TOOL}} for n in ("weather", "now")]


def safetensors(data: bytes) -> None:
    """Accepted ranges lie in the file, one after the other."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        header = read_header(file.fileno(), "x")
    end = header.data_begin
    for tensor in header.tensors.values():
        assert tensor.begin == end <= tensor.end
        end = tensor.end
    assert end == len(data)


def gguf(data: bytes) -> None:
    """What is accepted can be read to its end."""
    folder = _folder({"x.gguf": data})
    for tensor in GgufFile.open(ModelDirectory(folder), "x.gguf").tensors.values():
        if len(tensor.shape) == 2 and tensor.shape[0]:
            assert tensor.rows(tensor.shape[0] - 1, tensor.shape[0]).shape == (1, tensor.shape[1])


def manifest(data: bytes) -> None:
    """What is accepted is written as it was read."""
    found = Manifest.from_bytes(data, "x")
    assert Manifest.from_bytes(found.to_bytes(), "x") == found


def plan(data: bytes) -> None:
    """What is accepted is written as it was read. (That kernels check it too is tests/runtime/test_engine.py's.)"""
    engine = _engine()
    weights = {name: (w.dtype, w.shape) for name, w in engine.weights.items()}
    found = plan_file.from_bytes(data, weights, engine.limits, "x")
    assert plan_file.from_bytes(plan_file.to_bytes(found), weights, engine.limits, "x") == found


def tokenizer(data: bytes) -> None:
    """What is accepted takes texts."""
    found = Tokenizer(data.decode(errors="replace"))
    ids = found.encode("Hello wörld 😀\n")
    found.decode(ids)
    if ids:
        found.vocabulary.piece(ids[0])
    found.close()


def template(data: bytes) -> None:
    """The template is the text before the first NUL, the messages are the JSON behind it."""
    source, _, messages = data.partition(b"\0")
    value: Any = [{"role": "user", "content": "hi"}]
    if messages:
        try:
            value = json.loads(messages)
        except (ValueError, RecursionError):
            return
    found = ChatTemplate(source.decode(errors="replace"), {"bos_token": "<s>"})
    try:
        assert isinstance(found.render(value, tools=TOOLS), str)
    finally:
        found.close()


def request(data: bytes) -> None:
    """The first byte chooses the route, the rest is the body."""
    schemas = [e.body for e in ENDPOINTS if e.body is not None]
    schema: type[BaseModel] = schemas[data[0] % len(schemas)] if data else schemas[0]
    try:
        value = parse_json(data[1:])
        if not isinstance(value, dict):
            return
        try:
            found: Any = schema.model_validate(value)
        except ValidationError as problem:
            error = from_validation(problem, value)
            json.dumps(error.to_json(), ensure_ascii=False).encode()
            assert error.status == 400
            return
        for name in ("sampling", "constraint"):
            if hasattr(found, name):
                getattr(found, name)()
    except ApiError as problem:
        assert problem.status == 400


def grammar(data: bytes) -> None:
    """A constraint as it comes with a request; the first byte chooses its kind. Compiled in a process of its own."""
    kinds = ("json_schema", "regex", "grammar", "choice")
    text = data[1:].decode(errors="replace")
    value: Any = {kinds[data[0] % 4] if data else "regex": text}
    if "choice" in value:
        value["choice"] = text.split("\n")
    spec = ConstraintSpec.of(value)
    if spec is not None:
        compiled = compile_constraint(spec, _llm().tokenizer)  # type: ignore[arg-type]
        compiled.mask()


def batch(data: bytes) -> None:
    """A file of requests: as many records as lines, each is JSON in UTF-8."""
    lines = [line for line in data.split(b"\n") if line.strip()][:8]
    records = list(run_lines(_llm(), lines, {}))
    assert len(records) == len(lines)
    for record in records:
        assert json.loads(to_line(record)) == record


def adapter(data: bytes) -> None:
    """adapter_config.json is what comes before the first NUL; then the tensors."""
    config, _, weights = data.partition(b"\0")
    for module in read_adapter(_folder({CONFIG: config, WEIGHTS: weights})).modules.values():
        assert module.a.shape[0] == module.b.shape[1]


def tools(data: bytes) -> None:
    """The first byte chooses the format, the second where the text is cut; pieces change nothing, text is not lost."""
    if len(data) < 2:
        return
    name, text = sorted(FORMATS)[data[0] % len(FORMATS)], data[2:].decode(errors="replace")
    size = data[1] % 16 + 1

    def parse(pieces: list[str]) -> tuple[str, list[Any]]:
        parser = ToolCallParser(FORMATS[name], TOOLS)
        rest, calls = joined([d for piece in pieces for d in parser.feed(piece)] + parser.feed("", final=True))
        return rest, [(call.name, call.arguments) for call in calls]

    whole = parse([text])
    assert parse([text[i : i + size] for i in range(0, len(text), size)]) == whole
    assert whole[1] or whole[0] == text


def detokenizer(data: bytes) -> None:
    """Tokens are bytes, the first three are a stop string: what streams is what a whole answer has (R14)."""
    vocabulary = _llm().tokenizer.vocabulary  # type: ignore[union-attr]
    stop = [data[:3].decode("latin-1")] if len(data) > 3 else []
    stream = TextStream(ByteDecoder(vocabulary, skip_special=True, at_start=True), vocabulary, stop)
    parts, found = [], None
    for byte in data[3:]:
        found = stream.append(byte + 3)
        parts.append(stream.take())
        if found is not None:
            break
    else:
        found = stream.flush()
    parts.append(stream.take())
    text = data[3:].decode(errors="replace")
    if stop and stop[0] in text:
        assert found == stop[0] and "".join(parts) == text[: text.index(stop[0])]
    else:
        assert found is None and "".join(parts) == text


def http(data: bytes) -> None:
    """What a connection gets, cut at the first byte: its answers are HTTP, and none of them is a 5xx."""
    loop, connect = _connections()
    transport, connection = connect()
    connection.connection_made(transport)
    cut = data[0] if data else 0
    for part in (data[1 : 1 + cut], data[1 + cut :]):
        if part and not transport.closed:
            connection.data_received(part)
            _turn(loop)
    if not transport.closed:
        connection.eof_received()
    _turn(loop)
    connection.connection_lost(None)
    _turn(loop)
    for status in re.findall(rb"(?:^|\r\n)HTTP/1\.1 (\d+)", transport.sent):
        assert int(status) < 500, transport.sent
    if transport.sent:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        client.receive_data(transport.sent)
        assert isinstance(client.next_event(), h11.Response | h11.InformationalResponse)


TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (safetensors, gguf, manifest, plan, tokenizer, template, request, grammar, batch, adapter, tools,
              detokenizer, http)
}  # fmt: skip


def run(name: str, data: bytes) -> None:
    """Feed a target; errors of ours are how it refuses."""
    try:
        TARGETS[name](data)
    except (LlmcError, ApiError) as problem:
        str(problem).encode()


def corpus(name: str) -> list[bytes]:
    """Inputs to begin with."""
    files = sorted((CORPUS / name).iterdir())
    own = {"manifest": "engine.json", "plan": "plan.json"}
    return [file.read_bytes() for file in files] + ([(GOLDEN / own[name]).read_bytes()] if name in own else [])


# -- what targets work on ---------------------------------------------------------------------------------------------


def _folder(files: dict[str, bytes]) -> Path:
    folder = _scratch()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


_engine = cache(lambda: load_engine(GOLDEN))


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="llmc-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


class _Executor:
    """Its model says "H" and nothing else."""

    def step(self, batch: Batch) -> Any:
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        logits[:, 75] = 1
        return logits

    def embed(self, batch: Batch, *, logits: bool) -> Any:
        return np.ones((len(batch.logit_rows), 4), np.float32), self.step(batch) if logits else None


def _new_llm() -> LLM:
    config = SchedulerConfig(64, 64, 8, 8, 64, 16)
    source = (CORPUS / "tokenizer/bytes.json").read_text()
    tokens = Tokenizer(source, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return LLM.from_parts(_Executor(), config, vocab_size=VOCAB, tokenizer=tokens, eos_token_ids=(2,))


@cache
def _llm() -> LLM:
    return _new_llm()


class _Transport(asyncio.Transport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.sent, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@cache
def _connections() -> tuple[asyncio.AbstractEventLoop, Callable[[], tuple[_Transport, Any]]]:
    loop = asyncio.new_event_loop()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    settings = Settings()
    models = Models({"m": GOLDEN}, lambda path: _new_llm(), settings, Metrics())
    loop.run_until_complete(models.load(models.all["m"]))
    app = make_app(models, Keys(()), settings, "127.0.0.1")
    config = uvicorn.Config(app, http=protocol_class(settings), ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()

    def connect() -> tuple[_Transport, Any]:
        connection = config.http_protocol_class(  # type: ignore[union-attr]
            config=config, server_state=state, app_state={}, _loop=loop
        )
        return _Transport(), connection

    return loop, connect


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Until nothing is left to do at once."""
    problems: list[Any] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    for _ in range(30):
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert not problems, problems
