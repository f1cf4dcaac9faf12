"""How good an engine is: perplexity, distance from its source model, and what it writes when it is left alone.

Without a source model nothing here needs torch.
"""
