"""The settings of the method and of a federation: type, bound, default and meaning of each, defined once.

The JSON blocks `noloco` and `federation`, `config --explain`, the tables of the documentation, the library and
`attach` are made from these classes. A rule between settings is one function here, which returns what is wrong.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_noloco.plans.grouping import Grouping, prime_factors
from megatron_noloco.plans.stability import Gossip, keeps_rounding

MOST_SLOTS = 4096

_ROUNDED = (
    "rounds the weights themselves, so that its error grows with |weights| / |outer gradient|: at 300 it is {} of "
    'the pull; "int8" takes half the bytes and has 3 % at any'  # tools/bench_payload.py
)


def setting(default: Any, meaning: str, **more: Any) -> Any:
    """Return a dataclass field for one setting.

    Args:
        default: its value, or the class of nested settings.
        meaning: a sentence, with the setting's symbol and unit.
        more: the bounds `ge`, `gt`, `le`, `lt` of a number; `refused`, values of another type that users try, with
            the reason against each; `own=True` where the jobs of a federation may differ; `paper`, the value of
            the authors where it is another; `path=True` for a file.
    """
    metadata = {"meaning": meaning, **more}
    if is_dataclass(default):
        return field(default_factory=default, metadata=metadata)  # type: ignore[arg-type]
    return field(default=default, metadata=metadata)


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True, kw_only=True)
class NolocoSettings:
    """The settings of the method, in `OuterOptimizer`, in `attach` and in the trainer.

    Raises ValueError for a value of another type or out of its bounds, and for values that exclude each other.
    """

    method: Literal["noloco", "diloco"] = setting(
        "noloco", 'Which replicas average in a round: "noloco" a random group, "diloco" all.'
    )
    local_steps: int = setting(10, "k: inner optimizer steps between two rounds.", ge=1, paper=50)
    outer_momentum: float = setting(
        0.0, "alpha: the share of the outer momentum buffer kept from round to round.", ge=0, lt=1, paper=0.5
    )
    outer_lr: float = setting(1.0, "beta: the weight of the group's mean outer gradient.", gt=0, paper=0.7)
    outer_nesterov: bool = setting(
        False,
        'Whether the outer step looks ahead by Nesterov\'s momentum. DiLoCo as most use it is method "diloco", '
        "outer_momentum 0.9, outer_lr 0.7 and this.",
    )
    consensus_weight: float | None = setting(
        None, "gamma: the pull towards the group's mean slow weights; null means outer_lr.", ge=0
    )
    group_size: int = setting(2, 'n: replicas in a group; 2 is a pair (method "noloco" only).', ge=2)
    pairing: Literal["auto", "random", "cycle"] = setting(
        "auto",
        'How groups are drawn: "random", or in a "cycle" that connects all replicas; its rounds have the prime '
        'factors of replicas as group sizes, none above n. "auto": cycles for pairs where replicas is a power of '
        'two, else random (method "noloco" only).',
        paper="random",
    )
    deadline_seconds: float = setting(
        600.0, "Seconds that a replica waits for its group before the round counts as failed.", gt=0, own=True
    )
    payload: Literal["fp32", "int8", "int4"] = setting(
        "int8",
        "What an exchange sends for each weight: fp32, or the difference to the partner quantized to integers. "
        "docs/exchange.md has bytes and errors.",
        refused={"fp16": _ROUNDED.format("6 %"), "bf16": _ROUNDED.format("50 %")},
        paper="fp32",
    )
    slow_weights: Literal["host", "device"] = setting(
        "host",
        "Where slow weights and outer momentum are kept: (pinned) host memory, or the accelerator's.",
        own=True,
    )
    fragments: int = setting(
        1,
        "F, at most local_steps: the weights are exchanged in F parts, each at its own one of the k local steps; "
        "1: all at once.",
        ge=1,
    )
    overlap_steps: int | Literal["auto"] = setting(
        0,
        "d, at most local_steps: training goes on during the exchange of a round, which is merged d local steps "
        'after it began; 0: training waits for the exchange. "auto" (in `train` only): the smallest d that hides '
        "the exchanges of the first rounds, in which training waits.",
        ge=0,
        own=True,
    )

    def __post_init__(self) -> None:
        check(self)
        rules = (fragments_problem, overlap_problem, nesterov_problem)
        if problems := [problem for rule in rules if (problem := rule(self))]:
            raise ValueError("\n".join(problems))

    @property
    def gamma(self) -> float:
        """The consensus weight in force."""
        return self.outer_lr if self.consensus_weight is None else self.consensus_weight

    @property
    def payload_bits(self) -> int | None:
        """Bits of a code; None for fp32."""
        return None if self.payload == "fp32" else int(self.payload.removeprefix("int"))

    @property
    def first_overlap_steps(self) -> int:
        """The overlap of the first rounds: 0 while "auto" measures them."""
        return 0 if self.overlap_steps == "auto" else self.overlap_steps

    @property
    def longest_overlap_steps(self) -> int:
        """The largest overlap that a round can have: local_steps with "auto"."""
        return self.local_steps if self.overlap_steps == "auto" else self.overlap_steps

    def group_size_among(self, replicas: int) -> int:
        """Return how many of `replicas` average together in a round; 1: a replica trains alone."""
        return replicas if self.method == "diloco" or replicas == 1 else self.group_size

    def pairing_among(self, replicas: int) -> Literal["random", "cycle"]:
        """Return how the groups of `replicas` are drawn."""
        if self.method != "noloco" or replicas == 1:
            return "random"
        if self.pairing != "auto":
            return self.pairing
        return "cycle" if self.group_size == 2 and set(prime_factors(replicas)) == {2} else "random"

    def group_sizes_among(self, replicas: int) -> Sequence[int]:
        """Return the sizes of the groups in one round after the other: in a cycle the prime factors, else one."""
        n = self.group_size_among(replicas)
        return prime_factors(replicas) if n > 1 and self.pairing_among(replicas) == "cycle" else (n,)

    def in_pairs_among(self, replicas: int) -> bool:
        """Return whether no group of a round has more than two members."""
        return max(self.group_sizes_among(replicas)) <= 2

    def keeps_rounding_among(self, replicas: int) -> bool:
        """Return whether what codes left out is kept, and added in the next round (`outer.payload`)."""
        return keeps_rounding(self.payload_bits, max(self.group_sizes_among(replicas)))


PAPER: dict[str, Any] = {
    entry.name: entry.metadata["paper"] for entry in fields(NolocoSettings) if "paper" in entry.metadata
}
"""The method as its authors set it (arXiv 2506.10911): `NolocoSettings(**PAPER)`, in JSON `"recipe": "paper"`."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(NolocoSettings):
    """The method: rounds between replicas, and routing. It is the JSON block `noloco` of the trainer."""

    recipe: Literal["recommended", "paper"] = setting(
        "recommended",
        f"What holds for fields that are not given: the defaults here, or the paper's: {_said(PAPER)}.",
        own=True,
    )
    enabled: bool = setting(True, "Whether replicas average at all; false: each trains on its own.")
    final_average: bool = setting(
        True,
        "Whether the last local step is followed by plain averages that make all replicas equal to their mean: "
        "one exchange for each prime factor of replicas; in a federation over a tree of those that are there.",
    )
    transport: Literal["auto", "mpi", "torch"] = setting(
        "auto", 'What carries the exchange; "auto" is MPI if the job was started by mpirun.', own=True
    )
    routing: Literal["off", "round", "microbatch"] = setting(
        "off",
        "Whether microbatches pass through pipeline stages of other replicas, on routes that are drawn anew for "
        'each "round" or "microbatch".',
        refused={"step": 'is no longer a value; with local_steps 1 "round" is the same'},
        own=True,
    )

    @property
    def active_method(self) -> Literal["noloco", "diloco", "none"]:
        """The method in force; "none" where `enabled` is false."""
        return self.method if self.enabled else "none"

    def group_size_among(self, replicas: int) -> int:
        return super().group_size_among(replicas) if self.enabled else 1


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """Replicas as separate jobs, and how they find each other. It is the JSON block `federation`.

    Jobs of one federation should agree on `slots`; the other settings are each job's own. Raises ValueError as
    `NolocoSettings` does.
    """

    slots: int | None = setting(
        None,
        "The most replicas there can be; each is a job of its own, `train --replica I`, and may be absent. It can "
        "be raised by restarting one job after the other. null: all replicas are one job.",
        ge=2,
        le=MOST_SLOTS,
    )
    rendezvous: str | None = setting(
        None,
        'How jobs find each other: "file://FOLDER", a folder that all can write, or "tcp://HOST:PORT,...", the '
        "addresses of one or more replicas, any one of which is enough.",
    )
    listen: str | None = setting(
        None,
        'Where the first rank of a replica listens, "tcp://HOST:PORT", the others at the ports that follow; '
        'HOST "*": every interface, port 0: any. "off": nowhere; this job opens all its connections itself, as '
        'behind a router or a firewall it must. null: "tcp://*:0" with a folder, with addresses the port that all '
        "have.",
    )
    advertise: str | None = setting(
        None,
        'Where others reach the first rank of a replica, "tcp://HOST:PORT", and its others at the ports that '
        "follow, if that is not where it listens: behind a router that forwards these ports.",
    )
    relay: bool = setting(
        False,
        'Whether this job passes on, still encrypted, what two jobs with listen "off" send each other; they are '
        "paired only where no other partner is left.",
    )
    encryption: Literal["curve", "none"] = setting(
        "curve",
        '"curve": ZeroMQ\'s CURVE, with the key in key_file; "none": unencrypted, for a trusted network or a '
        "tunnel.",
    )
    key_file: str | None = setting(
        None, "The key of all members, made by `megatron-noloco keys FILE`.", path=True
    )
    shortest_deadline_seconds: float = setting(
        5.0,
        "The fewest seconds to wait for a partner, however quick exchanges are; the most are "
        "noloco.deadline_seconds.",
        gt=0,
    )
    rounds_behind: int = setting(
        3,
        "Rounds that a replica may be behind. One further behind, at its start or because it was asleep, takes "
        "over the state of the furthest one; one that ends further behind gets the mean at the end, and is not in "
        "it.",
        ge=1,
    )
    skip_local_steps: bool = setting(
        True,
        "Whether a replica that is slower than half of the others leaves out local steps before a round, so that "
        "its partners need not wait for it; false: it takes all of noloco.local_steps.",
    )
    start_with: int = setting(
        1,
        "Number of replicas, this one included, to wait for before the first local step; "
        "noloco.deadline_seconds at most, half a minute where the job continues from a checkpoint.",
        ge=1,
    )

    def __post_init__(self) -> None:
        check(self)


