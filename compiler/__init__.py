"""Model directory to engine directory. Start reading at api.py."""
