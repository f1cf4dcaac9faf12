"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from llmc.runtime.request import SamplingParams
from llmc.runtime.server import shapes
from llmc.runtime.server.body import read
from llmc.runtime.server.errors import JsonResponse
from llmc.runtime.server.job import Job, TicketOptions, failure
from llmc.runtime.server.models import Models
from llmc.runtime.server.routes.chat import salt
from llmc.runtime.server.routes.completions import encode_prompts
from llmc.runtime.server.schema.embeddings import EmbeddingRequest
from llmc.runtime.server.stream import finish


async def embeddings(request: Request) -> Response:
    """Vectors of texts: what enters the model's head, of the last token or the mean."""
    models: Models = request.app.state.models
    body = await read(request, models, EmbeddingRequest)
    model = models.find(body.model)
    prompts = await encode_prompts(models, model, body.input)
    options = TicketOptions(salt=salt(request, body.cache_salt), pooling=body.pooling or "last")
    job = models.submit(model, prompts, SamplingParams(max_tokens=0), options)
    await finish(request, job, job.results())
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(job, i, body.encoding_format or "float")}
        for i in range(len(prompts))
    ]
    usage = shapes.usage(job)
    usage.pop("completion_tokens")
    return JsonResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def _vector(job: Job, index: int, encoding: str) -> Any:
    request = job.tickets[index].request
    vector = None if request is None else request.embedding
    if vector is None:
        raise failure(None)
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return np.asarray(vector, np.float64).round(9).tolist()
