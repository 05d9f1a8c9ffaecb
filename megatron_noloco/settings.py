"""Settings of the method and of a federation: type, bound, default and meaning of each, defined once.

The JSON blocks `noloco` and `federation`, `config --explain`, the tables of the documentation, the library and
`attach` use these classes. A rule between settings is one function here, which returns what is wrong.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megatron_noloco.errors import UserError
from megatron_noloco.fields import (
    AboveZero,
    FilePath,
    NonNegative,
    Positive,
    Scope,
    Settings,
    Size,
    compared_field,
    field,
    offered_field,
    shown,
)
from megatron_noloco.plans.grouping import Cycle, Grouping, Sites, prime_factors
from megatron_noloco.plans.payloads import PAYLOADS, keeps_rounding
from megatron_noloco.plans.stability import (
    cycle_spread_factor,
    is_stable,
    pull_error,
    spread_factor,
    spread_factors_of_sites,
)

MOST_SLOTS = 4096
MOST_FRAGMENTS = 1024  # of separate jobs: each says which rounds it has under way
TCP = "tcp://"  # before HOST:PORT of an endpoint, and HOST:PORT,... of `rendezvous`
_SQUARED = Field(le=1000)  # in rho, which a float must hold
SITE_INTERVAL = 8  # of a federation, where replicas at a site come and go
PAPER: Mapping[str, Any] = {
    "local_steps": 50,
    "outer_momentum": 0.5,
    "outer_lr": 0.7,
    "pairing": "random",
    "payload": "fp32",
}
"""The method as its authors set it (arXiv 2506.10911): `NolocoSettings(**PAPER)`, in JSON `"recipe": "paper"`."""

K_MEANING = "k: steps of the inner optimizer between two rounds."


def _short(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,32}", name):
        raise UserError(
            f"{shown(name)} is no short name: at most 32 letters of a to z, digits, and any of _.-"
        )
    return name


Places = Positive | Literal["hosts"] | Annotated[list[int | str], Field(min_length=1)] | None
SiteName = Annotated[str, AfterValidator(_short)]


class NolocoSettings(Settings):
    """Settings of the method, in `OuterOptimizer`, in `attach` and in the trainer.

    Raises UserError for a value of another type or out of its bounds, and for values that exclude each other.
    """

    scope = Scope.SHARED
    method: Literal["noloco", "diloco"] = field(
        "noloco", 'Replicas that average in a round; "noloco": a random group of replicas, "diloco": all.'
    )
    local_steps: Positive = field(10, K_MEANING)
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = field(
        0.0, "alpha: the share of the outer momentum buffer kept from round to round."
    )
    outer_lr: Annotated[AboveZero, _SQUARED] = field(
        1.0, "beta: the weight of the group's mean outer gradient."
    )
    outer_nesterov: bool = field(
        False,
        'Whether the outer step looks ahead by Nesterov\'s momentum. The usual DiLoCo is method "diloco", '
        "outer_momentum 0.9, outer_lr 0.7 and outer_nesterov true.",
    )
    consensus_weight: Annotated[Size, _SQUARED] | None = field(
        None, "gamma: the pull towards the group's mean slow weights; null means outer_lr."
    )
    group_size: Annotated[int, Field(ge=2)] = field(
        2, 'n: replicas in a group; 2 is a pair (method "noloco" only).'
    )
    pairing: Literal["auto", "random", "cycle"] = field(
        "auto",
        '"random": groups are drawn at random. "cycle": a cycle of rounds connects all replicas; the sizes of its '
        "groups are the prime factors of the number of replicas, of which none may be above n. "
        '"auto": cycles of pairs where that number is a power of two, else random (method "noloco" only).',
    )
    sites: Places = compared_field(
        None,
        "Where replicas are: a number of sites, each of as many consecutive replicas, or a list with the site of "
        'each; "hosts" (in `train`): each host is a site. Groups are inside sites, but in every site_interval-th '
        "round across them. All sites have as many replicas, and pairing is in cycles. null: groups are drawn "
        "from all replicas alike. A job of a federation has federation.site instead.",
    )
    site_interval: Annotated[int, Field(ge=2)] | None = field(
        None,
        "m: every m-th round goes across sites. null: as many as a site has replicas, so that it sends as much to "
        f"other sites as a single replica sends in all; in a federation {SITE_INTERVAL}.",
    )
    deadline_seconds: AboveZero = offered_field(
        600.0,
        "Seconds that a round may take before it counts as failed. At its end a job waits as long for replicas "
        "that begin no round.",
    )
    payload: Literal["fp32", "int8", "int4", "int3"] = field(
        "int4",
        "Form in which an exchange sends each weight: fp32, or the difference to the partner quantized to "
        "integers. docs/exchange.md has bytes and errors.",
    )
    slow_weights: Literal["host", "device"] = offered_field(
        "host",
        "Where slow weights and outer momentum are kept: (pinned) host memory, or the accelerator's. They are "
        "quantized for an exchange where they are kept.",
    )
    fragments: Positive = field(
        1,
        "F, at most local_steps: the weights are exchanged in F parts, each after a local step of its own; "
        "1: all at once.",
    )
    overlap_steps: NonNegative | Literal["auto"] = offered_field(
        0,
        "d, at most local_steps: training goes on during the exchange of a round, which is merged d local steps "
        'after it began; 0: training waits for the exchange. "auto" (in `train` only): the smallest d that hides '
        "the exchanges of the first rounds, in which training waits.",
    )

    def rules(self) -> Iterator[str]:
        """Yield which settings exclude each other, whatever the number of replicas."""
        local_steps = f"local_steps {self.local_steps}"
        if self.fragments > self.local_steps:
            yield (
                f"fragments {self.fragments} is more than {local_steps}: each fragment has its round at a local "
                "step of its own; lower it"
            )
        if self.longest_overlap_steps > self.local_steps:
            yield (
                f"overlap_steps {self.overlap_steps} is more than {local_steps}: a round is merged before the "
                "next one begins; lower it"
            )
        if self.outer_nesterov and not self.outer_momentum:
            yield "outer_nesterov has no effect with outer_momentum 0; raise that, or leave outer_nesterov out"
        if self.sites is not None and self.pairing == "random" and self.method == "noloco":
            yield 'sites: groups inside and across them are those of pairing "cycle", not "random"; change pairing'

    @property
    def gamma(self) -> float:
        """Return the consensus weight in force."""
        return self.outer_lr if self.consensus_weight is None else self.consensus_weight

    @property
    def payload_bits(self) -> int | None:
        """Return the bits of a code; None for fp32."""
        return PAYLOADS[self.payload].bits

    def codes_on_device(self, separate_jobs: bool) -> bool:
        """Return whether an accelerator computes codes.

        Not where replicas are separate jobs, whose vectors move through the host memory of the first rank.
        """
        return self.slow_weights == "device" and self.payload_bits is not None and not separate_jobs

    @property
    def first_overlap_steps(self) -> int:
        """Return the overlap of the first rounds: 0 while "auto" measures them."""
        return 0 if self.overlap_steps == "auto" else self.overlap_steps

    @property
    def longest_overlap_steps(self) -> int:
        """Return the largest overlap that a round can have: local_steps with "auto"."""
        return self.local_steps if self.overlap_steps == "auto" else self.overlap_steps

    @property
    def active_method(self) -> Literal["noloco", "diloco", "none"]:
        """Return the method in force; "none" if replicas do not average."""
        return self.method

    def among(self, replicas: int | None) -> "Groups":
        """Return the groups in which so many replicas average; None: their number is not known."""
        return Groups(self, replicas)


@dataclass(frozen=True)
class Groups:
    """The groups in which replicas average in each round.

    Attributes:
        replicas: how many there are; None: not known, as in a federation.
    """

    noloco: NolocoSettings
    replicas: int | None

    @property
    def size(self) -> int:
        """The most replicas in a group; 1: a replica trains alone."""
        if self.noloco.active_method == "none":
            return 1
        if self.replicas is not None and (self.noloco.method == "diloco" or self.replicas == 1):
            return self.replicas
        return self.noloco.group_size

    @property
    def pairing(self) -> Literal["random", "cycle"]:
        """How groups are drawn."""
        if self.noloco.method != "noloco" or self.replicas in (None, 1):
            return "random"
        if self.noloco.pairing != "auto":
            return self.noloco.pairing
        in_pairs = self.noloco.group_size == 2 and set(prime_factors(self.replicas)) == {2}
        return "cycle" if in_pairs or self.sites is not None else "random"

    @cached_property
    def sites(self) -> Sites | None:
        """Where replicas are; None where groups do not depend on it, or "hosts" are not known yet.

        Raises UserError where sites are not those of so many replicas, or not equally large.
        """
        noloco, replicas = self.noloco, self.replicas
        if replicas is None or noloco.sites in (None, "hosts") or noloco.method != "noloco":
            return None
        if isinstance(noloco.sites, int):
            if replicas % noloco.sites:
                raise UserError(f"sites {noloco.sites}: {replicas} replicas do not divide into so many sites")
            names: list[Any] = [replica * noloco.sites // replicas for replica in range(replicas)]
        else:
            assert isinstance(noloco.sites, list)
            names = noloco.sites
            if len(names) != replicas:
                raise UserError(
                    f"sites: a list of {len(names)}, but there are {replicas} replicas; name each one's"
                )
        found = Counter(names)
        if len(set(found.values())) > 1:
            largest, smallest = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
            raise UserError(
                f"sites: {found[largest]} replicas at site {largest} and {found[smallest]} at {smallest}, but "
                "groups across need equally many; let each replica be a job of its own, with federation.site"
            )
        size = replicas // len(found)
        if len(found) == 1 or size == 1:
            return None
        return Sites(tuple(map([*found].index, names)), noloco.site_interval or size)

    @property
    def cycle(self) -> Cycle | None:
        """The digits that rounds take; None where groups are drawn at random."""
        if self.replicas is None or self.pairing != "cycle":
            return None
        return Cycle.of(self.replicas, self.sites)

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of the groups in one round after the other, in a cycle those of all its rounds."""
        if self.size == 1 or (cycle := self.cycle) is None:
            return (self.size,)
        return [cycle.bases[cycle.at(round_index)[1]] for round_index in range(cycle.rounds)]

    @property
    def in_pairs(self) -> bool:
        """Whether no group of a round has more than two members."""
        return max(self.sizes) <= 2

    @property
    def keeps_rounding(self) -> bool:
        """Whether what codes left out is kept, and added in the next round (`outer.payload`)."""
        return keeps_rounding(self.noloco.payload_bits, max(self.sizes))

    @property
    def sizes_problem(self) -> str:
        """Why groups cannot be drawn among so many replicas; "" where they can."""
        if self.replicas is None or self.size == 1 or self.noloco.method == "diloco":
            return ""
        if self.noloco.group_size > self.replicas:
            return f"group_size {self.noloco.group_size} is more than the {self.replicas} replicas there are"
        try:
            sizes = self.sizes
        except UserError as error:  # of sites
            return str(error)
        if max(sizes) <= self.noloco.group_size:
            return ""
        return (
            f'pairing "cycle" takes groups of {" and ".join(map(str, sorted(set(sizes))))} for {self.replicas} '
            f"replicas (the prime factors), more than group_size {self.noloco.group_size}; raise it or use "
            '"random"'
        )


