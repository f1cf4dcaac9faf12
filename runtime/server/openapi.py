"""The description of the API at /openapi.json, and the page /docs, both made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from llmc.runtime.server.errors import JsonResponse

if TYPE_CHECKING:
    from llmc.runtime.server.app import Endpoint

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    "400": "A field is wrong: `param` names it.",
    "401": "A key is needed.",
    "403": "The Host or Origin is not allowed.",
    "404": "No such model or address.",
    "408": "The request came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "The queue is full; see Retry-After.",
    "431": "The head is too large.",
    "500": "The engine failed at this request.",
    "503": "Not ready, shutting down, or too long in the queue.",
    "504": "The request took too long.",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}"
    "td,th{border:1px solid #8886;padding:.2rem .5rem;text-align:left;vertical-align:top}code{font-size:.9em}"
)


async def openapi(request: Request) -> Response:
    """The description."""
    return JsonResponse(describe(request.app.state.endpoints))


async def docs(request: Request) -> Response:
    """The description for people."""
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
    return HTMLResponse(page(request.app.state.endpoints), headers=headers)


def describe(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    endpoints = list(endpoints)
    bodies = {e.body: None for e in endpoints if e.body is not None}
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for e in endpoints:
        paths.setdefault(re.sub(r":path", "", e.path), {})[e.method.lower()] = _operation(e)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc", "version": version("llmc-engine")},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def page(endpoints: Iterable[Endpoint]) -> str:
    """HTML without anything from elsewhere."""
    endpoints = list(endpoints)
    schemas = describe(endpoints)["components"]["schemas"]
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>llmc API</title>"]
    parts += ['<meta name=viewport content="width=device-width">', f"<style>{STYLE}</style><main><h1>llmc API</h1>"]
    parts.append(
        '<p>For programs: <a href="openapi.json">openapi.json</a>. Errors have the shape of OpenAI\'s API.</p>'
    )
    for e in endpoints:
        parts.append(f"<h2><code>{e.method} {escape(e.path.replace(':path', ''))}</code></h2><p>{escape(e.text)}</p>")
        if e.body is not None:
            parts.append("<table><tr><th>field<th>accepted<th>note</tr>")
            parts += [
                f"<tr><td><code>{escape(name)}</code><td>{escape(accepted)}<td>{escape(note)}</tr>"
                for name, accepted, note in fields(schemas[e.body.__name__], schemas)
            ]
            parts.append("</table>")
    return "\n".join([*parts, "</main></html>"])


def fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, what is accepted, note) of each field of a request."""
    for name, value in schema["properties"].items():
        required = " (required)" if name in schema.get("required", ()) else ""
        branches = value.get("anyOf", [value])
        note = value.get("description") or next((b["description"] for b in branches if "description" in b), "")
        accepted = " or ".join(text for b in branches if (text := _accepted(b)))
        yield name, accepted + required, note


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.gives: {"schema": {"type": "object" if "json" in endpoint.gives else "string"}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {"summary": endpoint.text, "responses": {"200": {"description": "OK"}}}
    operation["responses"]["200"]["content"] = content
    is_probe = endpoint.gives == "text/plain"
    error = (
        {"text/plain": {"schema": {"type": "string"}}} if is_probe else _json({"$ref": "#/components/schemas/Error"})
    )
    operation["responses"] |= {
        status: {"description": text, "content": error | (_json(ERROR) if is_probe else {})}
        for status, text in STATUSES.items()
    }
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": _json(schema)}
    names = re.findall(r"{(\w+)", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for n in names
        ]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _accepted(schema: dict[str, Any]) -> str:
    """In words."""
    if schema.get("type") == "null":
        return ""
    if "$ref" in schema:
        return f"object {schema['$ref'].rpartition('/')[2]}"
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_accepted, schema["anyOf"])))
    kind = {"array": "list", "object": "object"}.get(schema.get("type", ""), schema.get("type", "anything"))
    if kind == "list":
        limit = f"up to {schema['maxItems']} of " if "maxItems" in schema else "of "
        return f"list, {limit}{_accepted(schema.get('items', {}))}"
    if kind == "object":
        values = schema.get("additionalProperties")
        inner = f" of {_accepted(values)}" if isinstance(values, dict) else ""
        return f"object, up to {schema['maxProperties']} entries{inner}" if "maxProperties" in schema else "object"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    above = "more than " if "exclusiveMinimum" in schema else ""
    bounds = f" {above}{low} … {schema['maximum']}" if low is not None and "maximum" in schema else ""
    length = f" of {schema.get('minLength', 0)} … {schema['maxLength']} characters" if "maxLength" in schema else ""
    return f"{kind}{bounds}{length}"
