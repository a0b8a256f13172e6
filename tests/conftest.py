"""Settings of every test: hypothesis draws the same examples each time and has no deadline, because ranks share the cores."""

from hypothesis import settings

settings.register_profile("shardwise", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("shardwise")