def fragments_problem(noloco: NolocoSettings) -> str:
    """Return why the fragments do not fit into the local phase: each has its round at a local step of its own."""
    if noloco.fragments <= noloco.local_steps:
        return ""
    return (
        f"fragments {noloco.fragments} is more than local_steps {noloco.local_steps}: each fragment has its round "
        "at a local step of its own; lower it"
    )


def overlap_problem(noloco: NolocoSettings) -> str:
    """Return why the overlap is too long: a round is merged before the next one of its fragment begins."""
    if noloco.longest_overlap_steps <= noloco.local_steps:
        return ""
    return (
        f"overlap_steps {noloco.overlap_steps} is more than local_steps {noloco.local_steps}: a round is merged "
        "before the next one begins; lower it"
    )


def nesterov_problem(noloco: NolocoSettings) -> str:
    """Return why there is nothing to look ahead by."""
    if noloco.outer_nesterov and not noloco.outer_momentum:
        return "outer_nesterov has no effect with outer_momentum 0; raise that, or leave outer_nesterov out"
    return ""


def groups_problem(noloco: NolocoSettings, replicas: int | None) -> str:
    """Return why groups cannot be drawn among `replicas` (None: not known), or would drift apart (rho >= 1)."""
    if noloco.group_size_among(replicas or 2) == 1:
        return ""
    problem = "" if replicas is None else _sizes_problem(noloco, replicas)
    return problem or gossip(noloco, replicas).problem


