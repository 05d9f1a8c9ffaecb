"""The lists of packages agree."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools.matrix.combinations import COMBINATIONS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def bounds(lines: list[str]) -> dict[str, SpecifierSet]:
    """The versions that requirements allow, by package."""
    words = (re.split(r"\s*#", line)[0] for line in lines if not line.startswith("-r"))
    return {found.name: found.specifier for found in map(Requirement, filter(None, words))}


INSTALLED = bounds((ROOT / "requirements.txt").read_text().splitlines())


def test_pip_install_has_the_bounds_of_make_setup() -> None:
    assert (
        bounds([line for extra in (PROJECT["dependencies"], *EXTRAS.values()) for line in extra]) == INSTALLED
    )


def test_gpu_check_has_them_too() -> None:
    listed = bounds((ROOT / "requirements-gpu-check.txt").read_text().splitlines())
    for name, versions in listed.items():
        assert not versions or versions == INSTALLED[name], name


def test_first_and_last_python_have_a_combination() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    pythons = [f"3.{minor}" for minor in range(30) if supported.contains(f"3.{minor}.0")]
    assert {one.python for one in COMBINATIONS} == {pythons[0], pythons[-1]}


@pytest.mark.contract
@pytest.mark.parametrize("package", ["megatron-core", "deepspeed"])
def test_the_installed_version_is_a_supported_one(package: str) -> None:
    assert version(package) in INSTALLED[package]
