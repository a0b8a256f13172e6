"""Settings of every test here: hypothesis draws the same examples each time and has no deadline, because two cores are shared by all ranks."""

from hypothesis import settings

settings.register_profile("shardwise", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("shardwise")