class FederationSettings(Settings):
    """Replicas as separate jobs, and how they find each other: the JSON block `federation`.

    Each job has its own. Raises UserError as `NolocoSettings` does.
    """

    rendezvous: str | None = field(
        None,
        'How jobs find each other: "file://FOLDER" or "s3://BUCKET/FOLDER", which all jobs can write, or '
        '"tcp://HOST:PORT,...", the addresses of one or more replicas, any one of which is enough. Each replica '
        "is then a job of its own, `train --replica I`; jobs may come and go. null: all replicas are one job.",
    )
    listen: str | None = field(
        None,
        'Where the replica listens: "tcp://HOST:PORT", with an IPv6 address in []. HOST "*" is every interface, '
        'IPv4 and IPv6; port 0 is any free port. "off": nowhere; the job then opens all its connections itself, '
        'as it must behind a router or a firewall; two jobs with "off" exchange through a folder or not at all. '
        'null: "tcp://*:0" if '
        "rendezvous is a folder, else the port that all addresses of rendezvous have.",
    )
    advertise: str | None = field(
        None,
        'Where others reach the replica, "tcp://HOST:PORT", if that is not where it listens: behind a router that '
        "forwards this port.",
    )
    site: SiteName | None = field(
        None,
        "Name of the site where this job is: jobs exchange with those at their own site but for every "
        "noloco.site_interval-th round, and with others where nobody else is there. null: with all alike.",
    )
    key_file: FilePath | None = field(
        None,
        "The key of all members, made by `megatron-noloco keys FILE`; or the member file that `megatron-noloco "
        "join` has written. All that jobs send each other is encrypted, and both sides show certificates.",
    )
    shortest_deadline_seconds: AboveZero = offered_field(
        10.0,
        "Shortest time in seconds to wait for a partner to begin a round, however quick it was lately; the "
        "longest is noloco.deadline_seconds.",
    )
    rounds_behind: Positive = offered_field(
        3,
        "Rounds that a replica may be behind. A replica further behind, at its start or because it was asleep, "
        "takes over the state of the furthest replica. A replica that ends further behind is not in the mean at "
        "the end, and takes it over.",
    )
    skip_local_steps: bool = offered_field(
        True,
        "Whether a replica that is slower than half of the others leaves out local steps before a round, so that "
        "its partners need not wait for it; false: it takes all of noloco.local_steps.",
    )
    leave_seconds: Size = field(
        10.0,
        "Longest time in seconds that a job which is told to leave (SIGTERM, SIGUSR1, `stop --leave`) takes for "
        "one more exchange, so that the others keep what it has learned since its last round; it then saves and "
        "ends. 0: no exchange.",
    )
    start_with: Positive = offered_field(
        1,
        "Number of replicas, including this one, that must be there before the first local step. The job waits "
        "for ten minutes at most, or half a minute if it continues from a checkpoint.",
    )

    @property
    def exists(self) -> bool:
        """Whether replicas are separate jobs."""
        return self.rendezvous is not None


