"""None of these tests judges how long it takes, so a busy machine fails none."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
