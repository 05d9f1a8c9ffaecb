"""What the command line needs beyond the library, and what to say where it is not installed."""

import sys
from importlib.util import find_spec

_TRAINER = ("deepspeed", "megatron", "pydantic", "rich", "safetensors", "filelock", "tensorboard")
_USAGE_ERROR = 2


def require_trainer() -> None:
    """Leave the process with one clear line unless the packages of the extra `trainer` are installed."""
    missing = [name for name in _TRAINER if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"megatron_noloco: the trainer is not installed ({', '.join(missing)} missing); "
            f"pip install 'megatron-noloco[trainer]'\n"
        )
        sys.exit(_USAGE_ERROR)
