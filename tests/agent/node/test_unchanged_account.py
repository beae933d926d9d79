"""Accounts of the kubelet without news: they are compared, and what follows from them stays the same object."""

import dataclasses

from bench.decisions import allocate_all, state_of
from msgspec.structs import replace

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.known.tenancykeeper import TenantsObserved
from gpuvirt.model.allocation.ledger import Consumer, KubeletAccount
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt_sim.clock import BEGINNING


def allocated_state() -> NodeState:
    """Return the state of an agent whose vGPUs are all allocated, by the kubelet's account too."""
    state = state_of(2)
    state.decide(0.0, BEGINNING)
    allocate_all(state)
    state.observe_account(account_of(state))
    return state


def account_of(state: NodeState) -> KubeletAccount:
    """Return an account with a consumer of its own for each allocation."""
    devices = {
        (entry.resource, entry.device): dataclasses.replace(entry.consumer)
        for entry in state.ledger.entries
        if entry.consumer
    }
    return KubeletAccount(BEGINNING, 1.0, devices)


def test_an_account_without_news_changes_no_object() -> None:
    state = allocated_state()
    state.observe_account(account_of(state))
    entries, tenancies = state.ledger.entries, state.tenancies.value
    assert state.observe_account(account_of(state)) is False
    assert state.ledger.entries is entries
    assert state.tenancies.value is tenancies


def test_another_pod_is_taken() -> None:
    state = allocated_state()
    state.observe_account(account_of(state))
    account = account_of(state)
    key = next(iter(account.devices))
    pod = Consumer(namespace="default", pod="another")
    assert state.observe_account(replace(account, devices={**account.devices, key: pod})) is True
    assert state.ledger.entries[0].consumer == pod


def test_another_answer_of_a_plugin_is_news_although_it_does_not_count_in_comparisons() -> None:
    state = allocated_state()
    assert state.inventory is not None
    devices = account_of(state).devices
    news = TenantsObserved(state.inventory, devices, state.ledger.rules)
    assert news.says_as(TenantsObserved(state.inventory, dict(devices), state.ledger.rules))
    key, consumer = next(iter(devices.items()))
    answered = dataclasses.replace(consumer, answer=PluginAnswer(env=(("NVIDIA_VISIBLE_DEVICES", "0"),)))
    other = replace(news, devices={**devices, key: answered})
    assert other.devices == devices
    assert not other.says_as(news)
