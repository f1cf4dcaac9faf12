"""The HTTP server of `llmc serve`: OpenAI's API in front of engines. Needs the extra ``serve``."""