def federation_problems(federation: FederationSettings, noloco: NolocoSettings) -> Iterator[str]:
    """Yield what a federation lacks, and what replicas that are separate jobs cannot do."""
    if not federation.exists:
        yield "federation.rendezvous is missing: how the jobs of a federation find each other"
        return
    if federation.key_file is None:
        yield "federation.key_file is missing: `megatron-noloco keys FILE` makes one, for all jobs"
    if federation.listen == "off" and federation.advertise:
        yield 'federation.advertise: with federation.listen "off" no other job can connect to this one'
    if noloco.method != "noloco" or noloco.group_size != 2:
        yield 'federation: separate jobs exchange in pairs; noloco.method must be "noloco", noloco.group_size 2'
    elif noloco.pairing == "cycle":
        yield 'noloco.pairing "cycle": the number of replicas of a federation changes; leave it out'
    if noloco.fragments > MOST_FRAGMENTS:
        yield f"noloco.fragments {noloco.fragments}: separate jobs exchange at most {MOST_FRAGMENTS}; lower it"
    if noloco.sites is not None:
        yield "noloco.sites: a job of a federation names its own site, federation.site; leave it out"


def groups_problem(noloco: NolocoSettings, replicas: int | None) -> str:
    """Return why groups cannot be drawn among `replicas` (None: not known), or would drift apart (rho >= 1)."""
    if noloco.among(replicas or 2).size == 1:
        return ""
    groups = noloco.among(replicas)
    return groups.sizes_problem or _drift_problem(groups)


