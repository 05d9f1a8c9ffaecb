"""None of these tests judges how long it takes, so a busy machine fails none.

Hypothesis draws the same cases in each run; HYPOTHESIS_PROFILE=explore draws new ones.
"""

import os

from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
