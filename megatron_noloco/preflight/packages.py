"""The Python packages: versions that fit together, and the optional ones."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from megatron_noloco.preflight.finding import Finding

# As in pyproject.toml; a test compares them.
NEEDED = {
    "torch": ">=2.6,<2.14",
    "numpy": ">=1.26",
    "deepspeed": "==0.19.8",
    "megatron-core": "==0.16.1",
    "pydantic": ">=2.7,<3",
    "pyzmq": ">=26,<28",
    "rich": ">=13",
    "safetensors": ">=0.4",
    "tensorboard": ">=2.14",
    "tokenizers": ">=0.20",
}
# Those that not everybody needs, and what is lost without.
OPTIONAL = {
    "mpi4py": (">=4.0", "no exchanges over MPI; torchrun and deepspeed work without"),
    "transformers": (">=4.45", "no import, export and generate"),
    "matplotlib": (">=3.8", "no report"),
    "pyarrow": (">=14", "no preprocessing of Parquet"),
    "zstandard": (">=0.22", "no preprocessing of .zst"),
}
APEX = (
    "git clone https://github.com/NVIDIA/apex && cd apex && "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
)
PYTHON = SpecifierSet(">=3.11,<3.14")


def check_packages() -> Iterator[Finding]:
    here = ".".join(map(str, sys.version_info[:3]))
    if not PYTHON.contains(here):
        yield Finding(
            "Python", "problem", f"{here} is not tested", "make setup PYTHON=python3.12, or 3.11 or 3.13"
        )
    found = {name: installed for name in [*NEEDED, *OPTIONAL] if (installed := _installed(name))}
    bounds = NEEDED | {name: bound for name, (bound, _) in OPTIONAL.items()}
    for name in (name for name in NEEDED if name not in found):
        yield Finding(
            "packages", "problem", f"{name} is not installed", f"pip install '{name}{NEEDED[name]}'"
        )
    for name, installed in found.items():
        if not SpecifierSet(bounds[name]).contains(installed, prereleases=True):
            yield Finding(
                "packages",
                "problem",
                f"{name} {installed}; {bounds[name]} is needed",
                f"pip install '{name}{bounds[name]}'",
            )
    for name, (bound, lost) in OPTIONAL.items():
        if name not in found:
            yield Finding("packages", "note", f"no {name}: {lost}", f"pip install '{name}{bound}'")
    shown = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "deepspeed", "megatron-core") if name in found
    )
    yield Finding("packages", "ok", f"Python {here}, {shown}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_kernels(gpu: bool) -> Iterator[Finding]:
    """What makes a GPU faster.

    Args:
        gpu: whether there is one; without, none of them is of use.
    """
    if not gpu:
        return
    transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    yield (
        Finding("kernels", "ok", f"Transformer Engine {version('transformer_engine')}")
        if transformer_engine
        else Finding(
            "kernels",
            "note",
            "no Transformer Engine: layers are not fused, attention is torch's, there is no FP8, and windows and "
            "documents cost a mask of seq_length^2 bytes",
            "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        )
    )
    if importlib.util.find_spec("apex") is None:
        yield Finding(
            "kernels",
            "note",
            "no apex: norms use torch's kernel",
            APEX,
        )
    elif importlib.util.find_spec("amp_C") is None:
        yield Finding(
            "kernels",
            "problem",
            "apex is not NVIDIA's, or was built without its CUDA extensions: PyPI's apex is an unrelated package",
            f"pip uninstall apex && {APEX}",
        )
    else:
        yield Finding("kernels", "ok", "apex with its CUDA extensions")
    flash = importlib.util.find_spec("flash_attn") is not None
    yield Finding(
        "kernels",
        "ok",
        f"flash-attn {version('flash-attn')}: Transformer Engine may choose it"
        if flash
        else "no flash-attn, and no need of it: torch and Transformer Engine bring fused attention of their own",
    )
    missing = [name for name in ("nvcc", "ninja") if shutil.which(name) is None]
    if missing:
        yield Finding(
            "kernels",
            "note",
            f"no {' and no '.join(missing)}: DeepSpeed cannot compile FusedAdam, torch's AdamW is used",
            "pip install ninja, and the CUDA toolkit of torch's CUDA version",
        )
