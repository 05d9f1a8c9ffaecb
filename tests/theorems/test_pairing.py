"""Replicas that know the same others choose alike, and the planned partner wherever it is available."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.federation.pairing import Candidates, Pairing
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.settings import NolocoSettings, grouping_of


def known(
    free: Set[int],
    waiting: Set[int] = frozenset(),
    busy: Set[int] = frozenset(),
    hidden: Set[int] = frozenset(),
    sites: Mapping[int, str] | None = None,
) -> Candidates:
    return Candidates(set(), free | busy, free, waiting, hidden, sites or {})


def choose(
    grouping: Grouping, replica: int, at: tuple[int, int], others: Candidates, interval: int | None = None
) -> int | None:
    """Return the partner where the members are as many replicas as the groups are drawn among."""
    noloco = NolocoSettings(pairing=grouping.pairing, site_interval=interval)
    pairing = Pairing(noloco, grouping.seed)
    return pairing.choose(replica, at, replace(others, members=set(range(grouping.replicas))))


@settings(max_examples=100)
@given(st.sets(st.integers(0, 4095), min_size=2, max_size=12), st.integers(0, 9), st.integers(0, 2))
def test_numbers_of_members_have_gaps(members: set[int], round_index: int, fragment: int) -> None:
    """The pairs are those of one job with as many replicas, in the order of their numbers."""
    noloco, numbers = NolocoSettings(), sorted(members)
    pairs = {
        tuple(numbers[place] for place in group)
        for group in grouping_of(noloco, len(members), seed=3).groups(round_index, fragment)
        if len(group) == 2
    }
    found = set()
    for replica in members:
        others = members - {replica}
        partner = Pairing(noloco, 3).choose(
            replica, (round_index, fragment), Candidates(members, others, others, set())
        )
        if partner is not None:
            found.add((min(replica, partner), max(replica, partner)))
    assert found == pairs


@settings(max_examples=60)
@given(
    st.integers(2, 17), st.integers(0, 9), st.integers(0, 2), st.sampled_from(["auto", "random"]), st.data()
)
def test_at_most_one_replica_is_left_without_a_partner(
    replicas: int, round_index: int, fragment: int, pairing: Literal["auto", "random"], data: st.DataObject
) -> None:
    """Members that have left cost no round."""
    grouping = grouping_of(NolocoSettings(pairing=pairing), replicas, seed=3)
    present = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1))
    partners = {
        replica: choose(grouping, replica, (round_index, fragment), known(present - {replica}))
        for replica in present
    }
    assert sum(partner is None for partner in partners.values()) == len(present) % 2
    for replica, partner in partners.items():
        if partner is not None:
            assert partners[partner] == replica != partner
    for group in grouping.groups(round_index, fragment=fragment):
        if len(group) == 2 and set(group) <= present:
            assert partners[group[0]] == group[1]


@settings(max_examples=300)
@given(st.integers(2, 9), st.integers(0, 5), st.data())
def test_hidden_replicas_are_never_a_pair(replicas: int, round_index: int, data: st.DataObject) -> None:
    """They see, but do not reach each other: there are as many pairs as can be."""
    grouping = Grouping(replicas, 2, seed=3)
    gone, hidden = (data.draw(st.sets(st.integers(0, replicas - 1), max_size=most)) for most in (2, replicas))
    present = set(range(replicas)) - gone
    partners = {}
    for replica in present:
        apart = hidden if replica in hidden else set()
        out_of_reach = (present & apart) - {replica}
        others = known(present - {replica} - apart, busy=out_of_reach, hidden=hidden)
        partners[replica] = choose(grouping, replica, (round_index, 0), others)
    pairs = {
        frozenset((one, two)) for one, two in partners.items() if two is not None and partners[two] == one
    }
    public, behind = len(present - hidden), len(present & hidden)
    directly = min(public, behind) + (max(0, public - behind) // 2)
    assert len(pairs) >= directly - bool(gone)
    assert not any(pair <= hidden for pair in pairs)


def test_waiting_replica_is_second_choice() -> None:
    grouping = Grouping(8, 2, seed=1)
    (replica, planned), *pairs = grouping.groups(4)
    others = {pair[0] for pair in pairs}
    for other in others:
        assert choose(grouping, replica, (4, 0), known(others, {other})) == other
        assert choose(grouping, replica, (4, 0), known({*others, planned}, {other})) == planned
    assert choose(grouping, replica, (4, 0), known(others, others)) in others


def test_replica_waiting_for_its_plan_is_no_candidate() -> None:
    """Neither is that partner: it is not left over."""
    grouping = Grouping(8, 2, seed=1)
    (replica, _), (busy, its_partner), (free, _), _ = grouping.groups(4)
    assert choose(grouping, replica, (4, 0), known({its_partner}, busy={busy})) is None
    assert choose(grouping, replica, (4, 0), known({its_partner, free}, busy={busy})) == free


def test_candidate_pairs_change_from_round_to_round() -> None:
    grouping = Grouping(16, 2, seed=1)
    present = set(range(0, 16, 2))
    count = Counter(choose(grouping, 0, (round_index, 0), known(present - {0})) for round_index in range(700))
    assert set(count) == present - {0}
    assert max(count.values()) < 1.4 * 700 / 7
    assert min(count.values()) > 0.6 * 700 / 7


def test_differing_directories_lose_few_rounds() -> None:
    """Half of the replicas do not know yet that one has gone."""
    grouping = Grouping(32, 2, seed=5)
    present = set(range(24))
    rounds = broken = 0
    for round_index in range(50):
        partners = {}
        for replica in present - {7}:
            gone = {replica, 7} if replica % 2 else {replica}
            partners[replica] = choose(grouping, replica, (round_index, 0), known(present - gone))
        rounds += len(partners)
        broken += sum(
            partners.get(partner) != one for one, partner in partners.items() if partner is not None
        )
    assert broken < 0.15 * rounds


names = st.lists(st.sampled_from("aab"), min_size=2, max_size=9)


@settings(max_examples=200)
@given(names, st.integers(0, 11), st.integers(0, 2), st.data())
def test_pairs_cross_sites_at_the_interval(
    of_slots: list[str], round_index: int, fragment: int, data: st.DataObject
) -> None:
    """Whoever has somebody at its site goes across to nobody but one that has not."""
    sites = dict(enumerate(of_slots))
    present = data.draw(st.sets(st.sampled_from(sorted(sites)), min_size=1))
    grouping = Grouping(12, 2, seed=3)
    partners = {
        one: choose(grouping, one, (round_index, fragment), known(present - {one}, sites=sites), interval=4)
        for one in present
    }
    alone = {one for one in present if [sites[other] for other in present].count(sites[one]) == 1}
    across = set[int]()
    for one, partner in partners.items():
        if partner is not None:
            assert partners[partner] == one != partner
            across |= {one} if sites[one] != sites[partner] else set()
    apart = set(partners) - {one for one in partners if partners[one] is not None}
    assert len({sites[one] for one in apart}) == len(apart), "two at one site are left without partners"
    if len(set(sites.values())) > 1 and (round_index + fragment) % 4 != 3:
        assert all(one in alone or partners[one] in alone for one in across)
    if set(of_slots) == {"a", "b"} and present == set(sites) and (round_index + fragment) % 4 == 3:
        assert len(across) == 2 * min(of_slots.count("a"), of_slots.count("b"))


def test_replicas_that_know_no_sites_are_all_at_one() -> None:
    """So are those whose jobs name none, or all the same."""
    grouping = Grouping(8, 2, seed=1)
    for round_index in range(8):
        plain, unnamed, named = (
            choose(grouping, 0, (round_index, 0), known({1, 2, 3, 5}, sites=sites), interval=2)
            for sites in ({}, dict.fromkeys(range(8), ""), dict.fromkeys(range(8), "a"))
        )
        assert plain == unnamed == named


def test_lone_replica_of_site_meets_all_equally() -> None:
    grouping, sites = Grouping(4, 2, seed=1), {0: "a", 1: "b", 2: "b"}
    partners = Counter(
        choose(grouping, 0, (number, 0), known({1, 2}, hidden={1}, sites=sites), interval=8)
        for number in range(200)
    )
    assert partners.keys() == {1, 2}
    assert min(partners.values()) > 70


def test_two_left_of_many_miss_no_round() -> None:
    grouping, hidden = Grouping(4, 2, seed=1), {1, 2, 3}  # slots 2 and 3 were there, and are not any more
    for number in range(30):
        assert choose(grouping, 0, (number, 0), known({1}, hidden=hidden)) == 1
        assert choose(grouping, 1, (number, 0), known({0}, hidden=hidden)) == 0


def test_a_hidden_site_exchanges_with_others_in_every_round() -> None:
    """None of its replicas can connect to another one there."""
    grouping, sites = Grouping(8, 2, seed=1), dict(enumerate("aaaabbbb"))
    hidden = {4, 5, 6, 7}
    for round_index in range(4):
        partners = {
            one: choose(
                grouping,
                one,
                (round_index, 0),
                known(set(range(4 if one in hidden else 8)) - {one}, hidden=hidden, sites=sites),
                interval=4,
            )
            for one in range(8)
        }
        assert all(partners[partner] == one for one, partner in partners.items() if partner is not None)
        assert {partners[one] for one in range(4)} == hidden
