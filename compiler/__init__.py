"""Model directory to engine directory. Start reading at api.py."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported: a build opens no connection