def rho(noloco: NolocoSettings, replicas: int | None) -> float:
    """Return the factor by which a round multiplies the squared spread of `replicas` (None: not known).

    The factor is 0 where all are one group, and use the same mean.
    """
    groups = noloco.among(replicas)
    largest, kept = _largest(groups), keeps_rounding(noloco.payload_bits, _largest(groups))
    everyone = largest in (replicas, math.inf)
    if everyone and (noloco.payload == "fp32" or kept):
        return 0.0
    alpha, gamma = noloco.outer_momentum, noloco.gamma
    more = pull_error(noloco.payload, kept), noloco.outer_nesterov, kept
    if (cycle := groups.cycle) is None or len(groups.sizes) == 1:
        return spread_factor(alpha, gamma, math.inf if everyone else largest, *more)
    if cycle.across:
        return cycle_spread_factor(alpha, gamma, cycle.inside, *more, cycle.across, cycle.interval)
    inside = cycle.inside
    orders = [inside[f:] + inside[:f] for f in range(min(noloco.fragments, len(inside)))]
    return max(cycle_spread_factor(alpha, gamma, order, *more) for order in orders)


def _largest(groups: Groups) -> float:
    """Return the size of the largest group; infinite for all replicas, if not known."""
    everyone = groups.replicas is None and groups.noloco.method == "diloco"
    return math.inf if everyone else max(groups.sizes)


