"""/tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llmc.runtime.server.body import read
from llmc.runtime.server.errors import ApiError, JsonResponse
from llmc.runtime.server.models import Models
from llmc.runtime.server.routes.chat import encode
from llmc.runtime.server.schema.text import DetokenizeRequest, TokenizeRequest


async def tokenize(request: Request) -> Response:
    """A text or a chat to tokens."""
    models: Models = request.app.state.models
    body = await read(request, models, TokenizeRequest)
    model = models.find(body.model)
    tokenizer, prompt = model.tokenizer, body.prompt
    if (prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    if prompt is None:
        ids = await encode(models, model, body)
    else:
        to_ids = tokenizer.encode_plain if body.add_special_tokens is False else tokenizer.encode
        ids = await models.in_thread(lambda: to_ids(prompt))
    texts = [tokenizer.vocabulary.piece(i).decode(errors="replace") for i in ids] if body.return_token_strs else None
    return JsonResponse(
        {"count": len(ids), "max_model_len": model.context, "tokens": ids, "token_strs": texts},
    )


async def detokenize(request: Request) -> Response:
    """Tokens to text."""
    models: Models = request.app.state.models
    body = await read(request, models, DetokenizeRequest)
    model = models.find(body.model)
    tokenizer, size = model.tokenizer, model.llm.vocab_size
    for token in body.tokens:
        if token >= size:
            raise ApiError(400, f"{token} is not a token id below {size}", param="tokens")
    text = await models.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JsonResponse({"prompt": text})