def _sizes_problem(noloco: NolocoSettings, replicas: int) -> str:
    if noloco.group_size_among(replicas) == 1 or noloco.method == "diloco":
        return ""
    if noloco.group_size > replicas:
        return f"group_size {noloco.group_size} is more than the {replicas} replicas there are"
    sizes = noloco.group_sizes_among(replicas)
    if max(sizes) <= noloco.group_size:
        return ""
    return (
        f'pairing "cycle" takes groups of {" and ".join(map(str, sorted(set(sizes))))} for {replicas} '
        f"replicas (the prime factors), more than group_size {noloco.group_size}; raise it or use "
        '"random"'
    )


def federation_problems(federation: FederationSettings, noloco: NolocoSettings) -> Iterator[str]:
    """Yield what a federation lacks, and what replicas that are separate jobs cannot do."""
    if federation.slots is None:
        yield "federation.slots is missing: the most replicas there can be"
        return
    if federation.rendezvous is None:
        yield "federation.rendezvous is missing: how the jobs of a federation find each other"
    if federation.encryption == "curve" and federation.key_file is None:
        yield (
            "federation.key_file is missing: `megatron-noloco keys FILE` makes one; in a trusted network "
            'federation.encryption "none" does without'
        )
    if federation.start_with > federation.slots:
        yield f"federation.start_with {federation.start_with} is more than federation.slots {federation.slots}"
    if federation.listen == "off":
        for name in ("advertise", "relay"):
            if getattr(federation, name):
                yield f'federation.{name}: with federation.listen "off" no other job can connect to this one'
    if noloco.method != "noloco" or noloco.group_size != 2:
        yield 'federation: separate jobs exchange in pairs; noloco.method must be "noloco", noloco.group_size 2'