def _drift_problem(groups: Groups) -> str:
    """Return why replicas would not stay together, and what would be right; empty where they do."""
    noloco, cycle = groups.noloco, groups.cycle
    factor = rho(noloco, groups.replicas)
    if is_stable(factor):
        return ""
    n = "of all" if _largest(groups) in (groups.replicas, math.inf) else noloco.group_size
    pairing, levels = "" if cycle is None else ', pairing "cycle"', ""
    if cycle is not None and cycle.across:
        pairing += f", site_interval {cycle.interval}"
        of_plans = noloco.outer_momentum, noloco.gamma, cycle.inside, cycle.across, cycle.interval
        within, between = spread_factors_of_sites(*of_plans, noloco.outer_nesterov)
        levels = f" (exact messages: inside sites {within:.3f}, between them {between:.3f})"
    payload = "" if noloco.payload == "fp32" else f', payload "{noloco.payload}"'
    nesterov = ", outer_nesterov true" if noloco.outer_nesterov else ""
    return (
        f"outer_momentum (alpha) {noloco.outer_momentum}, consensus_weight (gamma) {noloco.gamma}, "
        f"group_size (n) {n}{pairing}{payload}{nesterov}: replicas would drift "
        f"apart, rho = {factor:.3f} >= 1{levels}; {_stable_setting(noloco, groups.replicas)}"
    )


def _stable_setting(noloco: NolocoSettings, replicas: int | None) -> str:
    """Name the nearest stable setting, to two digits: less momentum if that suffices, else another gamma."""

    def stable_with(**changes: Any) -> bool:
        return is_stable(rho(noloco.replace(**changes), replicas))

    for hundredths in range(min(99, int(noloco.outer_momentum * 100)), -1, -1):
        # Without momentum there is nothing to look ahead by.
        nesterov = noloco.outer_nesterov and hundredths > 0
        if stable_with(outer_momentum=hundredths / 100, outer_nesterov=nesterov):
            return f"outer_momentum {hundredths / 100:.2f} is the largest (to 2 digits) that is stable"
    gammas = sorted((part / 100 for part in range(1, 400)), key=lambda gamma: abs(gamma - noloco.gamma))
    nearest = next((gamma for gamma in gammas if stable_with(consensus_weight=gamma)), 0.01)
    return f"no outer_momentum is stable with this gamma; consensus_weight {nearest:.2f} is with this alpha"


def grouping_of(noloco: NolocoSettings, replicas: int, seed: int) -> Grouping:
    """Return the plan of groups among `replicas`. Raises UserError where they cannot be drawn."""
    groups = noloco.among(replicas)
    if problem := groups.sizes_problem:
        raise UserError(problem)
    if noloco.sites == "hosts":
        raise UserError('sites "hosts" is for `train` only; give a number of sites or a list')
    return Grouping(replicas, groups.size, seed, groups.pairing, groups.sites)


def shared(settings: NolocoSettings) -> dict[str, Any]:
    """Return the settings of the method that all jobs of a federation must have alike."""
    return settings.shared() | {"consensus_weight": settings.gamma}
