"""`make matrix`: which environments it makes, and what it shows; without making one."""

from packaging.specifiers import SpecifierSet

from tests.unit.test_requirements import INSTALLED, PROJECT
from tools.matrix.combinations import COMBINATIONS


def test_every_supported_python_has_a_combination() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    pythons = {f"3.{minor}" for minor in range(30) if supported.contains(f"3.{minor}.0")}
    assert {one.python for one in COMBINATIONS} == pythons


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    (oldest,) = (one for one in COMBINATIONS if one.name == "oldest")
    for line in oldest.constraints:
        name, _, version = line.partition("==")
        assert f">={version.removesuffix('.*')}" in map(str, INSTALLED[name])
    bounded = {name for name, versions in INSTALLED.items() if ">=" in str(versions)}
    assert {line.partition("==")[0] for line in oldest.constraints} == bounded