def gossip(noloco: NolocoSettings, replicas: int | None) -> Gossip:
    """Return what decides whether the replicas stay together; `replicas` None: their number is not known."""
    cycle: tuple[int, ...] = ()
    if replicas is not None and noloco.pairing_among(replicas) == "cycle":
        cycle = prime_factors(replicas)
    everyone = noloco.method == "diloco" or (noloco.group_size == replicas and len(cycle) < 2)
    group_size = math.inf if everyone else noloco.group_size
    if replicas is None:
        kept = keeps_rounding(noloco.payload_bits, group_size)
    else:
        kept = noloco.keeps_rounding_among(replicas)
    return Gossip(
        noloco.outer_momentum,
        noloco.gamma,
        group_size,
        cycle,
        noloco.fragments,
        noloco.payload,
        noloco.outer_nesterov,
        kept,
    )


def grouping_of(noloco: NolocoSettings, replicas: int, seed: int) -> Grouping:
    """Return the plan of groups among `replicas`. Raises ValueError where they cannot be drawn."""
    if problem := _sizes_problem(noloco, replicas):
        raise ValueError(problem)
    return Grouping(replicas, noloco.group_size_among(replicas), seed, noloco.pairing_among(replicas))


def shared(settings: NolocoSettings) -> dict[str, Any]:
    """Return the settings of the method that all jobs of a federation must have alike."""
    names = (entry.name for entry in fields(NolocoSettings) if not entry.metadata.get("own"))
    return {name: getattr(settings, name) for name in names} | {"consensus_weight": settings.gamma}


def check(settings: Any) -> None:
    """Raise ValueError for the first value of a dataclass of settings that is of another type or out of bounds.

    Makes other numbers, such as numpy's, which JSON does not take, Python's.
    """
    hints = get_type_hints(type(settings))
    for entry in fields(settings):
        value, options = getattr(settings, entry.name), options_of(hints[entry.name])
        for refused, reason in entry.metadata.get("refused", {}).items():
            if value == refused:
                raise ValueError(f'{entry.name}: "{refused}" {reason}')
        fitting = next((option for option in options if _fits(value, option, entry.metadata)), None)
        if fitting is None:
            expected = " or ".join(_in_words(option, entry.metadata) for option in options)
            raise ValueError(f"{type(settings).__name__}: {entry.name} must be {expected}, not {value!r}")
        if fitting in (int, float):
            object.__setattr__(settings, entry.name, fitting(value))


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; else the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def bounds_of(metadata: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the bounds of a number, such as ("ge", 1)."""
    return ((name, metadata[name]) for name in ("ge", "gt", "le", "lt") if name in metadata)


def _fits(value: Any, option: Any, metadata: Mapping[str, Any]) -> bool:
    if get_origin(option) is Literal:
        return isinstance(value, str) and value in get_args(option)
    if is_dataclass(option) or option in (bool, str, type(None)):
        return isinstance(value, option)
    kind: Any = Integral if option is int else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        return False
    return all(
        {"ge": value >= bound, "gt": value > bound, "le": value <= bound, "lt": value < bound}[name]
        for name, bound in bounds_of(metadata)
    )


def _in_words(option: Any, metadata: Mapping[str, Any]) -> str:
    if get_origin(option) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(option))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    kinds = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "None"}
    if option not in kinds:
        return f"{option.__name__}(...)"
    bounds = bounds_of(metadata) if option in (int, float) else ()
    return " ".join(
        [kinds[option], " and ".join(f"{signs[name]} {bound}" for name, bound in bounds)]
    ).rstrip()
